"""Decode attention by compiled FlexAttention over page lists (CUDA).

The GQA group is folded into query rows and KV heads into batch rows, so that each KV head can have its own page list;
keys and values are one pool shared by the batch, and page numbers carry the head. Dense layers walk the same memory in
whole blocks. `kv_num_blocks` is read at run time: budgets that change cost no recompile. The cache is written outside
the compiled region: inside it, functionalisation would copy the pool.

Axes: B rows, K KV heads, R = B * K folded rows, G query heads per KV head, D head dim, S slots, W list width.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.step import DecodeStep

RECOMPILE_LIMIT = 64
QUERY_BLOCK = 128  # The kernel's query block; the group's rows fill the start of one.


class FlexDecode:
    """Attention of one decode step; see `sparrow.attention.backend.DecodeFactory`.

    Rows are padded to a power of two, so that a shrinking batch compiles few shapes; padding rows read the null block.
    """

    def __init__(
        self, pool: PagePool, block_size: int, block_table_BN: Tensor, lengths_B: Tensor, pattern: SparsePattern | None
    ) -> None:
        self.rows = len(lengths_B)
        self.padding = (1 << (self.rows - 1).bit_length()) - self.rows
        table = F.pad(block_table_BN, (0, 0, 0, self.padding))
        lengths = F.pad(lengths_B, (0, self.padding), value=1)
        self.block_size = block_size
        width = table.shape[1] * (block_size // pool.page_size)
        self.step = DecodeStep(pool, block_size, table, lengths, width, pattern)
        self.width = width if pattern is None else min(pattern.budget.max_pages, width)

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """[B, H, D] queries, [B, K, D] keys and values of the current tokens to [B, H, D]."""
        step = self.step
        q_BHD, k_BKD, v_BKD = (F.pad(x, (0, 0, 0, 0, 0, self.padding)) for x in (q_BHD, k_BKD, v_BKD))
        step.write(layer, k_BKD, v_BKD)
        q_BKGD = q_BHD.unflatten(1, (k_BKD.shape[1], -1))
        if step.is_sparse(layer):
            pages_BKW, counts_B = step.select(layer, q_BKGD, self.width)
            out = self._attend(layer, q_BKGD, pages_BKW, counts_B, step.pool.page_size)
        else:
            blocks = step.block_table_BN[:, None].expand(-1, k_BKD.shape[1], -1)
            out = self._attend(layer, q_BKGD, blocks, (step.lengths_B - 1) // self.block_size + 1, self.block_size)
        return out[: self.rows].flatten(1, 2)

    def _attend(self, layer: int, q_BKGD: Tensor, lists_BKW: Tensor, counts_B: Tensor, size: int) -> Tensor:
        """Attention over lists of pages or blocks of `size` tokens."""
        B, K, G, D = q_BKGD.shape
        keys_KSD, values_KSD = self.step.pool.keys_KSD[layer], self.step.pool.values_KSD[layer]
        slots = keys_KSD.shape[1]
        head_K = torch.arange(K, device=q_BKGD.device)
        lists = (lists_BKW + (head_K * (slots // size))[:, None]).view(B * K, 1, 1, -1).int()
        counts = counts_B.repeat_interleave(K).view(B * K, 1, 1).int()
        last_R = (self.step.slots_B[:, None] + head_K * slots).flatten()
        q_R1GD = q_BKGD.reshape(B * K, 1, G, D)
        keys, values = keys_KSD.view(1, 1, -1, D), values_KSD.view(1, 1, -1, D)
        out = _compiled(size)(q_R1GD, keys, values, lists, counts, last_R)
        return out.view(B, K, G, D)


@cache
def _compiled(size: int) -> Any:
    """The compiled kernel for lists of `size` tokens; torch.compile specialises it per shape."""

    def attend(q_R1GD: Tensor, keys: Tensor, values: Tensor, lists: Tensor, counts: Tensor, last_R: Tensor) -> Tensor:
        def tail(row: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            # Only the open page holds slots beyond the sequence; every other listed page is full.
            return (slot // size != last_R[row] // size) | (slot <= last_R[row])

        lengths = (q_R1GD.shape[2], keys.shape[2])
        mask = BlockMask(lengths, counts, lists, None, None, None, None, None, None, (QUERY_BLOCK, size), tail)
        return flex_attention(q_R1GD, keys, values, block_mask=mask)

    # One entry per batch bucket, pool size and list width; the default, 8, is a process's second model.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(attend, dynamic=False, fullgraph=True)
