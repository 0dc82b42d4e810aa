"""Prefill: dense causal attention over packed prompts, whose keys and values fill the pool.

Axes: T packed tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.attention.pool import PagePool
from sparrow.protocols import Selector


class Prefill:
    """Attention of a prefill pass.

    Args:
        slots_T: pool slot of each packed token.
        lengths: tokens of each prompt.
        selector: makes the landmarks of the layers that keep some; None for a pool without.
    """

    def __init__(self, pool: PagePool, slots_T: Tensor, lengths: Sequence[int], selector: Selector | None) -> None:
        self.pool, self.slots_T, self.selector = pool, slots_T, selector
        self.causal = PackedCausal(lengths, slots_T.device)
        self.pages_N = (slots_T // pool.page_size).unique()

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]; writes keys, values and landmarks of this layer first."""
        self.pool.write(layer, self.slots_T, k_TKD, v_TKD)
        if self.selector is not None and layer in self.pool.landmarks_KPMD:
            self.pool.update_landmarks(layer, self.pages_N, self.selector)
        return self.causal(layer, q_THD, k_TKD, v_TKD)
