"""The makespan of a queue on a tiny model: every step taken, and one in eight."""

from __future__ import annotations

import pytest
import torch
from rollout_makespan import MakespanResult, WindowTimes, run_windows, summarise
from rollout_queue import EngineSizes, QueueRun, make_queue
from rollout_shapes import RandomModel, kv_cache, model_config, random_model, step_bytes, weight_bytes

from sparrow.errors import UserError

LIMITS = [60, 3, 44, 1, 100, 17, 90, 8, 33, 71, 100, 52]


@pytest.fixture(scope="module")
def tiny() -> RandomModel:
    return random_model("tiny", torch.device("cpu"))


def measured(tiny: RandomModel, stride: int, kv_tokens: int | None) -> tuple[MakespanResult, list[WindowTimes], list]:
    queue = make_queue("tiny", 3, 40, LIMITS, 100, seed=0)
    sizes = EngineSizes(max_rows=5, kv_tokens=kv_tokens, steps_per_look=4, stride=stride)
    cache = kv_cache("64", "centroid", "gather")
    cache.block_size = 16  # so that a short response grows over many
    run = QueueRun(tiny, cache, queue, sizes)
    run.warm_up()
    seen: list[int] = []
    windows = run_windows(run, lambda tokens, seconds: seen.append(tokens))
    assert seen == sorted(seen) and seen[-1] == sum(LIMITS)
    lengths_S, _ = run.generation.transcript.packed(len(LIMITS))
    assert lengths_S.tolist() == LIMITS
    result = summarise(run, windows, ("64", "gather", "centroid"), 10.0)
    order = run.starts.order
    run.close()
    return result, windows, order


@pytest.mark.parametrize("kv_tokens", [None, 14 * 16], ids=["roomy", "tight"])
def test_a_sampled_run_sees_what_the_full_one_sees(tiny, kv_tokens):
    full, _, full_order = measured(tiny, 1, kv_tokens)
    sampled, windows, order = measured(tiny, 8, kv_tokens)
    assert order == full_order == [(prompt, sample) for prompt in range(4) for sample in range(3)]
    assert full.executed_steps == full.steps and sampled.executed_steps < sampled.steps / 6
    assert all(window.executed == min(window.steps, 1) for window in windows)
    # A row leaves up to 8 steps late instead of 4.
    assert sampled.steps == pytest.approx(full.steps, rel=0.2)
    assert sampled.mean_rows == pytest.approx(full.mean_rows, rel=0.2)
    for result in (full, sampled):
        assert result.makespan_s > 0 and result.ms_per_step > 0 and result.gb_s > 0
        assert result.makespan_s == pytest.approx(sum(result.seconds.values()))
        assert (result.preemptions > 0) == (result.seconds["swap"] > 0) == (kv_tokens is not None)
        assert result.peak_blocks <= result.num_blocks and result.peak_rows <= 5
    longest = max(max(window.lengths, default=0) for window in windows)
    assert 100 < longest <= 60 + 100


def test_figures_of_given_windows(tiny):
    """Two windows of four steps: of eight rows, and of one, which is less than a quarter."""
    queue = make_queue("tiny", 1, 10, [5, 9], 9, seed=0)
    run = QueueRun(tiny, kv_cache("dense", "centroid", "gather"), queue, EngineSizes(max_rows=2, kv_tokens=512))
    run_windows(run, lambda tokens, seconds: None)
    windows = [
        WindowTimes([100] * 8, 4, 1, decode=2.0, prefill=0.5, swap=0.25, host=0.25),
        WindowTimes([200], 4, 1, decode=0.5, prefill=0.0, swap=0.0, host=0.5),
    ]
    result = summarise(run, windows, ("dense", "gather", "centroid"), roof_gb_s=1e-2)
    run.close()
    assert result.makespan_s == 4.0 and result.tokens_per_s == 14 / 4
    assert result.seconds == {"decode": 2.5, "prefill": 0.5, "swap": 0.25, "host": 0.75}
    assert result.steps == 8 and result.executed_steps == 2 and result.ms_per_step == 2500 / 8
    assert result.mean_rows == 4.5 and result.peak_rows == 8 and result.tail_share == 1 / 4
    assert result.outside_graphs_share == 0.75 / 3.25
    weights = weight_bytes(tiny.config, torch.float32)
    read = 4 * (weights + 800 * 4 * 2 * 2 * 16 * 4) + 4 * (weights + 200 * 4 * 2 * 2 * 16 * 4)
    assert result.gb_s == pytest.approx(read / 2.5 / 1e9) and result.share_of_roof == pytest.approx(result.gb_s / 1e-2)


def test_the_byte_model_by_hand(tiny):
    # Tiny: 4 layers of q, k, v, o (64 x 64, 2 of 64 x 32, 64 x 64) and three of 64 x 128; the tied head is 512 x 64.
    weights = 4 * (4 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128) + 512 * 64)
    entry = 2 * 2 * 16 * 4  # a key and a value of 2 heads of 16, fp32
    assert step_bytes(tiny, kv_cache("dense", "centroid", "gather"), [100, 40]) == weights + 140 * 4 * entry
    # 64 tokens are 4 pages. Of 100 tokens, 2 layers read all, 2 read 64 and score 7 landmarks of half an entry; 40
    # tokens are within the budget.
    sparse = 2 * 100 + 2 * (64 + 3.5) + 4 * 40
    assert step_bytes(tiny, kv_cache("64", "centroid", "gather"), [100, 40]) == weights + int(sparse * entry)


def test_weight_bytes_are_the_parameters_of_the_published_models():
    # Qwen3-4B's card: 4.0 billion, 3.6 without the embedding table, which is tied; 8B: 8.2 and 6.95, not tied.
    four, eight = (weight_bytes(model_config(name), torch.bfloat16) / 2e9 for name in ("4b", "8b"))
    assert four == pytest.approx(4.02, abs=0.01) and eight == pytest.approx(8.19 - 151936 * 4096 / 1e9, abs=0.01)


@pytest.mark.parametrize(
    ("samples", "longest", "words"),
    [(5, 100, "--requests 12 is no multiple of --samples 5"), (3, 40960, r"--longest 40960: .* tiny has 40960")],
)
def test_impossible_queues_are_refused(samples, longest, words):
    with pytest.raises(UserError, match=words):
        make_queue("tiny", samples, 100, LIMITS, longest, seed=0)
