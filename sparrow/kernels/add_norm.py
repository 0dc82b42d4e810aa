"""Residual connection and RMSNorm in one kernel, over a projection that may still lie in shares.

Axes: M rows, E hidden size, C shares of the projection.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch, release_successor


@triton.jit(do_not_specialize=["M", "C"])
def _add_norm_kernel(residual, shares, gain, out, M, E, C, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_successor(PDL)  # a few rows: the next projection's prefetch has the memory to itself
    await_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < E
    dtype = residual.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for c in range(C):
        total += tl.load(shares + (c * M + row) * E + e, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(residual + row * E + e, mask=inside, other=0.0)
    # The projection's output is rounded before it is added, as a module's would be.
    x = x + total.to(dtype)
    tl.store(residual + row * E + e, x, mask=inside)
    y = x.to(tl.float32)
    y = (y * tl.rsqrt(tl.sum(y * y, 0) / E + eps)).to(dtype)
    tl.store(out + row * E + e, y * tl.load(gain + e, mask=inside, other=0.0), mask=inside)


def add_norm(residual_ME: Tensor, shares_CME: Tensor, gain_E: Tensor, eps: float) -> Tensor:
    """Adds the sum of the shares to the residual, in place, and returns its norm times the gain, [M, E].

    No shares (C = 0) leave the residual as it is.
    """
    M, E = residual_ME.shape
    out = torch.empty_like(residual_ME)
    pdl = dependent_launch()
    block = triton.next_power_of_2(E)
    _add_norm_kernel[(M,)](
        residual_ME, shares_CME, gain_E, out, M, E, len(shares_CME), eps, block, pdl,
        num_warps=8 if block > 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return out
