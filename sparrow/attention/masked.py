"""Sparse attention of a training forward, in its masked form: the pages that decode would select, as a dense mask.

Differentiable through queries, keys and values; the selection itself carries no gradient. Holds a [K, L, L] mask per
document, so it is for short sequences; it is also the oracle of the linear-memory form.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, L tokens of one document, P its pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.select import candidate_pages, select_pages
from sparrow.errors import UserError

MAX_LENGTH = 8192  # [8 heads, 8192, 8192] bool is 512 MiB


class MaskedSparse:
    """Each response token sees the pages its decode step saw; prompt tokens are dense (paper, DistillSparse).

    Args:
        lengths, prompt_lengths: tokens of each packed document and how many of them are its prompt.
        pattern: the rule of selection that the rollout used.
    """

    def __init__(self, lengths: Sequence[int], prompt_lengths: Sequence[int], pattern: SparsePattern) -> None:
        if max(lengths) > MAX_LENGTH:
            raise UserError(
                f"sparse training forward: a sequence of {max(lengths)} tokens is above {MAX_LENGTH}, the limit of the "
                "masked form (it holds a length x length mask); lower max_new_tokens or switch the distiller off"
            )
        self.lengths, self.prompt_lengths = list(lengths), list(prompt_lengths)
        self.pattern = pattern

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, D] to [T, H, D]."""
        documents = zip(*(x.split(self.lengths) for x in (q_THD, k_TKD, v_TKD)), self.prompt_lengths, strict=True)
        return torch.cat([self._document(layer, *document) for document in documents])

    def _document(self, layer: int, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, prompt_length: int) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_LHD, k_LKD, v_LKD))
        group = q.shape[1] // k.shape[1]
        if layer < self.pattern.dense_layers:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)[0].transpose(0, 1)
        mask_KLL = self._mask(q_LHD.detach(), k_LKD.detach(), prompt_length).repeat_interleave(group, 0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_KLL, enable_gqa=group > 1)[0].transpose(0, 1)

    def _mask(self, q_LHD: Tensor, k_LKD: Tensor, prompt_length: int) -> Tensor:
        """True where a query reads a key, [K, L, L]."""
        rule = self.pattern
        L, K, _ = k_LKD.shape
        position_L = torch.arange(L, device=q_LHD.device)
        pages_L = position_L // rule.page_size + 1
        width = -(-L // rule.page_size)
        keys = F.pad(k_LKD, (0, 0, 0, 0, 0, width * rule.page_size - L)).unflatten(0, (width, rule.page_size))
        landmarks_KPMD = rule.selector.landmarks(keys.permute(2, 0, 1, 3))
        candidates_LP = candidate_pages(pages_L, width, rule.sink_pages, rule.recent_pages)
        scores_LKP = rule.selector.score(
            q_LHD.unflatten(1, (K, -1)), landmarks_KPMD.expand(L, *landmarks_KPMD.shape), candidates_LP
        )
        budget_L = torch.where(position_L < prompt_length, width, rule.budget.pages(position_L + 1))
        pages_LKW, _ = select_pages(scores_LKP, candidates_LP, pages_L, budget_L, width)
        kept_LKP = torch.zeros_like(scores_LKP, dtype=torch.bool).scatter_(2, pages_LKW, True)
        kept_LKL = kept_LKP.repeat_interleave(rule.page_size, 2)[..., :L]
        return kept_LKL.transpose(0, 1) & (position_L[:, None] >= position_L)
