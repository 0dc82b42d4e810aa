"""Backward of `sparrow.kernels.tile_attend`, without atomics: queries by their lists, keys by the lists' inverse.

For dQ a tile walks its list again. For dK and dV a program takes the keys of one page, or a part of a large one, and
gathers the queries that read it, each with the query heads of the group: no row of a matrix product is idle. Sums have
one order, so that gradients repeat bit for bit.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, X tiles, P pages, N entries, R readings (of a
page by a query).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.tile_attend import LOG2_E, launch_options, listed_keys, locate_rows

LARGEST_PART = 32  # keys of a page that a program takes


@triton.jit
def _query_kernel(
    q, keys, values, entries, bounds, tiles, out, normalisers, grad_out, grad_q, deltas, num_tiles, tokens, scale,
    score_scale,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    number, token, cell, exists = locate_rows(tiles, tile, head, K, G, GROUP, ROWS)
    start = tl.load(tiles + tile * 4 + 2)
    begin, end = tl.load(bounds + tile * K + head), tl.load(bounds + tile * K + head + 1)
    d = tl.arange(0, D)
    row = cell[:, None] * D + d[None, :]
    query = tl.load(q + row, mask=exists[:, None], other=0.0)
    flow = tl.load(grad_out + row, mask=exists[:, None], other=0.0)
    result = tl.load(out + row, mask=exists[:, None], other=0.0)
    delta = tl.sum(flow.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(deltas + cell, delta, mask=exists)
    normaliser = tl.load(normalisers + cell, mask=exists, other=0.0)
    acc = tl.zeros([ROWS, D], tl.float32)
    for at in range(0, (end - begin) * PAGE, KEYS):
        token_key, readers = listed_keys(entries, begin, end, at, start, PAGE, KEYS)
        place = (token_key.to(tl.int64) * K + head)[:, None] * D + d[None, :]
        inside = (token_key < tokens)[:, None]
        key = tl.load(keys + place, mask=inside, other=0.0)
        value = tl.load(values + place, mask=inside, other=0.0)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * score_scale
        seen = ((readers[None, :] >> number[:, None]) & 1 == 1) & (token_key[None, :] <= token[:, None])
        weight = tl.where(seen, tl.exp2(score - normaliser[:, None]), 0.0)
        share = tl.dot(flow, tl.trans(value), input_precision="ieee")
        slope = weight * (share - delta[:, None])
        acc += tl.dot(slope.to(key.dtype), key, input_precision="ieee")
    tl.store(grad_q + row, (acc * scale).to(grad_q.dtype.element_ty), mask=exists[:, None])


@triton.jit
def _key_kernel(
    q, keys, values, readers, bounds, pages, normalisers, deltas, grad_out, grad_k, grad_v, num_pages, scale,
    score_scale,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    page, head = tl.program_id(0) // (PAGE // PART), tl.program_id(1)
    token_key = tl.load(pages + page * 2) + tl.program_id(0) % (PAGE // PART) * PART + tl.arange(0, PART)
    inside = (token_key < tl.load(pages + page * 2 + 1))[:, None]
    d = tl.arange(0, D)
    place = (token_key.to(tl.int64) * K + head)[:, None] * D + d[None, :]
    key = tl.load(keys + place, mask=inside, other=0.0)
    value = tl.load(values + place, mask=inside, other=0.0)
    grad_key = tl.zeros([PART, D], tl.float32)
    grad_value = tl.zeros([PART, D], tl.float32)
    begin, end = tl.load(bounds + head * num_pages + page), tl.load(bounds + head * num_pages + page + 1)
    member = tl.arange(0, ROWS) % GROUP
    for at in range(begin, end, ROWS // GROUP):
        reading = at + tl.arange(0, ROWS) // GROUP
        exists = (reading < end) & (member < G)
        token = tl.load(readers + reading, mask=exists, other=0)
        cell = (token.to(tl.int64) * K + head) * G + member
        row = cell[:, None] * D + d[None, :]
        query = tl.load(q + row, mask=exists[:, None], other=0.0)
        flow = tl.load(grad_out + row, mask=exists[:, None], other=0.0)
        normaliser = tl.load(normalisers + cell, mask=exists, other=0.0)
        delta = tl.load(deltas + cell, mask=exists, other=0.0)
        score = tl.dot(key, tl.trans(query), input_precision="ieee") * score_scale
        seen = exists[None, :] & (token_key[:, None] <= token[None, :])
        weight = tl.where(seen, tl.exp2(score - normaliser[None, :]), 0.0)
        grad_value += tl.dot(weight.to(flow.dtype), flow, input_precision="ieee")
        share = tl.dot(value, tl.trans(flow), input_precision="ieee")
        slope = weight * (share - delta[None, :])
        grad_key += tl.dot(slope.to(query.dtype), query, input_precision="ieee")
    tl.store(grad_k + place, (grad_key * scale).to(grad_k.dtype.element_ty), mask=inside)
    tl.store(grad_v + place, grad_value.to(grad_v.dtype.element_ty), mask=inside)


@triton.jit
def _reader_kernel(firsts, bits, ends, readers, entries, QUERIES: tl.constexpr, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    number = tl.arange(0, QUERIES)
    reads = (tl.load(bits + entry, mask=inside, other=0)[:, None] >> number[None, :]) & 1
    place = tl.load(ends + entry, mask=inside, other=0)[:, None] + tl.cumsum(reads, 1) - 1
    token = tl.load(firsts + entry, mask=inside, other=0)[:, None] + number[None, :]
    tl.store(readers + place, token, mask=reads == 1)


def attend_tiles_backward(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, entries_N: Tensor, bounds: Tensor, tiles_X4: Tensor,
    pages_P2: Tensor, page_size: int, queries: int, out_THD: Tensor, normalisers_TH: Tensor, grad_THD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; zero for queries that are in no tile."""
    T, H, D = q_THD.shape
    K, P = k_TKD.shape[1], len(pages_P2)
    group = triton.next_power_of_2(H // K)
    scale = D**-0.5
    deltas_TH = torch.empty_like(normalisers_TH)
    grad_q, grad_k, grad_v = torch.zeros_like(q_THD), torch.empty_like(k_TKD), torch.empty_like(v_TKD)
    launch = launch_options(q_THD)
    _query_kernel[(len(tiles_X4), K)](
        q_THD, k_TKD, v_TKD, entries_N, bounds, tiles_X4, out_THD, normalisers_TH, grad_THD, grad_q, deltas_TH,
        len(tiles_X4), T, scale, scale * LOG2_E, K, H // K, group, D, page_size, max(queries * group, 16), **launch,
    )  # fmt: skip
    readers_R, ends = page_readers(entries_N, bounds, tiles_X4, K, P, queries)
    part, rows = min(page_size, LARGEST_PART), max(launch.pop("KEYS"), group)
    # A document's first page, which every query reads, is started first.
    _key_kernel[(P * (page_size // part), K)](
        q_THD, k_TKD, v_TKD, readers_R, ends, pages_P2, normalisers_TH, deltas_TH, grad_THD, grad_k, grad_v, P, scale,
        scale * LOG2_E, K, H // K, group, D, page_size, part, rows, **launch,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def page_readers(
    entries_N: Tensor, bounds: Tensor, tiles_X4: Tensor, heads: int, num_pages: int, queries: int
) -> tuple[Tensor, Tensor]:
    """The lists' inverse: packed positions of the queries that read a page, in their order, int32 [R].

    Returns:
        Those of page p and head k begin at [k * num_pages + p] of the second tensor, int32, whose last entry is R.
    """
    device, N = entries_N.device, len(entries_N)
    lists = torch.arange(len(bounds) - 1, dtype=torch.int32, device=device)
    list_N = torch.repeat_interleave(lists, bounds.diff(), output_size=N)
    tile_N = list_N // heads
    key_N = list_N % heads * num_pages + tiles_X4[tile_N, 3] + (entries_N & 0xFFFF)
    # Stable, so that a page's readers are in the order of their tiles.
    key_N, order_N = key_N.sort(stable=True)
    bits_N = (entries_N[order_N] >> 16) & 0xFFFF
    ends = torch.zeros(N + 1, dtype=torch.int32, device=device)
    torch.cumsum(_set_bits(bits_N), 0, out=ends[1:])
    readers_R = torch.empty(int(ends[-1]), dtype=torch.int32, device=device)
    first_N = tiles_X4[tile_N[order_N], 0].contiguous()
    _reader_kernel[(triton.cdiv(N, 128),)](first_N, bits_N, ends, readers_R, N, queries, 128)
    pages = torch.arange(heads * num_pages + 1, dtype=torch.int32, device=device)
    return readers_R, ends[torch.searchsorted(key_N, pages)]


def _set_bits(words: Tensor) -> Tensor:
    """How many of 16, by sums of neighbours; same shape."""
    words = (words & 0x5555) + ((words >> 1) & 0x5555)
    words = (words & 0x3333) + ((words >> 2) & 0x3333)
    words = (words & 0x0F0F) + ((words >> 4) & 0x0F0F)
    return (words & 0x00FF) + (words >> 8)
