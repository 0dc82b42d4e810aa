"""Page lists of a training forward: per tile of neighbouring queries and KV head, the pages that any of them reads.

An entry is one int32: the page's number in its document below, a bit for each query of the tile that reads it above.
Entries of a tile and head stand together, in order of position, as many as there are: no list has a width.

Axes: T packed tokens, H query heads, K KV heads, D head dim, X tiles, P pages, C queries of a chunk, N entries.
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
CHUNK_SCORES = 2**25  # scores that are held at a time


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
    """

    documents: list[Document]
    queries: int
    tiles_X4: Tensor
    pages_P2: Tensor


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
    start = 0
    for length, prompt in zip(lengths, prompt_lengths, strict=True):
        assert length <= page_size << BITS, f"{length} tokens have more pages than an entry can number"
        end, first = start + length, start + min(prompt, length)
        documents.append(Document(start, first, end))
        tiles += [(at, min(at + queries, end), start, len(pages)) for at in range(first, end, queries)]
        pages += [(at, min(at + page_size, end)) for at in range(start, end, page_size)]
        start = end
    tiles_X4 = torch.tensor(tiles, dtype=torch.int32).view(-1, 4)
    return Tiles(documents, queries, tiles_X4.to(device), torch.tensor(pages, dtype=torch.int32).to(device))


@torch.no_grad()
def page_lists(pattern: SparsePattern, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor) -> PageLists:
    """Selects for every query what its decode step would."""
    entries, counts = [], []
    for members_XKP in _members(pattern, tiles, q_THD, k_TKD):
        found = members_XKP.nonzero()
        bits = members_XKP[found.unbind(1)]
        entries.append((bits << BITS) | found[:, 2].int())
        counts.append((members_XKP != 0).sum(2).flatten())
    bounds = F.pad(torch.cat(counts).cumsum(0), (1, 0)).int()
    return PageLists(torch.cat(entries), bounds)


def _members(pattern: SparsePattern, tiles: Tiles, q_THD: Tensor, k_TKD: Tensor) -> Iterator[Tensor]:
    """Bits of each tile's queries [X, K, P], for some tiles of one document at a time."""
    heads = q_THD.shape[1] * max(pattern.selector.landmarks_per_page, 1)
    for document in tiles.documents:
        landmarks_KPMD = page_landmarks(pattern, k_TKD[document.start : document.end])
        rows = CHUNK_SCORES // (heads * landmarks_KPMD.shape[1]) // tiles.queries * tiles.queries
        for at in range(document.first, document.end, max(rows, tiles.queries)):
            end = min(at + max(rows, tiles.queries), document.end)
            position_C = torch.arange(at - document.start, end - document.start, device=q_THD.device)
            yield _chunk(pattern, tiles.queries, q_THD[at:end], landmarks_KPMD, position_C, end - document.start)


def _chunk(
    pattern: SparsePattern, queries: int, q_CHD: Tensor, landmarks_KPMD: Tensor, position_C: Tensor, length: int
) -> Tensor:
    width = -(-length // pattern.page_size)
    kernel = pattern.selector.kernel
    if kernel is None:
        return _packed_bits(kept_pages(pattern, q_CHD, landmarks_KPMD[:, :width], position_C), queries)
    lengths_C = position_C + 1
    return tile_members(
        q_CHD.unflatten(1, (len(landmarks_KPMD), -1)), landmarks_KPMD, lengths_C, pattern.budget.pages(lengths_C),
        kernel, width, pattern.page_size, pattern.sink_pages, pattern.recent_pages, queries,
    )  # fmt: skip


def _packed_bits(kept_CKP: Tensor, queries: int) -> Tensor:
    missing = -len(kept_CKP) % queries
    kept_XQKP = F.pad(kept_CKP, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, queries))
    shift_Q11 = torch.arange(queries, dtype=torch.int32, device=kept_CKP.device)[:, None, None]
    return (kept_XQKP.int() << shift_Q11).sum(1, dtype=torch.int32)
