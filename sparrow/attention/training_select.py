"""Which pages the queries of a training forward read: what their decode steps would select. No gradient flows here.

Axes: C queries of a chunk, H query heads, K KV heads, D head dim, S tokens, P pages, M landmarks per page.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.select import candidate_pages, select_pages


def page_landmarks(pattern: SparsePattern, k_SKD: Tensor) -> Tensor:
    """[K, P, M, D] of one document; those of an incomplete last page are never looked at."""
    missing = -len(k_SKD) % pattern.page_size
    keys = F.pad(k_SKD, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, pattern.page_size))
    return pattern.selector.landmarks(keys.permute(2, 0, 1, 3))


def kept_pages(pattern: SparsePattern, q_CHD: Tensor, landmarks_KPMD: Tensor, position_C: Tensor) -> Tensor:
    """True where a query reads a page, [C, K, P]; P covers the last position."""
    K, P = landmarks_KPMD.shape[:2]
    pages_C = position_C // pattern.page_size + 1
    candidates_CP = candidate_pages(pages_C, P, pattern.sink_pages, pattern.recent_pages)
    scores_CKP = pattern.selector.score(q_CHD.unflatten(1, (K, -1)), landmarks_KPMD[None], candidates_CP)
    width = min(pattern.budget.max_pages_until(P * pattern.page_size), P)
    budget_C = pattern.budget.pages(position_C + 1)
    pages_CKW, _ = select_pages(scores_CKP, candidates_CP, pages_C, budget_C, width)
    return torch.zeros_like(scores_CKP, dtype=torch.bool).scatter_(2, pages_CKW, True)
