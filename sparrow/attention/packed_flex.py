"""Causal attention over packed documents by FlexAttention: no padding to the longest, no work between documents.

A query sees the keys from the start of its document to itself, so one number a token says what is visible. The lists
of blocks follow from the documents' ends without a mask of [T, T] ever being made. The packed axis is filled up to one
of few lengths, because torch.compile makes a kernel for each; a filler is a document of its own, which costs no more
than the blocks on the diagonal.

Axes: T packed tokens, P of them filled up, B blocks of 128 of these, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
SHORTEST = 1024
LENGTHS_PER_OCTAVE = 4
RECOMPILE_LIMIT = 256


class PackedFlex:
    """As `sparrow.attention.packed.PackedCausal`, on CUDA; FlexAttention has no backward on the CPU.

    Args:
        lengths: tokens of each document, in packing order; they sum to T.
        device: where the tensors live.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self.total = sum(lengths)
        start_P = document_starts(lengths, device)
        self.positions_T = torch.arange(self.total, device=device) - start_P[: self.total]
        self.start_P = start_P.int()
        self.lists = block_lists(self.start_P)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D] queries and [T, K, D] keys and values to the attention output [T, H, D]."""
        return self.attend(_compiled(), q_THD, k_TKD, v_TKD)

    def attend(self, kernel: Callable[..., Tensor], q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q_1HPD, k_1KPD, v_1KPD = (self._fill(x).transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        out_1HPD = kernel(q_1HPD, k_1KPD, v_1KPD, self.start_P, *self.lists)
        return out_1HPD[0].transpose(0, 1)[: self.total]

    def _fill(self, x_TXD: Tensor) -> Tensor:
        missing = len(self.start_P) - self.total
        return F.pad(x_TXD, (0, 0, 0, 0, 0, missing)) if missing else x_TXD  # else it would still be a copy


def document_starts(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """Where each token's document begins, int64 [P]; each filler begins its own."""
    total = sum(lengths)
    lengths_N = torch.tensor(lengths, device=device)
    start_P = torch.arange(filled_length(total), device=device)
    start_P[:total] = torch.repeat_interleave(lengths_N.cumsum(0) - lengths_N, lengths_N, output_size=total)
    return start_P


def filled_length(total: int) -> int:
    """The next of `LENGTHS_PER_OCTAVE` lengths between a power of two and the one after it."""
    unit = max(1 << (max(total, SHORTEST).bit_length() - 1), SHORTEST) // LENGTHS_PER_OCTAVE
    return max(-(-total // unit) * unit, SHORTEST)


def block_lists(start_P: Tensor) -> tuple[Tensor, ...]:
    """Counts [1, 1, B] and indices [1, 1, B, B] of the blocks that each block sees in part and in full, by queries,
    then the same by keys: the order of `BlockMask`'s arguments.
    """
    block_B = torch.arange(len(start_P) // BLOCK, device=start_P.device)
    # Starts do not fall along the axis: a block's first query sees farthest back, its last one least far.
    first_B1, last_B1 = start_P[::BLOCK, None], start_P[BLOCK - 1 :: BLOCK, None]
    seen_BB = (block_B <= block_B[:, None]) & (block_B >= first_B1 // BLOCK)
    full_BB = (block_B < block_B[:, None]) & (block_B * BLOCK >= last_B1)
    part_BB = seen_BB & ~full_BB
    return (*_listed(part_BB), *_listed(full_BB), *_listed(part_BB.T), *_listed(full_BB.T))


def _listed(seen_BB: Tensor) -> tuple[Tensor, Tensor]:
    indices_BB = seen_BB.int().argsort(dim=-1, descending=True, stable=True)
    return seen_BB.sum(-1).int()[None, None], indices_BB.int().contiguous()[None, None]


def attend_documents(q_1HPD: Tensor, k_1KPD: Tensor, v_1KPD: Tensor, start_P: Tensor, *lists: Any) -> Tensor:
    """What is compiled; everything that belongs to a micro-batch is an argument, so that the kernel serves all."""

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= start_P[query])

    lengths = (q_1HPD.shape[2], k_1KPD.shape[2])
    mask: Any = BlockMask(*(lengths, *lists, (BLOCK, BLOCK), visible))
    grouped = q_1HPD.shape[1] != k_1KPD.shape[1]
    out = flex_attention(q_1HPD, k_1KPD, v_1KPD, block_mask=mask, enable_gqa=grouped)
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out


@cache
def _compiled() -> Any:
    # One entry per length and per mode, with and without gradient.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)
    return torch.compile(attend_documents, dynamic=False, fullgraph=True)
