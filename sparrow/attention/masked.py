"""Sparse attention of a training forward: for each response token the pages that its decode step would select.

Differentiable through queries, keys and values; the selection itself carries no gradient. Queries go in chunks, each
with the mask of its own rows, made again in the backward pass: memory grows with the length, time with its square.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, L tokens of one document, C queries of a chunk,
S keys up to the last of them, P their pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparrow.attention.packed import for_sdpa
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.training_select import kept_pages, page_landmarks

CHUNK_CELLS = 2**22  # C * S: per KV head, the bytes of a chunk's mask


class MaskedSparse:
    """Each response token sees the pages its decode step saw; prompt tokens are dense (paper, DistillSparse).

    Args:
        lengths, prompt_lengths: tokens of each packed document and how many of them are its prompt.
        pattern: the rule of selection that the rollout used.
    """

    def __init__(self, lengths: Sequence[int], prompt_lengths: Sequence[int], pattern: SparsePattern) -> None:
        self.lengths, self.prompt_lengths = list(lengths), list(prompt_lengths)
        self.pattern = pattern

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, D] to [T, H, D]."""
        documents = zip(*(x.split(self.lengths) for x in (q_THD, k_TKD, v_TKD)), self.prompt_lengths, strict=True)
        return torch.cat([self._document(layer, *document) for document in documents])

    def _document(self, layer: int, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, prompt_length: int) -> Tensor:
        length = len(q_LHD)
        dense = length if layer < self.pattern.dense_layers else min(prompt_length, length)
        outputs = [_attend(q_LHD[:dense], k_LKD[:dense], v_LKD[:dense], None)]
        rows = max(1, CHUNK_CELLS // length)
        for start in range(dense, length, rows):
            stop = min(start + rows, length)
            # Without the checkpoint autograd would hold the masks of all chunks: length times length again.
            outputs.append(
                checkpoint(
                    self._chunk, q_LHD[start:stop], k_LKD[:stop], v_LKD[:stop],
                    use_reentrant=False, preserve_rng_state=False,
                )
                if torch.is_grad_enabled()
                else self._chunk(q_LHD[start:stop], k_LKD[:stop], v_LKD[:stop])
            )  # fmt: skip
        return torch.cat(outputs)

    def _chunk(self, q_CHD: Tensor, k_SKD: Tensor, v_SKD: Tensor) -> Tensor:
        """The last C queries of S tokens."""
        group = q_CHD.shape[1] // k_SKD.shape[1]
        mask_KCS = self._mask(q_CHD.detach(), k_SKD.detach())
        return _attend(q_CHD, k_SKD, v_SKD, mask_KCS.repeat_interleave(group, 0))

    def _mask(self, q_CHD: Tensor, k_SKD: Tensor) -> Tensor:
        """True where a query reads a key, [K, C, S]."""
        rule = self.pattern
        C, S = len(q_CHD), len(k_SKD)
        position_S = torch.arange(S, device=q_CHD.device)
        position_C = position_S[S - C :]
        kept_CKP = kept_pages(rule, q_CHD, page_landmarks(rule, k_SKD), position_C)
        kept_CKS = kept_CKP.repeat_interleave(rule.page_size, 2)[..., :S]
        return kept_CKS.transpose(0, 1) & (position_C[:, None] >= position_S)


def _attend(q_CHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, mask_HCS: Tensor | None) -> Tensor:
    """[C, H, D], causal where no mask is given."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q_CHD, k_SKD, v_SKD))
    k, v, grouped = for_sdpa(q, k, v, mask_HCS is not None)
    mask = None if mask_HCS is None else mask_HCS[None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out[0].transpose(0, 1)
