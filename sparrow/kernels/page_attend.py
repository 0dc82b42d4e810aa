"""Decode attention over page lists, split along the list: the hand-written counterpart of the FlexAttention backend.

A program takes one row, one KV head and one share of its list, with the query group as the rows of the matrix products;
a second kernel joins the shares. Shares are of a fixed number of tokens, so that long and short rows of a batch
balance, and one compiled kernel serves every batch.

Axes: R = B * K folded rows, G query heads per KV head, D head dim, W width of the lists, C shares of a list.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch, release_successor


@triton.jit
def _share_kernel(
    q, keys, values, lists, counts, lengths, out, accs, maxima, sums, list_width, share, shares, scale,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + row)
    length = tl.load(lengths + row // K)
    filled = ((count - 1) * PAGE + (length - 1) % PAGE + 1).to(tl.int32)
    first = part * share
    end = tl.minimum(first + share, filled)
    d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    cell = (row * shares + part) * G + member
    if first < end:
        query = tl.load(q + (row * G + member)[:, None] * D + d[None, :], mask=member[:, None] < G, other=0.0)
        top = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
        acc = tl.zeros([GROUP, D], tl.float32)
        column = tl.arange(0, TILE)
        for start in range(first, end, TILE):
            token = start + column
            page = tl.load(lists + row * list_width + token // PAGE, mask=token < end, other=0).to(tl.int64)
            slot = page * PAGE + token % PAGE
            key = tl.load(keys + slot[None, :] * D + d[:, None])
            score = tl.dot(query, key, input_precision="ieee") * scale
            score = tl.where(token[None, :] < end, score, float("-inf"))
            peak = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - peak[:, None])
            decay = tl.exp2(top - peak)
            total = total * decay + tl.sum(weight, 1)
            value = tl.load(values + slot[:, None] * D + d[None, :])
            acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = peak
        release_successor(PDL)
        if WHOLE:
            target = out + (row * G + member)[:, None] * D + d[None, :]
            tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=member[:, None] < G)
        else:
            tl.store(accs + cell[:, None] * D + d[None, :], acc, mask=member[:, None] < G)
            tl.store(maxima + cell, top, mask=member < G)
            tl.store(sums + cell, total, mask=member < G)


@triton.jit
def _join_kernel(
    accs, maxima, sums, counts, lengths, out, share, shares,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    release_successor(PDL)
    await_predecessor(PDL)
    row, member = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row // K)
    filled = ((tl.load(counts + row) - 1) * PAGE + (length - 1) % PAGE + 1).to(tl.int32)
    part = tl.arange(0, BLOCK)
    used = part * share < filled
    cell = (row * shares + part) * G + member
    top = tl.load(maxima + cell, mask=used, other=float("-inf"))
    weight = tl.where(used, tl.exp2(top - tl.max(top, 0)), 0.0)
    total = tl.sum(weight * tl.load(sums + cell, mask=used, other=0.0), 0)
    d = tl.arange(0, D)
    acc = tl.load(accs + cell[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    mixed = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out + (row * G + member) * D + d, mixed.to(out.dtype.element_ty))


def attend_lists(
    q_RGD: Tensor, keys_SD: Tensor, values_SD: Tensor, lists_RW: Tensor, counts_R: Tensor, lengths_B: Tensor,
    page_size: int, share: int, tile: int = 64, num_warps: int = 2, num_stages: int = 3,
) -> Tensor:  # fmt: skip
    """Attention of each folded row over the tokens of its listed pages, [R, G, D].

    Args:
        keys_SD, values_SD: the pool with heads and slots flattened, which the listed page numbers index.
        lists_RW, counts_R: int32; the last listed page is the open one, filled up to `lengths_B`.
        share: tokens per program, a multiple of `tile`.
    """
    R, G, D = q_RGD.shape
    K = R // len(lengths_B)
    shares = triton.cdiv(lists_RW.shape[1] * page_size, share)
    out = torch.empty_like(q_RGD)
    pdl = dependent_launch()
    accs = torch.empty(R, shares, G, D, dtype=torch.float32, device=q_RGD.device)
    maxima, sums = (torch.empty(R, shares, G, dtype=torch.float32, device=q_RGD.device) for _ in range(2))
    scale = 1.4426950408889634 / D**0.5  # exp2 instead of exp
    _share_kernel[(shares, R)](
        q_RGD, keys_SD, values_SD, lists_RW, counts_R, lengths_B, out, accs, maxima, sums, lists_RW.shape[1], share,
        shares, scale, K, G, max(16, triton.next_power_of_2(G)), D, page_size, tile, shares == 1, pdl,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if shares > 1:
        _join_kernel[(R, G)](
            accs, maxima, sums, counts_R, lengths_B, out, share, shares, K, G, D, page_size,
            triton.next_power_of_2(shares), pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return out
