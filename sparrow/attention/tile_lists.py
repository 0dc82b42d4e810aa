"""Page lists of a training forward: per tile of neighbouring queries and KV head, the pages that any of them reads.

An entry is one int32: the page's number in its document below, a bit for each query of the tile that reads it above.
Entries of a tile and head stand together, in order of position, as many as there are: no list has a width.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, X tiles, S queries of tiles (a short tile has
as many as the others), P pages, M landmarks per page, C queries of a chunk, N entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.training_select import kept_pages, page_landmarks
from sparrow.kernels.tile_attend import tile_rows
from sparrow.kernels.tile_select import tile_members

BITS = 16  # of an entry's page and of its queries
CHUNK_SCORES = 2**26  # scores that are held at a time
CHUNK_QUERIES = 2**15  # likewise: decode's kernel takes at most twice as many


@dataclass(frozen=True)
class Document:
    """Where its tokens stand on the packed axis; the queries from `first` on are sparse."""

    start: int
    first: int
    end: int


@dataclass(frozen=True)
class Tiles:
    """The queries of a micro-batch in tiles and its keys in pages, both int32 on the device.

    Attributes:
        queries: per tile; the last one of a document may have fewer.
        tiles_X4: first query, end of the queries, start of the document (all packed positions), number of its page 0.
        pages_P2: first key and end of the keys of all pages of all documents.
        tokens_S: packed positions of the queries of each tile, in a short one the last again; int64.
        widths: pages that the last query of each tile sees, on the host.
    """

    documents: list[Document]
    queries: int
    tiles_X4: Tensor
    pages_P2: Tensor
    tokens_S: Tensor
    widths: list[int]


@dataclass(frozen=True)
class PageLists:
    """Of one layer.

    Attributes:
        entries_N: by tile, KV head and page.
        bounds: where the list of tile x and head k begins, at x * K + k, and all end; int32.
    """

    entries_N: Tensor
    bounds: Tensor


def queries_per_tile(group: int, dtype: torch.dtype) -> int:
    """As many neighbours as fill the rows of a tile with their query heads."""
    padded = 1 << (group - 1).bit_length()
    return max(min(BITS, tile_rows(dtype) // padded), 1)


def make_tiles(
    lengths: Sequence[int], prompt_lengths: Sequence[int], queries: int, page_size: int, device: torch.device
) -> Tiles:
    """Prompt tokens are in no tile, but in pages."""
    documents: list[Document] = []
    tiles: list[tuple[int, ...]] = []
    pages: list[tuple[int, int]] = []
    widths: list[int] = []
    start = 0
    for length, prompt in zip(lengths, prompt_lengths, strict=True):
        assert length <= page_size << BITS, f"{length} tokens have more pages than an entry can number"
        end, first = start + length, start + min(prompt, length)
        documents.append(Document(start, first, end))
        tiles += [(at, min(at + queries, end), start, len(pages)) for at in range(first, end, queries)]
        pages += [(at, min(at + page_size, end)) for at in range(start, end, page_size)]
        widths += [(min(at + queries, end) - start - 1) // page_size + 1 for at in range(first, end, queries)]
        start = end
    tiles_X4 = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    tokens_XQ = torch.minimum(tiles_X4[:, :1] + torch.arange(queries), tiles_X4[:, 1:2] - 1)
    pages_P2 = torch.tensor(pages, dtype=torch.int32)
    return Tiles(documents, queries, tiles_X4.to(device), pages_P2.to(device), tokens_XQ.flatten().to(device), widths)


@torch.no_grad()
def page_lists(pattern: SparsePattern, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor) -> PageLists:
    """Selects for every query what its decode step would."""
    select = _eager_members if pattern.selector.kernel is None else _kernel_members
    entries, counts = [], []
    for members_XKP in select(pattern, tiles, q_THD, k_TKD):
        members, P = members_XKP.flatten(), members_XKP.shape[2]
        found_N = members.nonzero().squeeze(1)  # the only wait for the device
        entries.append((members[found_N] << BITS) | (found_N % P).int())
        counts.append((members_XKP != 0).sum(2).flatten())
    bounds = F.pad(torch.cat(counts).cumsum(0), (1, 0)).int()
    return PageLists(torch.cat(entries), bounds)


def _kernel_members(pattern: SparsePattern, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor) -> Iterator[Tensor]:
    """Bits of each tile's queries [X, K, P], for some tiles at a time, of whichever documents."""
    kernel = pattern.selector.kernel
    assert kernel is not None
    marks_KPMD = _all_landmarks(pattern, tiles, k_TKD)
    start_S = tiles.tiles_X4[:, 2:3].expand(-1, tiles.queries).flatten()
    budget_S = pattern.budget.pages(tiles.tokens_S - start_S + 1)
    q_TKGD = q_THD.unflatten(1, (k_TKD.shape[1], -1))
    scores = max(tiles.widths) * (q_THD.shape[1] if q_THD.dtype.itemsize == 4 else k_TKD.shape[1])
    step = max(min(CHUNK_SCORES // scores, CHUNK_QUERIES) // tiles.queries, 1)
    for at in range(0, len(tiles.widths), step):
        part_S = slice(at * tiles.queries, (at + step) * tiles.queries)
        yield tile_members(
            q_TKGD, marks_KPMD, tiles.tiles_X4[at : at + step], tiles.tokens_S[part_S], budget_S[part_S], kernel,
            max(tiles.widths[at : at + step]), pattern.page_size, pattern.sink_pages, pattern.recent_pages,
        )  # fmt: skip


def _all_landmarks(pattern: SparsePattern, tiles: Tiles, k_TKD: Tensor) -> Tensor:
    """[K, P, M, D] of all documents; those of an incomplete page are never looked at."""
    token = torch.arange(pattern.page_size, device=k_TKD.device)
    token_PS = (tiles.pages_P2[:, :1] + token).clamp(max=len(k_TKD) - 1)
    return pattern.selector.landmarks(k_TKD[token_PS].permute(2, 0, 1, 3)).contiguous()


def _eager_members(pattern: SparsePattern, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor) -> Iterator[Tensor]:
    """Bits of each tile's queries [X, K, P], for some tiles of one document at a time."""
    heads = 2 * q_THD.shape[1] * max(pattern.selector.landmarks_per_page, 1)  # a softmax is a second copy of its scores
    for document in tiles.documents:
        landmarks_KPMD = page_landmarks(pattern, k_TKD[document.start : document.end])
        rows = CHUNK_SCORES // (heads * landmarks_KPMD.shape[1]) // tiles.queries * tiles.queries
        for at in range(document.first, document.end, max(rows, tiles.queries)):
            end = min(at + max(rows, tiles.queries), document.end)
            position_C = torch.arange(at - document.start, end - document.start, device=q_THD.device)
            width = -(-(end - document.start) // pattern.page_size)
            kept_CKP = kept_pages(pattern, q_THD[at:end], landmarks_KPMD[:, :width], position_C)
            yield _packed_bits(kept_CKP, tiles.queries)


def _packed_bits(kept_CKP: Tensor, queries: int) -> Tensor:
    missing = -len(kept_CKP) % queries
    kept_XQKP = F.pad(kept_CKP, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, queries))
    shift_Q11 = torch.arange(queries, dtype=torch.int32, device=kept_CKP.device)[:, None, None]
    return (kept_XQKP.int() << shift_Q11).sum(1, dtype=torch.int32)
