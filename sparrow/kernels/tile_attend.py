"""Attention of tiles of neighbouring queries over the union of their page lists: forward of the sparse training pass.

A program takes a tile of queries of one document and one KV head. All their query heads are rows of the matrix
products, the tokens of the listed pages are columns, and an entry's bits say which queries read its page.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, X tiles, N entries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


@triton.jit
def locate_rows(tiles, tile, head, K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of each row: number of its query in the tile, packed position, place among [T, H], and whether it exists."""
    row = tl.arange(0, ROWS)
    number = row // GROUP
    token = tl.load(tiles + tile * 4) + number
    exists = (token < tl.load(tiles + tile * 4 + 1)) & (row % GROUP < G)
    return number, token, (token.to(tl.int64) * K + head) * G + row % GROUP, exists


@triton.jit
def listed_keys(entries, begin, end, at, start, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Packed positions of the list's tokens from number `at` on, and bits of the queries that read them."""
    column = at + tl.arange(0, KEYS)
    slot = begin + column // PAGE
    entry = tl.load(entries + slot, mask=slot < end, other=0)  # no query reads what is past the end
    return start + (entry & 0xFFFF) * PAGE + column % PAGE, entry >> 16


@triton.jit
def _attend_kernel(
    q, keys, values, entries, bounds, tiles, out, normalisers, num_tiles, tokens, scale,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)  # long lists first: none is left to run alone
    head = tl.program_id(1)
    number, token, cell, exists = locate_rows(tiles, tile, head, K, G, GROUP, ROWS)
    start = tl.load(tiles + tile * 4 + 2)
    begin, end = tl.load(bounds + tile * K + head), tl.load(bounds + tile * K + head + 1)
    d = tl.arange(0, D)
    query = tl.load(q + cell[:, None] * D + d[None, :], mask=exists[:, None], other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for at in range(0, (end - begin) * PAGE, KEYS):
        token_key, readers = listed_keys(entries, begin, end, at, start, PAGE, KEYS)
        place = (token_key.to(tl.int64) * K + head) * D
        inside = token_key < tokens
        key = tl.load(keys + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * scale
        seen = ((readers[None, :] >> number[:, None]) & 1 == 1) & (token_key[None, :] <= token[:, None])
        score = tl.where(seen, score, float("-inf"))
        peak = tl.maximum(top, tl.max(score, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # of a row that has seen nothing yet
        weight = tl.exp2(score - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weight, 1)
        value = tl.load(values + place[:, None] + d[None, :], mask=inside[:, None], other=0.0)
        acc = acc * decay[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = peak
    total = tl.where(exists, total, 1.0)
    tl.store(out + cell[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), exists[:, None])
    tl.store(normalisers + cell, top + tl.log2(total), mask=exists)


def attend_tiles(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, entries_N: Tensor, bounds: Tensor, tiles_X4: Tensor, page_size: int,
    queries: int, out_THD: Tensor,
) -> Tensor:  # fmt: skip
    """Writes the rows of `out_THD` that are in tiles; returns the base-2 log of their normalisers, fp32 [T, H].

    Args:
        entries_N, bounds, tiles_X4, queries: see `sparrow.attention.tile_lists`.
    """
    T, H, D = q_THD.shape
    K = k_TKD.shape[1]
    normalisers_TH = torch.empty(T, H, dtype=torch.float32, device=q_THD.device)
    group = triton.next_power_of_2(H // K)
    _attend_kernel[(len(tiles_X4), K)](
        q_THD, k_TKD, v_TKD, entries_N, bounds, tiles_X4, out_THD, normalisers_TH, len(tiles_X4), T, LOG2_E / D**0.5,
        K, H // K, group, D, page_size, max(queries * group, 16), **launch_options(q_THD),
    )  # fmt: skip
    return normalisers_TH


def tile_rows(dtype: torch.dtype) -> int:
    """Query heads that a program takes at a time; in fp32 there is no matrix unit to fill, and registers are short."""
    return 64 if dtype.itemsize == 2 else 16


def launch_options(x_TXD: Tensor) -> dict[str, int]:
    """Tokens of a step and launch, by what of a tile fits into registers and shared memory."""
    if x_TXD.dtype.itemsize == 4:
        return {"KEYS": 32, "num_warps": 8, "num_stages": 1}
    if x_TXD.shape[2] > 128:
        return {"KEYS": 32, "num_warps": 4, "num_stages": 1}
    return {"KEYS": 64, "num_warps": 4, "num_stages": 2}
