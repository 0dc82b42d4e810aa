"""The memory of the paged KV cache: one pool of blocks, each made of whole pages, with landmarks per page.

Axes: K KV heads, S slots (tokens) of the pool, D head dim, P pages of the pool, M landmarks per page, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import Selector
from sparrow.transfer import to_host

NULL_BLOCK = 0  # Padding rows and the unused tail of block tables point here; no sequence owns it.


def movable(x: Tensor) -> Tensor:
    """The tensor, or its bytes where its dtype has 8 bits: PyTorch computes with those, but indexes them nowhere."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


class PagePool:
    """Keys and values of every layer, [K, S, D] each; a slot is block * block_size + offset.

    Args:
        config: shape of the model.
        num_blocks: blocks that sequences can own; one more is reserved as the null block.
        block_size, page_size: tokens; a block is `block_size // page_size` consecutive pages.
        landmarks_per_page: M, 0 for a pool without landmarks.
        landmark_layers: the layers that keep landmarks.
        dtype, landmark_dtype: of keys and values, and of landmarks; the latter may have 8 bits.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        page_size: int,
        landmarks_per_page: int,
        landmark_layers: range,
        device: torch.device | str,
        dtype: torch.dtype,
        landmark_dtype: torch.dtype | None = None,
    ) -> None:
        assert block_size % page_size == 0
        slots = (num_blocks + 1) * block_size
        shape = (config.num_kv_heads, slots, config.head_dim)
        layers = range(config.num_layers)
        self.page_size, self.block_size = page_size, block_size
        self.num_pages = slots // page_size
        # Zeros, not empty: masked slots are still multiplied by a probability of 0, and 0 * NaN would spread.
        self.keys_KSD = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        self.values_KSD = [torch.zeros(shape, device=device, dtype=dtype) for _ in layers]
        marks = (config.num_kv_heads, self.num_pages, landmarks_per_page, config.head_dim)
        self.landmarks_KPMD = {
            i: torch.zeros(marks, device=device, dtype=landmark_dtype or dtype) for i in landmark_layers
        }

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Stores the keys (after RoPE) and values of T tokens."""
        self.keys_KSD[layer].index_copy_(1, slots_T, k_TKD.transpose(0, 1))
        self.values_KSD[layer].index_copy_(1, slots_T, v_TKD.transpose(0, 1))

    def update_landmarks(self, layer: int, pages_N: Tensor, selector: Selector) -> None:
        """Recomputes the landmarks of the given pages.

        Pages that are still open get a provisional value; it is rewritten when their last token arrives, before they
        can become candidates.
        """
        keys = self.keys_KSD[layer].unflatten(1, (self.num_pages, self.page_size)).index_select(1, pages_N)
        movable(self.landmarks_KPMD[layer]).index_copy_(1, pages_N, movable(selector.landmarks(keys)))

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block of every layer, landmarks included."""
        for x in self._by_block():
            x[:, target] = x[:, source]

    def swap_out(self, blocks: Sequence[int]) -> list[Tensor]:
        """The blocks' keys, values and landmarks of every layer, on the host: exact copies."""
        return to_host(x.index_select(1, self._index(blocks)) for x in self._by_block())

    def swap_in(self, saved: Sequence[Tensor], blocks: Sequence[int]) -> None:
        """Writes what `swap_out` returned into as many blocks, which need not be those of before."""
        for x, copy in zip(self._by_block(), saved, strict=True):
            x.index_copy_(1, self._index(blocks), copy.to(x.device, non_blocking=True))

    def _by_block(self) -> list[Tensor]:
        """Views [K, blocks, ...] of everything a block holds."""
        tensors = [*self.keys_KSD, *self.values_KSD, *self.landmarks_KPMD.values()]
        blocks = self.keys_KSD[0].shape[1] // self.block_size
        return [movable(x).unflatten(1, (blocks, -1)) for x in tensors]

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.keys_KSD[0].device)
