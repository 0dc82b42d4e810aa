"""Scores and page lists of the kernels, against the eager selection of `DecodeStep`.

Axes: B rows, K KV heads, G query heads per KV head, D head dim, N blocks per row, W width of the lists.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.step import DecodeStep
from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.selector import (
    CentroidSelector,
    HeadMaxSelector,
    HeadSoftmaxSelector,
    QuestSelector,
    SegmentSoftmaxSelector,
)
from sparrow.kernels.page_select import PER_HEAD, score_pages, select_pages
from sparrow.models.decoder_config import DecoderConfig

pytestmark = pytest.mark.gpu

SELECTORS = [
    CentroidSelector(),
    HeadSoftmaxSelector(),
    HeadMaxSelector(),
    QuestSelector(),
    SegmentSoftmaxSelector(2),
    SegmentSoftmaxSelector(16),
    SegmentSoftmaxSelector(4, fp8=True),
]
NAMES = ["centroid", "softmax", "max", "quest", "halves", "oracle", "fp8"]
PAGE, BLOCK, K, D, BLOCKS = 16, 128, 2, 32, 9
PAGES = BLOCKS * BLOCK // PAGE  # 72: the score kernel takes two programs for them
# Within the budget, at page edges, at block edges, at an edge of the schedule, and the longest.
LENGTHS = [1, 17, 64, 65, 127, 128, 129, 399, 400, 401, 1030, BLOCKS * BLOCK]
SCHEDULE = StepSchedule(pages=[4, 8, 12], bin_width=200)
SINK, RECENT = 1, 2


def filled(group: int, selector, device, randn, equal: bool = False) -> PagePool:
    """Random keys with landmarks of every page; `equal` ones make all pages tie."""
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=K * group, num_kv_heads=K, head_dim=D
    )
    blocks = BLOCKS * len(LENGTHS)
    marks, kept = selector.landmarks_per_page, selector.landmarks(torch.zeros(1, PAGE, D)).dtype
    pool = PagePool(config, blocks, BLOCK, PAGE, marks, range(1), device, torch.float32, kept)
    pool.keys_KSD[0].copy_(randn(D).expand_as(pool.keys_KSD[0]) if equal else randn(*pool.keys_KSD[0].shape))
    pool.update_landmarks(0, torch.arange(pool.num_pages, device=device), selector)
    return pool


def block_table(device) -> Tensor:
    """[B, N]: every row's blocks, scattered over the pool."""
    order = torch.randperm(BLOCKS * len(LENGTHS), generator=torch.Generator().manual_seed(1))
    return (order + 1).view(len(LENGTHS), BLOCKS).to(device)


def by_kernels(pool: PagePool, q_BKGD: Tensor, table_BN: Tensor, pattern: SparsePattern) -> list[list[list[int]]]:
    """Pool pages of each row and KV head, without the head's part of the number."""
    B, _, G, _ = q_BKGD.shape
    kind, lengths = pattern.selector.kernel, torch.tensor(LENGTHS, device=q_BKGD.device)
    budget_B = pattern.budget.pages(lengths)
    # NaN where nobody writes: a score that is read without having been made would show.
    scores = torch.full((B, K, G if kind in PER_HEAD else 1, PAGES), torch.nan, device=q_BKGD.device)
    width = min(pattern.budget.max_pages, PAGES)
    lists_BKW = torch.full((B, K, width), -1, dtype=torch.int32, device=q_BKGD.device)
    counts_BK = torch.zeros(B, K, dtype=torch.int32, device=q_BKGD.device)
    per_block = BLOCK // PAGE
    score_pages(q_BKGD, pool.landmarks_KPMD[0], table_BN, lengths, budget_B, scores, kind, PAGE, per_block, D**-0.5)
    select_pages(
        scores, table_BN, lengths, budget_B, lists_BKW, counts_BK, kind, pool.num_pages, PAGE, per_block, SINK, RECENT
    )
    pages_BKW = lists_BKW.cpu() - torch.arange(K)[:, None] * pool.num_pages
    return [
        [pages_BKW[b, k, : int(counts_BK[b, k])].tolist() for k in range(K)] for b in range(B)
    ]  # fmt: skip


def by_step(pool: PagePool, q_BKGD: Tensor, table_BN: Tensor, pattern: SparsePattern) -> list[list[list[int]]]:
    lengths = torch.tensor(LENGTHS, device=q_BKGD.device)
    step = DecodeStep(pool, BLOCK, table_BN, lengths, PAGES, pattern)
    pages_BKW, counts_B = step.select(0, q_BKGD, min(pattern.budget.max_pages, PAGES))
    return [[pages_BKW[b, k, : int(counts_B[b])].tolist() for k in range(K)] for b in range(len(LENGTHS))]


def logical(pages: list[list[list[int]]], table_BN: Tensor) -> list[list[list[int]]]:
    """Positions in the sequence of pages of the pool."""
    per_block = BLOCK // PAGE
    found = []
    for row, blocks in zip(pages, table_BN.tolist(), strict=True):
        found.append([[blocks.index(p // per_block) * per_block + p % per_block for p in head] for head in row])
    return found


@pytest.mark.parametrize("group", [1, 2, 4, 5])
@pytest.mark.parametrize("selector", SELECTORS, ids=NAMES)
def test_lists_are_those_of_the_eager_selection(device, randn, selector, group):
    pool, table = filled(group, selector, device, randn), block_table(device)
    q_BKGD = randn(len(LENGTHS), K, group, D)
    pattern = SparsePattern(SCHEDULE, selector, PAGE, SINK, RECENT, 0)
    got = by_kernels(pool, q_BKGD, table, pattern)
    assert got == by_step(pool, q_BKGD, table, pattern)
    budgets = SCHEDULE.pages(torch.tensor(LENGTHS)).tolist()
    counts = [min(-(-n // PAGE), budget) for n, budget in zip(LENGTHS, budgets, strict=True)]
    assert [[len(head) for head in row] for row in got] == [[count] * K for count in counts]


@pytest.mark.parametrize("selector", SELECTORS, ids=NAMES)
def test_within_the_budget_the_list_is_the_identity(device, randn, selector):
    pool, table = filled(2, selector, device, randn), block_table(device)
    pattern = SparsePattern(FixedBudget(PAGES), selector, PAGE, SINK, RECENT, 0)
    got = logical(by_kernels(pool, randn(len(LENGTHS), K, 2, D), table, pattern), table)
    assert got == [[list(range(-(-n // PAGE)))] * K for n in LENGTHS]


@pytest.mark.parametrize("selector", SELECTORS, ids=NAMES)
def test_a_budget_of_the_reserved_pages_keeps_nothing_else(device, randn, selector):
    pool, table = filled(2, selector, device, randn), block_table(device)
    pattern = SparsePattern(FixedBudget(SINK + RECENT), selector, PAGE, SINK, RECENT, 0)
    got = logical(by_kernels(pool, randn(len(LENGTHS), K, 2, D), table, pattern), table)
    for row, pages in zip(got, [-(-n // PAGE) for n in LENGTHS], strict=True):
        assert row == [sorted({*range(min(SINK, pages)), *range(max(pages - RECENT, 0), pages)})] * K


@pytest.mark.parametrize("selector", SELECTORS, ids=NAMES)
def test_of_pages_that_tie_the_first_are_kept(device, randn, selector):
    pool, table = filled(2, selector, device, randn, equal=True), block_table(device)
    pattern = SparsePattern(FixedBudget(8), selector, PAGE, SINK, RECENT, 0)
    got = logical(by_kernels(pool, randn(len(LENGTHS), K, 2, D), table, pattern), table)
    for row, pages in zip(got, [-(-n // PAGE) for n in LENGTHS], strict=True):
        assert row == [[*range(min(6, pages)), *range(max(pages - RECENT, 6), pages)]] * K


@pytest.mark.parametrize("selector", SELECTORS, ids=NAMES)
def test_where_pages_lie_in_the_pool_changes_no_choice(device, randn, selector):
    pool, table = filled(4, selector, device, randn), block_table(device)
    q_BKGD = randn(len(LENGTHS), K, 4, D)
    pattern = SparsePattern(SCHEDULE, selector, PAGE, SINK, RECENT, 0)
    before = logical(by_kernels(pool, q_BKGD, table, pattern), table)
    target = (torch.randperm(table.numel(), generator=torch.Generator().manual_seed(2)) + 1).to(device)
    moved = target[table - 1]
    pool.swap_in(pool.swap_out(table.flatten().tolist()), moved.flatten().tolist())
    assert logical(by_kernels(pool, q_BKGD, moved, pattern), moved) == before


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("segments", [1, 2, 4, 16])
@pytest.mark.parametrize("fp8", [False, True])
def test_all_heads_of_a_group_at_once_score_as_one_by_one(device, randn, group, segments, fp8):
    """In 16 bits a matrix product scores them; the same numbers in fp32 do not go through it."""
    selector = SegmentSoftmaxSelector(segments, fp8)
    pool, table = filled(group, selector, device, randn), block_table(device)
    marks_KPMD = pool.landmarks_KPMD[0] if fp8 else pool.landmarks_KPMD[0].half()
    q_BKGD = randn(len(LENGTHS), K, group, D).half()
    lengths = torch.tensor(LENGTHS, device=device)
    budget_B = torch.full_like(lengths, 4)
    scores = {dtype: torch.zeros(len(LENGTHS), K, group, PAGES, device=device) for dtype in (torch.half, torch.float)}
    for dtype, out in scores.items():
        marks = marks_KPMD if fp8 else marks_KPMD.to(dtype)
        per_block = BLOCK // PAGE
        score_pages(q_BKGD.to(dtype), marks, table, lengths, budget_B, out, "head_softmax", PAGE, per_block, D**-0.5)
    assert scores[torch.half].any()
    for row, length in enumerate(LENGTHS):
        pages = -(-length // PAGE)
        torch.testing.assert_close(
            scores[torch.half][row, ..., :pages], scores[torch.float][row, ..., :pages], atol=1e-5, rtol=1e-5
        )
