"""Selection for tiles of neighbouring queries: which pages any of them reads, and which of them do.

One program a query and KV head chooses as decode does; then a word is packed for each page of a tile, a bit for each
query. 16-bit queries are scored on tensor cores (`tile_score`), others by decode's kernel, a query at a time.

Axes: T packed tokens, K KV heads, G query heads per KV head, D head dim, X tiles, S queries of tiles (a short tile has
as many as the others, those past its end do not count), P pages of all documents, M landmarks per page, W pages of the
longest document, Q score vectors per page.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.page_select import KINDS, PER_HEAD, ScoreKind, kept_pages, score_pages
from sparrow.kernels.tile_score import rank_pages

PACKED_PAGES = 512  # of a tile, that a program packs at most


@triton.jit
def _choose_kernel(
    scores, tiles, budgets, kept, width, sink, recent,
    K: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr, KIND: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    number, head = tl.program_id(0), tl.program_id(1)
    tile = number // QUERIES
    token = tl.load(tiles + tile * 4) + number % QUERIES
    if token < tl.load(tiles + tile * 4 + 1):
        pages_of_row = (token - tl.load(tiles + tile * 4 + 2)) // PAGE + 1
        budget = tl.load(budgets + number).to(tl.int32)
        page = tl.arange(0, W)
        row = number.to(tl.int64) * K + head
        chosen = kept_pages(scores + row * Q * width, page, pages_of_row, budget, width, sink, recent, Q, KIND)
        tl.store(kept + row * width + page, chosen.to(tl.int8), mask=page < width)


@triton.jit
def _pack_kernel(
    kept, tiles, members, width, K: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(tiles + tile * 4 + 1) - tl.load(tiles + tile * 4)
    bits = tl.zeros([BLOCK], tl.int32)
    for query in tl.static_range(QUERIES):
        row = (tile * QUERIES + query) * K + head
        chosen = tl.load(kept + row * width + page, mask=(page < width) & (query < count), other=0)
        bits = bits | (chosen.to(tl.int32) << query)
    tl.store(members + (tile * K + head) * width + page, bits, mask=page < width)


def tile_members(
    q_TKGD: Tensor, marks_KPMD: Tensor, tiles_X4: Tensor, token_S: Tensor, budget_S: Tensor, kind: ScoreKind,
    width: int, page_size: int, sink: int, recent: int,
) -> Tensor:  # fmt: skip
    """Bit q of [X, K, W], int32: the tile's query q reads that page of its document.

    Args:
        marks_KPMD: of all documents, one after the other.
        tiles_X4: see `sparrow.attention.tile_lists.Tiles`.
        token_S: packed positions of the tiles' queries; those past a tile's end are any of the tile's.
        width: W.
    """
    S, K, X = len(budget_S), q_TKGD.shape[1], len(tiles_X4)
    if q_TKGD.dtype.itemsize == 2:
        scores_SKQW = torch.empty(S, K, 1, width, dtype=torch.float32, device=q_TKGD.device)
        rank_pages(q_TKGD, marks_KPMD, tiles_X4, budget_S, scores_SKQW[:, :, 0], kind, page_size, sink, recent)
        kind = "group_mean"  # heads are joined
    else:
        scores_SKQW = _row_scores(q_TKGD, marks_KPMD, tiles_X4, token_S, budget_S, kind, width, page_size)
    kept_SKW = torch.empty(S, K, width, dtype=torch.int8, device=q_TKGD.device)
    W = triton.next_power_of_2(width)
    _choose_kernel[(S, K)](
        scores_SKQW, tiles_X4, budget_S, kept_SKW, width, sink, recent, K, scores_SKQW.shape[2], page_size, S // X,
        KINDS[kind], W, num_warps=choice_warps(W),
    )  # fmt: skip
    members_XKW = torch.empty(X, K, width, dtype=torch.int32, device=q_TKGD.device)
    block = min(W, PACKED_PAGES)
    _pack_kernel[(X, K, triton.cdiv(width, block))](
        kept_SKW, tiles_X4, members_XKW, width, K, S // X, block, num_warps=max(block // 128, 1)
    )
    return members_XKW


def choice_warps(W: int) -> int:
    """One where registers allow it: it waits for no other, and there are queries enough to fill the device."""
    return min(max(W // 1024, 1), 32)


def _row_scores(
    q_TKGD: Tensor, marks_KPMD: Tensor, tiles_X4: Tensor, token_S: Tensor, budget_S: Tensor, kind: ScoreKind,
    width: int, page_size: int,
) -> Tensor:  # fmt: skip
    """[S, K, Q, W]; decode's scores, to the last bit."""
    K, G, D = q_TKGD.shape[1:]
    start_S, page_S = tiles_X4[:, 2:].repeat_interleave(len(budget_S) // len(tiles_X4), 0).unbind(1)
    table_SW = page_S[:, None] + torch.arange(width, dtype=torch.int32, device=q_TKGD.device)
    scores_SKQW = torch.empty(
        len(budget_S), K, G if kind in PER_HEAD else 1, width, dtype=torch.float32, device=q_TKGD.device
    )
    score_pages(
        q_TKGD[token_S], marks_KPMD, table_SW, token_S - start_S + 1, budget_S, scores_SKQW, kind, page_size, 1,
        D**-0.5,
    )  # fmt: skip
    return scores_SKQW
