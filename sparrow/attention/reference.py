"""The specification of sparse decode: one sequence, one layer, eager, no paging. Every backend is held against it.

Axes: H query heads, K KV heads, G = H / K, D head dim, T cached tokens including the one being decoded, P pages.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparrow.protocols import Selector


def select_reference(
    q_HD: Tensor, keys_TKD: Tensor, budget: int, selector: Selector, page_size: int, sink_pages: int, recent_pages: int
) -> list[list[int]]:
    """Pages that each KV head keeps, in order of position (paper, block-sparse decode).

    Kept are the first `sink_pages`, the last `recent_pages` (the open page is the last), and the best of the rest by
    the selector's score, `budget` pages in all; all of them where the sequence has no more than that.
    """
    T, K, D = keys_TKD.shape
    num_pages = math.ceil(T / page_size)
    if num_pages <= budget:
        return [list(range(num_pages))] * K
    candidates = list(range(sink_pages, num_pages - recent_pages))
    complete = keys_TKD[: (num_pages - 1) * page_size].unflatten(0, (num_pages - 1, page_size))  # [P-1, page, K, D]
    landmarks_KPMD = selector.landmarks(complete.permute(2, 0, 1, 3))
    eligible_P = torch.zeros(num_pages - 1, dtype=torch.bool, device=q_HD.device)
    eligible_P[candidates] = True
    scores_KP = selector.score(q_HD.view(1, K, -1, D), landmarks_KPMD[None], eligible_P[None])[0]
    reserved = list(range(sink_pages)) + list(range(num_pages - recent_pages, num_pages))
    kept = []
    for scores_P in scores_KP.tolist():
        ranked = sorted(candidates, key=scores_P.__getitem__, reverse=True)
        kept.append(sorted(reserved + ranked[: budget - len(reserved)]))
    return kept


def attend_reference(
    q_HD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, pages: list[list[int]], page_size: int
) -> Tensor:
    """Softmax attention of one query over the tokens of the kept pages; `pages` holds one list per KV head. [H, D]."""
    T, K, D = keys_TKD.shape
    outputs = []
    for head, q_GD in enumerate(q_HD.view(K, -1, D)):
        tokens = [t for page in pages[head] for t in range(page * page_size, min((page + 1) * page_size, T))]
        scores = q_GD @ keys_TKD[tokens, head].T / math.sqrt(D)
        outputs.append(scores.softmax(-1) @ values_TKD[tokens, head])
    return torch.cat(outputs)
