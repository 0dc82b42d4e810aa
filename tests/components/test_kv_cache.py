"""Accounting, construction and swapping; attention of the backends is tested in tests/attention.

Axes: H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch

from sparrow.attention.reference import attend_reference, select_reference
from sparrow.components.budget import FixedBudget, RatioBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache, check_runs
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector, QuestSelector, SegmentSoftmaxSelector
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
CPU = torch.device("cpu")


class Sinking(FixedBudget):
    """A user's own budget."""

    def __init__(self) -> None:
        super().__init__(pages=8)

    def pages(self, cached_length: torch.Tensor) -> torch.Tensor:
        return torch.where(cached_length < 70_000, 8, 2)


def test_what_is_read_by_hand():
    cache = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), page_size=16, dense_layers=2)
    lengths = torch.tensor([1, 64, 65, 160])
    assert cache.pages_read(lengths).tolist() == [1, 4, 4, 4]
    # 5 layers, 2 of them dense. 64 tokens are 4 pages: all are kept and nothing is scored. 65 are 5 pages: the sparse
    # layers read 64 tokens and 5 landmarks of half an entry. 160 are 10 pages: 64 and 10 halves.
    assert cache.tokens_read(lengths, 5).tolist() == [5, 5 * 64, 2 * 65 + 3 * 66.5, 2 * 160 + 3 * 69]
    quest = SparseKVCache(FixedBudget(pages=4), QuestSelector(), page_size=16, dense_layers=2)
    assert quest.tokens_read(lengths, 5)[3] == 2 * 160 + 3 * 74
    assert DenseKVCache().tokens_read(lengths, 5).tolist() == [5, 320, 325, 800]


def test_landmarks_of_eight_bits_are_half_in_reads_and_bytes():
    of_16 = SparseKVCache(FixedBudget(pages=4), SegmentSoftmaxSelector(4), page_size=16, dense_layers=0)
    of_8 = SparseKVCache(FixedBudget(pages=4), SegmentSoftmaxSelector(4, fp8=True), page_size=16, dense_layers=0)
    # 160 tokens are 10 pages of 4 landmarks: 20 entries a sparse layer with 16 bits, 10 with 8.
    assert of_16.tokens_read(torch.tensor(160), 5) == 5 * (64 + 20)
    assert of_8.tokens_read(torch.tensor(160), 5) == 5 * (64 + 10)
    kv = DenseKVCache().bytes_per_token(CONFIG, torch.bfloat16)
    per_page = CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert of_16.bytes_per_token(CONFIG, torch.bfloat16) - kv == per_page * 2 // 16
    assert of_8.bytes_per_token(CONFIG, torch.bfloat16) - kv == per_page // 16
    of_8.allocate(CONFIG, 2, CPU, torch.bfloat16)
    assert {marks.dtype for marks in of_8.pool.landmarks_KPMD.values()} == {torch.float8_e4m3fn}


def test_a_model_with_fewer_layers_than_dense_ones_is_dense():
    cache = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), dense_layers=9)
    assert cache.tokens_read(torch.tensor([1000]), 5).item() == 5000


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"page_size": 24}, "block_size 128 must be a multiple of page_size 24"),
        ({"page_size": 0}, "page_size 0"),
        ({"recent_pages": 0}, "recent_pages 0"),
        ({"sink_pages": 2, "recent_pages": 3}, "4 pages at length 0 do not hold the 2 sink and 3"),
    ],
)
def test_impossible_settings_are_named(kwargs, words):
    with pytest.raises(UserError, match=words):
        SparseKVCache(FixedBudget(pages=4), CentroidSelector(), **kwargs)


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (StepSchedule(pages=[5, 5, 2], bin_width=30, allow_dips=True), "2 pages at length 60 do not hold the 1 sink"),
        (RatioBudget(share=0.5, minimum=2), "2 pages at length 0 do not hold the 1 sink and 2 recent pages"),
        (Sinking(), "2 pages at length 70000 do not hold the 1 sink and 2 recent pages"),
    ],
)
def test_a_budget_that_falls_below_the_reserved_pages_anywhere_is_refused(budget, words):
    with pytest.raises(UserError, match=f"kv_cache.budget: {words}"):
        SparseKVCache(budget, CentroidSelector())


def test_a_budget_of_the_reserved_pages_alone_is_allowed():
    assert SparseKVCache(StepSchedule(pages=[4, 3], allow_dips=True), CentroidSelector()).budget is not None


def test_the_released_schedule_is_held_against_the_run():
    schedule = StepSchedule(path="qwen3-4b-0.86")
    assert SparseKVCache(schedule, CentroidSelector()).check("/models/Qwen3-4B", 1.0, "top_20") == []
    with pytest.raises(UserError, match="selector is"):
        SparseKVCache(schedule, QuestSelector()).check("/models/Qwen3-4B", 1.0, "top_20")
    allowed = StepSchedule(path="qwen3-4b-0.86", allow_foreign=True)
    assert len(SparseKVCache(allowed, QuestSelector(), page_size=32).check("/models/Qwen3-8B", 0.6, "exact")) == 5


def test_what_a_selector_holds_is_part_of_its_name():
    def name(selector):
        return SparseKVCache(FixedBudget(pages=4), selector).settings("a", 1.0, "exact").selector

    assert name(CentroidSelector()) == "CentroidSelector"
    assert name(SegmentSoftmaxSelector(segments=2)) == "SegmentSoftmaxSelector(fp8=False, landmarks_per_page=2)"


def test_a_selector_that_cannot_take_the_page_is_refused_at_once():
    with pytest.raises(UserError, match=r"segments: 3 does not divide kv_cache\.page_size 16"):
        SparseKVCache(FixedBudget(pages=4), SegmentSoftmaxSelector(segments=3))
    lying = CentroidSelector()
    lying.landmarks_per_page = 2
    with pytest.raises(UserError, match="makes 1 landmarks of a page, and says landmarks_per_page 2"):
        SparseKVCache(FixedBudget(pages=4), lying)


def test_a_backend_that_cannot_run_here_is_refused_before_any_pool():
    cache = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), backend="triton")
    with pytest.raises(UserError, match=r"kv_cache\.backend: triton needs a CUDA device"):
        check_runs(cache, CONFIG, CPU, torch.float32)
    runs = SparseKVCache(FixedBudget(pages=4), CentroidSelector())
    check_runs(runs, CONFIG, CPU, torch.float32)
    assert not hasattr(runs, "pool")


SWAPPED = [
    DenseKVCache(),
    SparseKVCache(FixedBudget(pages=4), QuestSelector(), dense_layers=0),
    SparseKVCache(FixedBudget(pages=4), SegmentSoftmaxSelector(4, fp8=True), dense_layers=0),
]


@pytest.mark.parametrize("cache", SWAPPED)
def test_what_is_swapped_comes_back_bit_for_bit_elsewhere(cache):
    cache.allocate(CONFIG, 9, CPU, torch.float32)
    for tensor in (*cache.pool.keys_KSD, *cache.pool.values_KSD, *cache.pool.landmarks_KPMD.values()):
        tensor.copy_(torch.randn(tensor.shape))
    before = cache.swap_out(list(range(10)))
    saved = cache.swap_out([7, 2, 5])
    cache.swap_in(saved, [1, 9, 2])
    after = cache.swap_out(list(range(10)))
    moved = {1: 7, 9: 2, 2: 5}
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(new[:, block], old[:, moved.get(block, block)]) for block in range(10))
    cache.pool.keys_KSD[1].zero_()
    assert all(torch.equal(x, y) for x, y in zip(saved, [old[:, [7, 2, 5]] for old in before], strict=True))


def test_without_a_selector_the_released_schedules_do_not_fit():
    cache = SparseKVCache(StepSchedule("qwen3-4b-0.86"))
    assert isinstance(cache.pattern.selector, HeadSoftmaxSelector)
    with pytest.raises(UserError, match="selector is 'centroid' in the schedule"):
        cache.check("/models/Qwen3-4B", 1.0, "top_20")


def test_pages_blocks_and_schedule_at_their_edges():
    """Decode at lengths on both sides of each edge, one of them of the schedule, against the reference."""
    schedule = StepSchedule(pages=[5, 30, 70], bin_width=2000)
    selector = CentroidSelector()
    cache = SparseKVCache(schedule, selector, dense_layers=0, backend="gather")
    budgets = {15: 5, 16: 5, 17: 5, 127: 5, 128: 5, 129: 5, 1999: 5, 2000: 30, 2001: 30, 3999: 30, 4000: 70}
    for length, budget in budgets.items():
        rng = torch.Generator().manual_seed(length)
        q_HD = torch.randn(4, 16, generator=rng)
        k_TKD, v_TKD = torch.randn(2, length, 2, 16, generator=rng)
        num_blocks = -(-length // 128)
        cache.allocate(CONFIG, num_blocks, CPU, torch.float32)
        table_1N = torch.arange(num_blocks, 0, -1)[None]
        position = torch.arange(length)
        slots = table_1N[0, position // 128] * 128 + position % 128
        cache.prefill(slots[:-1], [length - 1])(0, k_TKD[:-1].repeat(1, 2, 1), k_TKD[:-1], v_TKD[:-1])
        out = cache.decode(table_1N, torch.tensor([length]))(0, q_HD[None], k_TKD[-1:], v_TKD[-1:])
        pages = select_reference(q_HD, k_TKD, budget, selector, 16, 1, 2)
        assert len(pages[0]) == min(budget, -(-length // 16))
        torch.testing.assert_close(out[0], attend_reference(q_HD, k_TKD, v_TKD, pages, 16))
