"""FlexAttention over page lists, compiled by torch.compile.

`kv_num_blocks` is read at run time: budgets that change cost no recompile, and a captured graph serves them all. What
decides the speed are the kernel's options, the number of splits above all.

Axes: R = B * K folded rows, K KV heads, G query heads per KV head, D head dim, S slots, W list width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

RECOMPILE_LIMIT = 256
WIDE_HEAD = 256  # bytes of a head
QUERY_BLOCK = 128  # The kernel's query block; the group's rows fill the start of one.


def attend_flex(
    q_RGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, lists_RW: Tensor, counts_R: Tensor, lengths_B: Tensor,
    slots_B: Tensor, page_size: int,
) -> Tensor:  # fmt: skip
    """See `sparrow.attention.fused.ListAttention`."""
    R, G, D = q_RGD.shape
    heads, slots = keys_KSD.shape[:2]
    head_K = torch.arange(heads, device=q_RGD.device)
    last_R = (slots_B[:, None] + head_K * slots).flatten()
    keys, values = keys_KSD.view(1, 1, -1, D), values_KSD.view(1, 1, -1, D)
    kernel = _compiled(page_size, _splits(R, lists_RW.shape[1] * page_size), D * q_RGD.itemsize > WIDE_HEAD)
    out = kernel(q_RGD[:, None], keys, values, lists_RW[:, None, None], counts_R[:, None, None], last_R)
    return out.view(R, G, D)


def _splits(rows: int, tokens: int) -> int:
    """Splits of each list: enough programs to fill the device, at most one per 512 tokens (measured on an H200)."""
    wanted = max(1, min(640 // rows, tokens // 512))
    return 1 << (wanted.bit_length() - 1)


@cache
def _compiled(size: int, splits: int, wide: bool) -> Any:
    """The compiled kernel for lists of pages of `size` tokens; torch.compile specialises it per shape.

    Args:
        wide: tiles of 128 tokens would not fit into shared memory.
    """
    options: Any = {"SPLIT_KV": splits, "num_warps": 2, "num_stages": 4}
    if size >= QUERY_BLOCK:
        options = {"SPLIT_KV": splits, "num_warps": 4, "num_stages": 3, "BLOCK_N": 32 if wide else QUERY_BLOCK}

    def attend(q_R1GD: Tensor, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, last_R: Tensor) -> Tensor:
        def tail(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            # Only the open page holds slots beyond the sequence; every other listed page is full.
            return (slot // size != last_R[row] // size) | (slot <= last_R[row])

        lengths = (q_R1GD.shape[2], keys.shape[2])
        mask = BlockMask(lengths, counts, lists, None, None, None, None, None, None, (QUERY_BLOCK, size), tail)
        return flex_attention(q_R1GD, keys, values, block_mask=mask, kernel_options=options)

    # One entry per batch bucket, pool size and list width; the default, 8, is a process's second model.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(attend, dynamic=False, fullgraph=True)
