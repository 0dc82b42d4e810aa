"""What all layers of a decode step share, in one kernel: each row's slot, and its blocks as lists for dense layers.

Axes: B rows, N blocks per row, K KV heads, R = B * K folded rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _plan_kernel(
    table, lengths, slots, lists, counts, num_blocks, pool_blocks,
    K: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    last = tl.load(lengths + row) - 1
    tl.store(slots + row, tl.load(table + row * num_blocks + last // SIZE) * SIZE + last % SIZE)
    n = tl.arange(0, BLOCK)
    block = tl.load(table + row * num_blocks + n, mask=n < num_blocks, other=0)
    for head in tl.static_range(K):
        out = row * K + head
        tl.store(lists + out * num_blocks + n, (block + head * pool_blocks).to(tl.int32), mask=n < num_blocks)
        tl.store(counts + out, (last // SIZE + 1).to(tl.int32))


def plan_rows(
    table_BN: Tensor, lengths_B: Tensor, heads: int, pool_blocks: int, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot of each row's newest token [B], int64; its blocks per KV head [R, N] and their number [R], int32.

    A listed block is head * pool_blocks + block: a number of the pool with heads and blocks flattened.
    """
    B, N = table_BN.shape
    slots_B = torch.empty_like(lengths_B)
    lists_RN = torch.empty(B * heads, N, dtype=torch.int32, device=lengths_B.device)
    counts_R = torch.empty(B * heads, dtype=torch.int32, device=lengths_B.device)
    _plan_kernel[(B,)](
        table_BN, lengths_B, slots_B, lists_RN, counts_R, N, pool_blocks, heads, block_size, triton.next_power_of_2(N),
        num_warps=4,
    )  # fmt: skip
    return slots_B, lists_RN, counts_R
