"""The cost model against hand-computed cases, brute force over single steps, the caches' own counts, measured roofs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector
from sparrow.cost import (
    CacheShape,
    Work,
    matmul_weights,
    prefill_flop,
    printed_speedup,
    rollout_cost,
    step_cost,
    token_cost,
)
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rates import Rates

# 3 layers; width of a KV head's key 4; 4 query heads in 2 groups.
SMALL = DecoderConfig(
    vocab_size=10, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)
QWEN3_4B = DecoderConfig(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128,
)  # fmt: skip
DENSE = CacheShape()


def sparse(pages: int, **other) -> CacheShape:
    return CacheShape(pages=FixedBudget(pages).pages, **{"page_size": 16, "dense_layers": 2, **other})


def work(prompts, responses, rows, samples=1) -> Work:
    return Work(torch.tensor(prompts), torch.tensor(responses), rows, samples)


def test_weights_are_those_of_the_decoder():
    matrices = sum(p.numel() for p in Decoder(SMALL).parameters() if p.ndim == 2)
    assert matmul_weights(SMALL) == matrices  # the head is tied: counted once, as the head


def test_a_dense_token_by_hand():
    cost = token_cost(SMALL, DENSE, torch.tensor([5]))
    assert cost.kv_elements_L.item() == 3 * 5 * 2 * (2 * 4), "layers, tokens, key and value, width"
    assert cost.attention_flop_L.item() == 3 * 5 * 4 * (4 * 4), "q·k and p·v: a product and a sum each, all query heads"
    assert cost.scoring_flop_L.item() == cost.landmark_elements_L.item() == 0


def test_a_sparse_token_by_hand():
    # 100 tokens are 7 pages; 3 are kept; one of three layers is sparse.
    cost = token_cost(SMALL, sparse(3), torch.tensor([100]))
    assert cost.kv_elements_L.item() == (2 * 100 + 48) * 2 * 8
    assert cost.attention_flop_L.item() == (2 * 100 + 48) * 4 * 16
    assert cost.landmark_elements_L.item() == 7 * 8
    assert cost.scoring_flop_L.item() == 7 * 2 * 8, "the group's mean query: no r"
    per_head = token_cost(SMALL, sparse(3, scores_per_head=True, landmarks_per_page=2), torch.tensor([100]))
    assert per_head.scoring_flop_L.item() == 2 * 7 * 2 * 16
    assert per_head.landmark_elements_L.item() == 2 * 7 * 8


@given(length=st.integers(1, 5000), pages=st.integers(3, 400), page_size=st.sampled_from([4, 16, 64]))
def test_a_budget_that_holds_the_sequence_is_dense_and_scores_nothing(length, pages, page_size):
    shape = sparse(pages, page_size=page_size)
    one, dense = (token_cost(SMALL, cache, torch.tensor([length])) for cache in (shape, DENSE))
    if pages * page_size >= length:
        assert all(torch.equal(getattr(one, name), value) for name, value in vars(dense).items())
    else:
        assert one.kv_elements_L < dense.kv_elements_L and one.landmark_elements_L > 0


def test_large_pages_cost_no_scoring():
    # The same 4,096 tokens of budget at 32,768: landmarks fall as 1 / page, to none when one page is all.
    lengths = torch.tensor([32768])
    marks = [token_cost(QWEN3_4B, sparse(4096 // p, page_size=p), lengths).landmark_elements_L for p in (16, 64, 1024)]
    assert marks[0] == 4 * marks[1] == 64 * marks[2]
    assert token_cost(QWEN3_4B, sparse(1, page_size=32768), lengths).landmark_elements_L == 0


def test_only_dense_layers_is_dense():
    one, dense = (step_cost(SMALL, cache, 900, 2) for cache in (sparse(3, dense_layers=3), DENSE))
    assert (one.flop, one.elements) == (dense.flop, dense.elements)


def test_the_schedule_is_summed_not_taken_at_its_end():
    cache = CacheShape(pages=StepSchedule(pages=[4, 10], bin_width=100).pages)
    read = token_cost(SMALL, cache, torch.arange(300)).kv_elements_L / (2 * 8) - 2 * torch.arange(300)
    assert read[50] == 50 and read[99] == 64 and read[100] == 100 and read[299] == 160, "one sparse layer"


def test_reads_are_those_that_the_caches_count():
    lengths = torch.arange(1, 6000, 7)
    budget = StepSchedule(pages=[8, 32, 64])
    rule = SparseKVCache(budget, CentroidSelector())
    for cache, shape in ((DenseKVCache(), DENSE), (rule, CacheShape(pages=budget.pages))):
        cost = token_cost(QWEN3_4B, shape, lengths)
        entries = cache.tokens_read(lengths, QWEN3_4B.num_layers).double()
        torch.testing.assert_close(cost.kv_elements_L + cost.landmark_elements_L, entries * 2 * 8 * 128)


def test_lengths_and_steps_by_hand():
    # Two rows. The second sequence ends after 1 step, the third takes its row for 2 steps; the first runs 4.
    done = work([3, 7, 5], [5, 2, 3], rows=2)
    assert done.tokens_L().tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 1], "3 + 1..4; 7 + 1; 5 + 1..2"
    assert done.steps_R().tolist() == [0, 1, 3], "one step alone, three of two rows"
    assert work([3], [1], rows=2).steps_R().sum() == 0, "the first token comes from the prefill"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 5))
def test_every_token_is_decoded_once(responses, rows):
    done = work([3] * len(responses), responses, rows)
    steps_R = done.steps_R()
    decoded = sum(responses) - len(responses)
    assert done.tokens_L().sum() == decoded == (steps_R * torch.arange(len(steps_R))).sum()
    assert steps_R.sum() >= max(responses) - 1


def test_a_rollout_is_the_sum_of_its_steps():
    cache = sparse(3)
    done = rollout_cost(SMALL, cache, work([20, 60], [50, 50], rows=2))
    steps = [step_cost(SMALL, cache, length, 1) for start in (20, 60) for length in range(start + 1, start + 50)]
    for name in ("linear_flop", "attention_flop", "scoring_flop", "kv_elements", "landmark_elements"):
        assert getattr(done, name) == sum(getattr(step, name) for step in steps), name
    assert done.weight_elements == 49 * matmul_weights(SMALL), "read once for both rows"


def test_prefill_by_hand_and_shared_by_samples():
    assert prefill_flop(SMALL, work([2], [9], rows=1)) == (
        2 * 2 * (matmul_weights(SMALL) - 80) + 2 * 80 + 3 * 4 * 16 * (1 + 2)
    )
    alone, shared = (work([9] * 8, [5] * 8, rows=8, samples=samples) for samples in (1, 8))
    assert prefill_flop(SMALL, alone) == 8 * prefill_flop(SMALL, shared)


def test_seconds_take_the_slower_rate_and_eflops_add_both():
    cost = step_cost(SMALL, DENSE, 5, 1)
    assert cost.seconds(Rates(1e30, 1.0)) == pytest.approx(2 * cost.elements)
    assert cost.seconds(Rates(1.0, 1e30)) == pytest.approx(cost.flop)
    assert cost.eflop(10) == cost.flop + 10 * cost.elements
    assert Rates(989e12, 4.8e12).intensity == pytest.approx(412, abs=0.2)


def test_weights_bound_few_rows_and_flops_many():
    rates = Rates(100.0, 1.0, element_bytes=1)  # 50 rows balance: 2 FLOPs a weight and row
    free = replace(step_cost(SMALL, DENSE, 1, 10), kv_elements=0.0, attention_flop=0.0)
    assert free.seconds(rates) == pytest.approx(matmul_weights(SMALL))
    free = replace(step_cost(SMALL, DENSE, 1, 100), kv_elements=0.0, attention_flop=0.0)
    assert free.seconds(rates) == pytest.approx(2 * matmul_weights(SMALL))


@pytest.mark.parametrize(
    ("context", "cache", "roof_ms"),
    [
        (4096, "dense", 4.45), (8192, "dense", 7.12), (16384, "dense", 12.47), (32768, "dense", 23.16),
        (16384, "qwen3-4b-0.80", 4.27), (32768, "qwen3-4b-0.80", 5.81),
        (16384, "qwen3-4b-0.86", 5.21), (32768, "qwen3-4b-0.86", 7.38),
    ],
)  # fmt: skip
def test_the_roofs_of_docs_performance(context, cache, roof_ms):
    """20 rows of Qwen3-4B at the 4,520 GB/s of that process; docs/performance.md."""
    shape = DENSE if cache == "dense" else CacheShape(pages=StepSchedule(cache).pages)
    assert step_cost(QWEN3_4B, shape, context, 20).seconds(Rates(989e12, 4.52e12)) * 1e3 == pytest.approx(
        roof_ms, rel=0.01
    )


def test_latencies_come_on_top_once_a_step():
    rates = Rates(989e12, 4.52e12)
    slow = replace(rates, layer_us=10.0, selection_us=5.0)
    for cache, expected in ((DENSE, 360e-6), (sparse(64), 360e-6 + 34 * 5e-6)):
        cost = step_cost(QWEN3_4B, cache, 4096, 20)
        assert cost.seconds(slow) - cost.seconds(rates) == pytest.approx(expected)


def test_the_printed_formula_by_hand():
    # D = 3 * 2 * 4, r = 2, I = 10; one sequence, prompt 4, response 32, B 8.
    dense = 2 * 100 * 32 + 12 * (2 * 4 + 32) * 32 * 24
    sparse_ = 2 * 100 * 32 + 2 * 12 * 24 * 8 * 32 + 12 * 24 * (2 * 4 + 32 / 16) * 32 / 2
    assert printed_speedup(SMALL, 100, 4, 32, 8, 10) == pytest.approx(dense / sparse_)


def test_sizes_below_one_are_refused():
    with pytest.raises(UserError, match="at least 1, not 0"):
        work([3], [0], rows=1)
    with pytest.raises(UserError, match="bytes_per_s: -1"):
        Rates(1.0, -1.0)
    with pytest.raises(UserError, match="selection_us: -2"):
        Rates(1.0, 1.0, selection_us=-2.0)
