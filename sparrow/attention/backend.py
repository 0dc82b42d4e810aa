"""Which implementation of decode attention runs: by name from YAML, `auto` by device."""

from __future__ import annotations

from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from sparrow.attention.gather import GatherDecode
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.errors import UserError
from sparrow.protocols import Attention

Backend = Literal["auto", "gather", "flex", "triton"]

# The kernels' matrix products want at least this many columns, and powers of two.
SMALLEST_TILE = 16
WIDEST_HEAD = 512  # bytes: tiles of 64 keys and values, three deep, must fit into shared memory
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class DecodeFactory(Protocol):
    """Attention of one decode step over a pool; dense where `pattern` is None."""

    def __call__(
        self, pool: PagePool, block_size: int, block_table_BN: Tensor, lengths_B: Tensor, pattern: SparsePattern | None
    ) -> Attention: ...


def decode_attention(
    name: Backend, device: torch.device, dtype: torch.dtype, page_size: int, head_dim: int
) -> DecodeFactory:
    """`gather` on any device, `triton` and `flex` on CUDA; `auto` takes triton where it can.

    Raises:
        UserError: a CUDA backend on another device (FlexAttention's CPU kernel wants page lists as wide as the
            pool), or with a page size, head dimension or dtype that its kernels lack.
    """
    obstacle = _obstacle(device, dtype, page_size, head_dim)
    if name == "gather" or (name == "auto" and obstacle is not None):
        return GatherDecode
    if obstacle is not None:
        raise UserError(f"kv_cache.backend: {name} needs {obstacle}; use gather or auto")
    # Imported here, as Triton is not installed where there is no GPU.
    from sparrow.attention.fused import FusedDecode
    from sparrow.attention.listed import attend_triton

    if name == "flex":
        from sparrow.attention.flex import attend_flex

        return partial(FusedDecode, attend_flex)
    return partial(FusedDecode, attend_triton)


def runs_kernels(device: torch.device, dtype: torch.dtype, page_size: int, head_dim: int) -> bool:
    """Whether the CUDA kernels over pages can run there, in decode and in training."""
    return _obstacle(device, dtype, page_size, head_dim) is None


def _obstacle(device: torch.device, dtype: torch.dtype, page_size: int, head_dim: int) -> str | None:
    """What keeps the CUDA kernels from running, None where nothing does."""
    if device.type != "cuda":
        return f"a CUDA device, this run is on {device}"
    if dtype not in DTYPES:
        return f"one of {', '.join(map(str, DTYPES))}, the cache is {dtype}"
    for key, value in (("page_size", page_size), ("head_dim", head_dim)):
        if value < SMALLEST_TILE or value & (value - 1):
            return f"{key} {value} to be a power of two and at least {SMALLEST_TILE}"
    if head_dim * dtype.itemsize > WIDEST_HEAD:
        return f"head_dim {head_dim} in {dtype} to have at most {WIDEST_HEAD} bytes"
    return None
