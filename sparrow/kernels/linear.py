"""Projections of a few rows: the weights stream once, and every multiprocessor streams the same share of them.

With a few dozen rows nothing counts but the weights' way to the multiprocessors, so a block's share of the matrix is
whatever spreads evenly, not a power of two: 74 of 9,728 rows, masked up to a tile. Tall shares keep the input's
traffic small beside the weights', so narrow matrices are split along K instead. The shares of K are left unsummed, in
fp32; the kernel that reads them adds them up, and a split costs no kernel of its own. Each block prefetches weights
into L2 before it waits for the kernel that makes its input. The gated variant joins SwiGLU's two projections and their
product.

Axes: M rows, K input features, N output features, C shares of K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch, release_successor

MOST_ROWS = 64  # Beyond, the library's kernels win: the weights are no longer all that counts.


@dataclass(frozen=True)
class LinearOptions:
    """Launch options of a projection.

    Attributes:
        rows: rows of the weight matrix per block, any number: chosen so that all multiprocessors get the same share.
        tile_k: inputs per round.
        shares: blocks along K.
        num_warps, num_stages: Triton's.
        fetch: inputs per row whose weights are prefetched, 0 for none.
    """

    rows: int
    tile_k: int
    shares: int
    num_warps: int
    num_stages: int
    fetch: int

    def fits(self, K: int) -> bool:
        """Whether the rounds divide a share; rows are masked, inputs are not."""
        return K % (self.shares * self.tile_k) == 0 and K // self.shares >= self.fetch


@triton.jit
def _prefetch(pointers):
    """Brings the cache lines of these addresses into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M", "rows_per_block"])
def _linear_kernel(
    x, weight, out, M, N, K, rows_per_block,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SHARES: tl.constexpr, FETCH: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    n = block * rows_per_block + tl.arange(0, TILE_N)
    inside = n < tl.minimum((block + 1) * rows_per_block, N)
    depth = K // SHARES
    first = part * depth
    rows = weight + n.to(tl.int64)[:, None] * K + first
    if FETCH > 0:
        line = tl.arange(0, FETCH // 64) * 64
        # Rows outside fetch the block's first again, which costs nothing.
        fetched = weight + tl.where(inside, n, block * rows_per_block).to(tl.int64)[:, None] * K + first
        _prefetch(fetched + line[None, :])
        if GATED:
            _prefetch(fetched + N.to(tl.int64) * K + line[None, :])
    await_predecessor(PDL)
    m = tl.arange(0, TILE_M)
    k = tl.arange(0, TILE_K)
    source = x + m[:, None] * K + first + k[None, :]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    up = tl.zeros([TILE_M, TILE_N], tl.float32)
    for at in range(0, depth, TILE_K):
        a = tl.load(source + at, mask=m[:, None] < M, other=0.0)
        w = tl.load(rows + at + k[None, :], mask=inside[:, None], other=0.0)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            v = tl.load(rows + N.to(tl.int64) * K + at + k[None, :], mask=inside[:, None], other=0.0)
            up = tl.dot(a, tl.trans(v), up, input_precision="ieee")
    release_successor(PDL)
    if GATED:
        gate = acc.to(x.dtype.element_ty).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(x.dtype.element_ty)
        acc = (gate * up.to(x.dtype.element_ty)).to(tl.float32)
    target = out + (part * M + m[:, None]) * N + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=(m[:, None] < M) & inside[None, :])


@triton.jit
def _swiglu_kernel(x, out, N, TILE: tl.constexpr, PDL: tl.constexpr):
    await_predecessor(PDL)
    release_successor(PDL)
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(x + row * 2 * N + n, mask=n < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + n, mask=n < N, other=0.0)
    gate = (gate * tl.sigmoid(gate)).to(up.dtype)
    tl.store(out + row * N + n, gate * up, mask=n < N)


def linear(x_MK: Tensor, weight_NK: Tensor, options: LinearOptions | None, dtype: torch.dtype | None = None) -> Tensor:
    """The product in shares that sum to it, [C, M, N]; `options` None takes the library's kernel, C = 1.

    Args:
        dtype: of the result where C = 1, the input's by default; shares are fp32.
    """
    M, N = len(x_MK), len(weight_NK)
    if options is None or M > MOST_ROWS:
        return library_linear(x_MK, weight_NK, dtype or x_MK.dtype)[None]
    out_dtype = torch.float32 if options.shares > 1 else dtype or x_MK.dtype
    out = torch.empty(options.shares, M, N, dtype=out_dtype, device=x_MK.device)
    _launch(x_MK, weight_NK, out, N, options, gated=False)
    return out


def library_linear(x_MK: Tensor, weight_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """cuBLAS; a wider output than the inputs is the accumulator unrounded."""
    if dtype == x_MK.dtype:
        return F.linear(x_MK, weight_NK)
    return torch.mm(x_MK, weight_NK.T, out_dtype=dtype)


def swiglu(x_MK: Tensor, weight_2NK: Tensor, options: LinearOptions | None) -> Tensor:
    """silu(x @ gate) * (x @ up), [M, N]; `weight_2NK` holds the gate's rows, then up's."""
    M = x_MK.shape[0]
    N = weight_2NK.shape[0] // 2
    out = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if options is None or M > MOST_ROWS:
        both = F.linear(x_MK, weight_2NK)
        pdl = dependent_launch()
        _swiglu_kernel[(M, triton.cdiv(N, 1024))](both, out, N, 1024, pdl, num_warps=4, launch_pdl=pdl)
    else:
        _launch(x_MK, weight_2NK, out, N, options, gated=True)
    return out


def _launch(x_MK: Tensor, weight: Tensor, out: Tensor, N: int, options: LinearOptions, gated: bool) -> None:
    M, K = x_MK.shape
    assert options.fits(K) and x_MK.is_contiguous() and weight.is_contiguous()
    pdl = dependent_launch()
    _linear_kernel[(triton.cdiv(N, options.rows), options.shares)](
        x_MK, weight, out, M, N, K, options.rows, max(16, triton.next_power_of_2(M)),
        max(16, triton.next_power_of_2(options.rows)), options.tile_k, options.shares, options.fetch, gated, pdl,
        num_warps=options.num_warps, num_stages=options.num_stages, launch_pdl=pdl,
    )  # fmt: skip
