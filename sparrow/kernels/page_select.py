"""Selection of KV pages in two kernels: score every landmark, then keep the best pages in order of position.

The score reads the landmarks once at memory bandwidth, split over the pages of a sequence. The selection is one program
per row and KV head: exact top-K without a sort, the lists in order of position, as page numbers of the pool that
already carry the head, which is what FlexAttention's block lists want. Sequences within their budget cost no score;
their list is the identity.

Axes: B rows, K KV heads, G query heads per KV head, D head dim, P pages of the longest sequence, N blocks per row,
M landmarks per page, W width of the page lists, Q score vectors per page (G where heads are ranked apart, else 1).
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch, release_successor
from sparrow.kernels.ordering import LOWEST, largest, sortable

LANDMARKS_PER_PROGRAM = 64

# How the score of a page is made; the names are those of `Selector.kernel`.
ScoreKind = Literal["group_mean", "head_softmax", "head_max", "bound"]
GROUP_MEAN, HEAD_SOFTMAX, HEAD_MAX, BOUND = (tl.constexpr(kind) for kind in range(4))
KINDS = {"group_mean": 0, "head_softmax": 1, "head_max": 2, "bound": 3}
PER_HEAD = ("head_softmax", "head_max")  # Q = G: a head's scores are normalised over the pages before heads are joined


@triton.jit
def _mean_query(q_row, G: tl.constexpr, D: tl.constexpr):
    """Mean of the group's queries, rounded to their dtype as the eager selector does; fp32 [D]."""
    d = tl.arange(0, D)
    total = tl.zeros([D], tl.float32)
    for g in tl.static_range(G):
        total += tl.load(q_row + g * D + d).to(tl.float32)
    return (total / G).to(q_row.dtype.element_ty).to(tl.float32)


@triton.jit
def _score_kernel(
    q, marks, table, lengths, budgets, scores, num_blocks, num_pages, width, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, PAGE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr, KIND: tl.constexpr, BLOCK_P: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pages_of_row = (tl.load(lengths + row) - 1) // PAGE + 1
    if (pages_of_row > tl.load(budgets + row)) & (chunk * BLOCK_P < pages_of_row):
        d = tl.arange(0, D)
        mark = tl.arange(0, BLOCK_P * M)  # of the chunk, a page's landmarks side by side
        page = chunk * BLOCK_P + mark // M
        block = tl.load(table + row * num_blocks + page // PAGES_PER_BLOCK, mask=page < pages_of_row, other=0)
        physical = block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK
        at = marks + (((head.to(tl.int64) * num_pages + physical) * M + mark % M) * D)[:, None] + d[None, :]
        q_row = q + (row * K + head) * G * D
        out_page = chunk * BLOCK_P + tl.arange(0, BLOCK_P)
        if HEADS > 0:  # all heads of the group in one product
            g = tl.arange(0, HEADS)
            query = tl.load(q_row + g[None, :] * D + d[:, None], mask=g[None, :] < G, other=0.0)
            logit = tl.dot(tl.load(at).to(query.dtype), query) * scale
            if M > 1:
                logit = _log_sum_exp(tl.reshape(logit, (BLOCK_P, M, HEADS)), 1)
            out = scores + ((row * K + head) * G + g[None, :]) * width + out_page[:, None]
            tl.store(out, logit, mask=(out_page[:, None] < width) & (g[None, :] < G))
        elif KIND == GROUP_MEAN:
            landmark = tl.load(at).to(tl.float32)
            score = tl.sum(landmark * _mean_query(q_row, G, D)[None, :], 1)
            tl.store(scores + (row * K + head) * width + out_page, score, mask=out_page < width)
        elif KIND == BOUND:
            landmark = tl.load(at).to(tl.float32)
            best = tl.full([BLOCK_P], float("-inf"), tl.float32)
            for g in tl.static_range(G):
                query = tl.load(q_row + g * D + d).to(tl.float32)[None, :]
                # Minimum and maximum of a page stand side by side: of each element the larger product counts.
                best = tl.maximum(best, tl.sum(tl.max(tl.reshape(landmark * query, (BLOCK_P, M, D)), 1), 1))
            tl.store(scores + (row * K + head) * width + out_page, best, mask=out_page < width)
        else:
            landmark = tl.load(at).to(tl.float32)
            for g in tl.static_range(G):
                logit = tl.sum(landmark * tl.load(q_row + g * D + d).to(tl.float32)[None, :], 1) * scale
                if M > 1:
                    logit = _log_sum_exp(tl.reshape(logit, (BLOCK_P, M)), 1)
                tl.store(scores + ((row * K + head) * G + g) * width + out_page, logit, mask=out_page < width)
    release_successor(PDL)


@triton.jit
def _log_sum_exp(x, AXIS: tl.constexpr):
    top = tl.max(x, AXIS)
    return top + tl.log(tl.sum(tl.exp(x - tl.expand_dims(top, AXIS)), AXIS))


@triton.jit
def _joined_softmax(row_scores, page, candidate, width, G: tl.constexpr, KIND: tl.constexpr):
    """Each head's softmax over the candidates, summed over the group or the largest of it."""
    joined = tl.zeros(page.shape, tl.float32)
    for g in tl.static_range(G):
        logit = tl.load(row_scores + g * width + page, mask=candidate, other=float("-inf"))
        weight = tl.where(candidate, tl.exp(logit - tl.max(logit, 0)), 0.0)
        share = weight / tl.sum(weight, 0)
        joined = joined + share if KIND == HEAD_SOFTMAX else tl.maximum(joined, share)
    return joined


@triton.jit
def kept_pages(
    row_scores, page, pages_of_row, budget, width, sink, recent, G: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Which pages a row reads: all within its budget, else the reserved ones and the best of the rest."""
    kept = page < pages_of_row
    if pages_of_row > budget:
        candidate = (page >= sink) & (page < pages_of_row - recent)
        per_head: tl.constexpr = (KIND == HEAD_SOFTMAX) | (KIND == HEAD_MAX)
        if per_head:
            rank = _joined_softmax(row_scores, page, candidate, width, G, KIND)
        else:
            rank = tl.load(row_scores + page, mask=candidate, other=0.0)
        room = budget - sink - recent
        if room > 0:
            best = largest(tl.where(candidate, sortable(rank), LOWEST), room, pages_of_row - sink - recent)
            kept = kept & (best | (candidate == 0))
        else:
            kept = kept & (candidate == 0)
    return kept


@triton.jit
def _select_kernel(
    scores, table, lengths, budgets, lists, counts, num_blocks, num_pages, width, list_width, sink, recent,
    K: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, KIND: tl.constexpr,
    P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    pages_of_row = (tl.load(lengths + row) - 1) // PAGE + 1
    budget = tl.load(budgets + row).to(tl.int32)
    page = tl.arange(0, P)
    exists = page < pages_of_row
    block = tl.load(table + row * num_blocks + page // PAGES_PER_BLOCK, mask=exists, other=0)
    out = row * K + head
    kept = kept_pages(scores + out * G * width, page, pages_of_row, budget, width, sink, recent, G, KIND)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    physical = head * num_pages + block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK
    tl.store(lists + out * list_width + place, physical.to(tl.int32), mask=kept)
    tl.store(counts + out, tl.minimum(pages_of_row, budget).to(tl.int32))


def score_pages(
    q_BKGD: Tensor, marks_KPMD: Tensor, table_BN: Tensor, lengths_B: Tensor, budget_B: Tensor, scores_BKQP: Tensor,
    kind: ScoreKind, page_size: int, pages_per_block: int, scale: float,
) -> None:  # fmt: skip
    """Scores of all pages of the rows that exceed their budget, into `scores_BKQP`, fp32.

    Args:
        table_BN: may be one row, expanded.
        kind: "group_mean": the mean query of the group times the landmark (M = 1, Q = 1). "head_softmax" and
            "head_max": each head's log of the sum of exp(`scale` q·landmark) over a page's landmarks, M a power of two
            (Q = G); `kept_pages` joins the heads. "bound": the largest over the heads of the upper bound of q·k
            between the landmarks minimum and maximum (M = 2, Q = 1).
    """
    B, K, G, D = q_BKGD.shape
    M, width = marks_KPMD.shape[2], scores_BKQP.shape[3]
    assert kind in PER_HEAD or (2 if kind == "bound" else 1) == M
    assert q_BKGD.is_contiguous() and scores_BKQP.shape[2] == (G if kind in PER_HEAD else 1)
    pages = max(LANDMARKS_PER_PROGRAM // M, 1)
    pdl = dependent_launch()
    _score_kernel[(triton.cdiv(width, pages), K, B)](
        q_BKGD, marks_KPMD, table_BN, lengths_B, budget_B, scores_BKQP, table_BN.stride(0), marks_KPMD.shape[1], width,
        scale, K, G, D, M, page_size, pages_per_block, KINDS[kind], pages, _matrix_heads(q_BKGD, kind), pdl,
        num_warps=4,
    )  # fmt: skip


def _matrix_heads(q_BKGD: Tensor, kind: ScoreKind) -> int:
    """Columns of the matrix unit's product that score all heads of a group at once; 0 where there is none.

    In 16 bits products are exact and sums fp32 either way; fp32 is not given to the unit, which would round it.
    """
    matrix = kind in PER_HEAD and q_BKGD.dtype.itemsize == 2
    return max(triton.next_power_of_2(q_BKGD.shape[2]), 16) if matrix else 0


def select_pages(
    scores_BKQP: Tensor, table_BN: Tensor, lengths_B: Tensor, budget_B: Tensor, lists_BKW: Tensor, counts_BK: Tensor,
    kind: ScoreKind, pool_pages: int, page_size: int, pages_per_block: int, sink: int, recent: int,
) -> None:  # fmt: skip
    """Kept pages of each row and KV head in order of position, int32, and their number.

    Args:
        scores_BKQP: of `score_pages`. Of "head_softmax" the heads' softmax over the candidates is summed, of "head_max"
            the largest counts.
        lists_BKW: out; head * pool_pages + page. Entries past the count are left as they are.
    """
    B, K, Q, width = scores_BKQP.shape
    P = triton.next_power_of_2(width)
    pdl = dependent_launch()
    _select_kernel[(B, K)](
        scores_BKQP, table_BN, lengths_B, budget_B, lists_BKW, counts_BK, table_BN.shape[1], pool_pages, width,
        lists_BKW.shape[2], sink, recent, K, Q, page_size, pages_per_block, KINDS[kind],
        P, pdl, num_warps=min(max(P // 512, 1), 32), launch_pdl=pdl,
    )  # fmt: skip
