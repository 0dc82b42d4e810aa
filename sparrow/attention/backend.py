"""Which implementation of decode attention runs: by name from YAML, `auto` by device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparrow.attention.flex import FlexDecode
from sparrow.attention.gather import GatherDecode
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.errors import UserError
from sparrow.protocols import Attention


class DecodeFactory(Protocol):
    """Attention of one decode step over a pool; dense where `pattern` is None."""

    def __call__(
        self, pool: PagePool, block_size: int, block_table_BN: Tensor, lengths_B: Tensor, pattern: SparsePattern | None
    ) -> Attention: ...


# The kernel's matrix products want at least this many columns.
FLEX_MINIMUM = 16


def decode_attention(name: str, device: torch.device, page_size: int, head_dim: int) -> DecodeFactory:
    """`gather` on any device, `flex` on CUDA; `auto` takes flex where it can.

    Raises:
        UserError: `flex` where it cannot run: on another device than CUDA (its CPU kernel wants page lists as wide as
            the pool), or with pages or heads below 16.
    """
    fits = min(page_size, head_dim) >= FLEX_MINIMUM
    if name == "auto":
        name = "flex" if device.type == "cuda" and fits else "gather"
    if name == "flex" and device.type != "cuda":
        raise UserError(f"kv_cache.backend: flex needs a CUDA device, this run is on {device}; use gather or auto")
    if name == "flex" and not fits:
        raise UserError(
            f"kv_cache.backend: flex needs page_size {page_size} and head_dim {head_dim} to be at least "
            f"{FLEX_MINIMUM}; use gather or auto"
        )
    return FlexDecode if name == "flex" else GatherDecode
