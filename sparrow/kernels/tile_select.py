"""Selection for tiles of neighbouring queries of one document: which pages any of them reads, and which of them do.

Scores and choice are those of decode, row by row; what is written is one word a page, a bit for each query.

Axes: C queries of a chunk, K KV heads, G query heads per KV head, D head dim, P pages, M landmarks per page, X tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.page_select import KINDS, PER_HEAD, ScoreKind, kept_pages, score_pages


@triton.jit
def _members_kernel(
    scores, lengths, budgets, members, rows, width, sink, recent,
    K: tl.constexpr, G: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    page = tl.arange(0, P)
    bits = tl.zeros([P], tl.int32)
    for query in range(min(QUERIES, rows - tile * QUERIES)):
        row = tile * QUERIES + query
        pages_of_row = (tl.load(lengths + row) - 1) // PAGE + 1
        budget = tl.load(budgets + row).to(tl.int32)
        row_scores = scores + (row * K + head) * G * width
        kept = kept_pages(row_scores, page, pages_of_row, budget, width, sink, recent, G, KIND)
        bits = bits | (kept.to(tl.int32) << query)
    tl.store(members + (tile * K + head) * width + page, bits, mask=page < width)


def tile_members(
    q_CKGD: Tensor, marks_KPMD: Tensor, lengths_C: Tensor, budget_C: Tensor, kind: ScoreKind, width: int,
    page_size: int, sink: int, recent: int, queries: int,
) -> Tensor:  # fmt: skip
    """Bit q of [X, K, width], int32: the tile's query q reads that page of its document.

    Args:
        lengths_C: tokens that a query sees, its own included.
        width: pages that the longest of them has.
        queries: per tile.
    """
    C, K, G, D = q_CKGD.shape
    per_head = G if kind in PER_HEAD else 1
    scores_CKQP = torch.empty(C, K, per_head, width, dtype=torch.float32, device=q_CKGD.device)
    table_CP = torch.arange(width, dtype=torch.int32, device=q_CKGD.device).expand(C, -1)
    marks_KPMD = marks_KPMD.contiguous()
    score_pages(q_CKGD, marks_KPMD, table_CP, lengths_C, budget_C, scores_CKQP, kind, page_size, 1, D**-0.5)
    members_XKP = torch.empty(triton.cdiv(C, queries), K, width, dtype=torch.int32, device=q_CKGD.device)
    P = triton.next_power_of_2(width)
    _members_kernel[members_XKP.shape[:2]](
        scores_CKQP, lengths_C, budget_C, members_XKP, C, width, sink, recent, K, per_head, page_size, queries,
        KINDS[kind], P, num_warps=min(max(P // 512, 1), 32),
    )  # fmt: skip
    return members_XKP
