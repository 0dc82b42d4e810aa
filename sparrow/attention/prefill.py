"""Prefill: dense causal attention over prompts, whose keys and values fill the pool.

Axes: T tokens of the pass, C tokens cached before, L = C + T, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sparrow.attention.packed import PackedCausal, for_sdpa
from sparrow.attention.pool import PagePool
from sparrow.protocols import Selector


class _Writer:
    """Stores the keys and values of T tokens, and the landmarks of the pages they are in.

    A page that an earlier chunk began gets its landmarks from the keys in the pool, those of that chunk included.
    """

    def __init__(self, pool: PagePool, slots_T: Tensor, selector: Selector | None) -> None:
        self.pool, self.slots_T, self.selector = pool, slots_T, selector
        self.pages_N = (slots_T // pool.page_size).unique()

    def write(self, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self.pool.write(layer, self.slots_T, k_TKD, v_TKD)
        if self.selector is not None and layer in self.pool.landmarks_KPMD:
            self.pool.update_landmarks(layer, self.pages_N, self.selector)


class Prefill:
    """Attention of a pass over packed whole prompts, or first chunks of prompts.

    Args:
        slots_T: pool slot of each packed token.
        lengths: tokens of each prompt.
        selector: makes the landmarks of the layers that keep some; None for a pool without.
    """

    def __init__(self, pool: PagePool, slots_T: Tensor, lengths: Sequence[int], selector: Selector | None) -> None:
        self.writer = _Writer(pool, slots_T, selector)
        self.causal = PackedCausal(lengths, slots_T.device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]; writes keys, values and landmarks of this layer first."""
        self.writer.write(layer, k_TKD, v_TKD)
        return self.causal(layer, q_THD, k_TKD, v_TKD)


class PrefillChunk:
    """Attention of a later chunk of one prompt, to the tokens before it in the pool and causally to itself.

    Args:
        slots_T: pool slot of each token of the chunk.
        cached_slots_C: those of all tokens before it, in order.
        selector: as for `Prefill`.
    """

    def __init__(self, pool: PagePool, slots_T: Tensor, cached_slots_C: Tensor, selector: Selector | None) -> None:
        self.writer = _Writer(pool, slots_T, selector)
        self.pool, self.slots_L = pool, torch.cat((cached_slots_C, slots_T))

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]; writes keys, values and landmarks of this layer first."""
        self.writer.write(layer, k_TKD, v_TKD)
        q_1HTD = q_THD.transpose(0, 1)[None]
        k_1KLD, v_1KLD = (
            x[layer].index_select(1, self.slots_L)[None] for x in (self.pool.keys_KSD, self.pool.values_KSD)
        )
        mask = causal_lower_right(q_1HTD.shape[2], k_1KLD.shape[2])
        k_1KLD, v_1KLD, grouped = for_sdpa(q_1HTD, k_1KLD, v_1KLD)
        out_1HTD = F.scaled_dot_product_attention(q_1HTD, k_1KLD, v_1KLD, attn_mask=mask, enable_gqa=grouped)
        return out_1HTD[0].transpose(0, 1)
