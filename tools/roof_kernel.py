"""The kernel behind the roof: every program reads its share of a tensor and writes one number."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROUNDS = 4096, 16


@triton.jit
def _read_kernel(x, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROUNDS):
        total += tl.load(x + (program * ROUNDS + i) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + program, tl.sum(total, 0))


def reader(x: Tensor) -> Callable[[], object]:
    """A function that reads all of `x`, whose length is a multiple of `BLOCK * ROUNDS`."""
    programs = x.numel() // (BLOCK * ROUNDS)
    out = torch.empty(programs, device=x.device)
    return lambda: _read_kernel[(programs,)](x, out, BLOCK, ROUNDS, num_warps=8)
