"""Ranks of pages that tensor cores make for tiles of queries, against the selectors' own scores.

Axes: T packed tokens, K KV heads, G query heads per KV head, D head dim, S queries of tiles, P pages, W pages of the
longest document.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention.select import candidate_pages
from sparrow.attention.tile_lists import make_tiles
from sparrow.components.selector import (
    CentroidSelector,
    HeadMaxSelector,
    HeadSoftmaxSelector,
    QuestSelector,
    SegmentSoftmaxSelector,
)
from sparrow.kernels.tile_score import rank_pages

pytestmark = pytest.mark.gpu

SELECTORS = {
    "centroid": CentroidSelector(),
    "softmax": HeadSoftmaxSelector(),
    "max": HeadMaxSelector(),
    "quest": QuestSelector(),
    "halves": SegmentSoftmaxSelector(2),
    "oracle": SegmentSoftmaxSelector(16),
    "fp8": SegmentSoftmaxSelector(4, fp8=True),
}
PAGE, K, D, SINK, RECENT = 16, 2, 32, 1, 2
# A step is 64 landmarks: the first document takes several. Odd ends, and a tile of one query.
LENGTHS, PROMPTS = [1130, 9, 177], [1085, 8, 160]


CASES = [
    *((name, 3, 16, torch.bfloat16) for name in SELECTORS),
    ("centroid", 1, 16, torch.bfloat16), ("quest", 5, 2, torch.bfloat16), ("max", 4, 4, torch.float16),
    ("fp8", 4, 16, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("name", "group", "queries", "dtype"), CASES)
def test_ranks_are_the_scores_of_the_selector(device, randn, name, group, queries, dtype):
    selector = SELECTORS[name]
    tiles = make_tiles(LENGTHS, PROMPTS, queries, PAGE, device)
    q_TKGD = randn(sum(LENGTHS), K, group, D, dtype=dtype)
    P, W = len(tiles.pages_P2), max(tiles.widths)
    marks_KPMD = selector.landmarks(randn(K, P, PAGE, D, dtype=dtype)).contiguous()
    start_S, page_S = tiles.tiles_X4[:, 2:].repeat_interleave(queries, 0).unbind(1)
    pages_S = (tiles.tokens_S - start_S) // PAGE + 1
    # Each third query is within its budget: nobody looks at its ranks.
    budget_S = torch.where(tiles.tokens_S % 3 == 0, pages_S, 4)
    # NaN where nobody writes: a rank that is read without having been made would show.
    ranks_SKW = torch.full((len(pages_S), K, W), torch.nan, device=device)
    rank_pages(q_TKGD, marks_KPMD, tiles.tiles_X4, budget_S, ranks_SKW, selector.kernel, PAGE, SINK, RECENT)

    page_SW = (page_S[:, None] + torch.arange(W, device=device)).clamp(max=P - 1)
    candidates_SW = candidate_pages(pages_S, W, SINK, RECENT)
    marks_SKWMD = marks_KPMD.float()[:, page_SW].transpose(0, 1)
    expected = selector.score(q_TKGD[tiles.tokens_S], marks_SKWMD, candidates_SW)
    end_S = tiles.tiles_X4[:, 1].repeat_interleave(queries)
    first_S = tiles.tiles_X4[:, 0].repeat_interleave(queries)
    there_S = first_S + torch.arange(queries, device=device).repeat(len(tiles.tiles_X4)) < end_S
    seen = (candidates_SW & (there_S & (pages_S > budget_S))[:, None])[:, None].expand_as(ranks_SKW)
    assert int(seen.sum()) > 1000
    torch.testing.assert_close(ranks_SKW[seen], expected.float()[seen], atol=2e-5, rtol=2e-4)
