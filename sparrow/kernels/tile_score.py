"""Scores of pages for tiles of neighbouring queries, on tensor cores: 16-bit selection of a sparse training forward.

A program takes a tile and one KV head, as `tile_attend` does: all query heads of the tile are rows of matrix products
with the landmarks, a block of pages at a time. What it writes is what pages are ranked by, one number for a query and
page, the heads of the group already joined; so heads that are normalised apart see the landmarks twice, once for their
sums.
Products are exact and sums fp32, as in `page_select`, but in another order: pages that all but tie may change places.

Axes: T packed tokens, K KV heads, G query heads per KV head, D head dim, X tiles, S queries of tiles, P pages of all
documents, M landmarks per page, W pages of the longest document.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.page_select import BOUND, GROUP_MEAN, HEAD_SOFTMAX, KINDS, ScoreKind
from sparrow.kernels.tile_attend import LOG2_E


@triton.jit
def _landmarks(marks, mark, last, D: tl.constexpr, dtype: tl.constexpr):
    """[D, marks] of a document and head; beyond the last one stands the last again."""
    place = tl.minimum(mark, last - 1)
    return tl.load(marks + place[None, :] * D + tl.arange(0, D)[:, None]).to(dtype)


@triton.jit
def _candidates(page, sink, past):
    return (page[None, :] >= sink) & (page[None, :] < past[:, None])


@triton.jit
def _queries(q, token, head, member, exists, K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr):
    """[rows, D]; a mean of the group is rounded to the queries' dtype as the eager selector does."""
    at = q + (token.to(tl.int64) * K + head)[:, None] * G * D + tl.arange(0, D)[None, :]
    if KIND == GROUP_MEAN:
        query = tl.load(at, mask=exists[:, None], other=0.0).to(tl.float32)
        for g in tl.static_range(1, G):
            query += tl.load(at + g * D, mask=exists[:, None], other=0.0).to(tl.float32)
        return (query / G).to(q.dtype.element_ty)
    return tl.load(at + member[:, None] * D, mask=exists[:, None], other=0.0)


@triton.jit
def _head_sums(
    query, marks, sink, past, last, scale, D: tl.constexpr, M: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """Of each row's base-2 logits of the candidates' landmarks: the largest, and the sum of their powers below it."""
    top = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    column = tl.arange(0, BLOCK_P * M)
    for at in range(0, last, BLOCK_P):
        logit = tl.dot(query, _landmarks(marks, at * M + column, last * M, D, query.dtype)) * scale
        logit = tl.where(_candidates(at + column // M, sink, past), logit, float("-inf"))
        peak = tl.maximum(top, tl.max(logit, 1))
        shift = tl.where(peak == float("-inf"), 0.0, peak)  # of a row that has seen no candidate yet
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(logit - shift[:, None]), 1)
        top = peak
    return top, total


@triton.jit
def _rank_kernel(
    q, marks, tiles, budgets, ranks, num_tiles, num_pages, width, sink, recent, scale,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr,
    QUERIES: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    tile = num_tiles - 1 - tl.program_id(0)  # long documents' ends first: none is left to run alone
    head = tl.program_id(1)
    first, end = tl.load(tiles + tile * 4), tl.load(tiles + tile * 4 + 1)
    row = tl.arange(0, ROWS)
    number, member = row // GROUP, row % GROUP
    counts = member < (1 if KIND == GROUP_MEAN else G)
    exists = (first + number < end) & counts
    pages_of_row = (first + number - tl.load(tiles + tile * 4 + 2)) // PAGE + 1
    budget = tl.load(budgets + tile * QUERIES + number, mask=exists, other=0)
    # Where a row's candidates end; within its budget it needs no scores.
    past = tl.where(exists & (pages_of_row > budget), pages_of_row - recent, 0)
    last = tl.max(past, 0)
    query = _queries(q, first + number, head, member, exists, K, G, D, KIND)
    marks += (head.to(tl.int64) * num_pages + tl.load(tiles + tile * 4 + 3)) * M * D
    page, column = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_P * M)
    out_number = tl.arange(0, ROWS // GROUP)
    out = ranks + ((tile.to(tl.int64) * QUERIES + out_number) * K + head)[:, None] * width + page[None, :]
    writes = (first + out_number < end)[:, None]
    if KIND == GROUP_MEAN:
        for at in range(0, last, BLOCK_P):
            rank = tl.dot(query, _landmarks(marks, at + page, last, D, query.dtype))
            tl.store(out + at, rank, mask=writes & (at + page < width)[None, :])
    elif KIND == BOUND:
        # Minimum and maximum of a page stand side by side: each takes the elements that it makes the larger product of.
        negative = tl.where(query < 0, query, 0.0).to(query.dtype)
        positive = tl.where(query > 0, query, 0.0).to(query.dtype)
        for at in range(0, last, BLOCK_P):
            bound = tl.dot(negative, _landmarks(marks, (at + page) * 2, last * 2 - 1, D, query.dtype))
            bound = tl.dot(positive, _landmarks(marks, (at + page) * 2 + 1, last * 2, D, query.dtype), bound)
            bound = tl.where(counts[:, None], bound, float("-inf"))
            rank = tl.max(tl.reshape(bound, (ROWS // GROUP, GROUP, BLOCK_P)), 1)
            tl.store(out + at, rank, mask=writes & (at + page < width)[None, :])
    else:
        top, total = _head_sums(query, marks, sink, past, last, scale, D, M, BLOCK_P)
        norm = 1 / tl.where(total > 0, total, 1.0)  # a row without candidates has no share anyway
        for at in range(0, last, BLOCK_P):
            logit = tl.dot(query, _landmarks(marks, at * M + column, last * M, D, query.dtype)) * scale
            weight = tl.exp2(logit - top[:, None]) * norm[:, None]
            share = tl.where(_candidates(at + column // M, sink, past), weight, 0.0)
            share = tl.sum(tl.reshape(share, (ROWS // GROUP, GROUP, BLOCK_P, M)), 3)
            rank = tl.sum(share, 1) if KIND == HEAD_SOFTMAX else tl.max(share, 1)
            tl.store(out + at, rank, mask=writes & (at + page < width)[None, :])


def rank_pages(
    q_TKGD: Tensor, marks_KPMD: Tensor, tiles_X4: Tensor, budget_S: Tensor, ranks_SKW: Tensor, kind: ScoreKind,
    page_size: int, sink: int, recent: int,
) -> None:  # fmt: skip
    """What candidates are ranked by into `ranks_SKW`, fp32, for the queries that exceed their budget.

    Args:
        marks_KPMD: of all documents; 8-bit ones are exact in the queries' dtype.
        tiles_X4: see `sparrow.attention.tile_lists.Tiles`; of as many queries each as S has for a tile.
        kind: see `sparrow.kernels.page_select.score_pages`; heads are joined as `select_pages` joins them.
    """
    _, K, G, D = q_TKGD.shape
    P, M = marks_KPMD.shape[1:3]
    assert q_TKGD.is_contiguous() and marks_KPMD.is_contiguous() and q_TKGD.dtype.itemsize == 2
    queries = len(budget_S) // len(tiles_X4)
    group = 1 if kind == "group_mean" else triton.next_power_of_2(G)
    options = launch_options(D)
    pages = max(options.pop("LANDMARKS") // M, 1)
    _rank_kernel[(len(tiles_X4), K)](
        q_TKGD, marks_KPMD, tiles_X4, budget_S, ranks_SKW, len(tiles_X4), P, ranks_SKW.shape[2], sink, recent,
        LOG2_E / D**0.5, K, G, group, D, M, page_size, queries, KINDS[kind], max(queries * group, 16), pages, **options,
    )  # fmt: skip


def launch_options(head_dim: int) -> dict[str, int]:
    """Landmarks of a step, and launch."""
    if head_dim > 128:
        return {"LANDMARKS": 32, "num_warps": 4, "num_stages": 2}
    return {"LANDMARKS": 64, "num_warps": 4, "num_stages": 3}
