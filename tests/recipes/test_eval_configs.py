"""The configs of sparrow_eval that come with Sparrow."""

from __future__ import annotations

import pytest

from sparrow import registry
from sparrow.config import load_config
from sparrow.recipes.eval_config import EvalConfig, check, windows

CONFIGS = [config.name for config in registry.configs() if config.recipe == "sparrow_eval"]
PREPARED = {config.name.removeprefix("prepare/") for config in registry.configs() if config.name.startswith("prepare/")}
CONTEXT = 40960  # Qwen3's
LONGEST_PROMPT = 2048


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_holds_together(name):
    cfg = load_config(EvalConfig, name, [] if name == "eval_tiny" else ["model=Qwen3-4B", "mode=both"])
    check(cfg)
    for benchmark in cfg.chosen:
        assert benchmark.sampling is not None and benchmark.max_new_tokens is not None
        if name != "eval_tiny":
            assert benchmark.name in PREPARED
            assert benchmark.data.kwargs["path"] == f"prompts/{benchmark.name}.jsonl"
            assert benchmark.reference and benchmark.max_new_tokens + LONGEST_PROMPT <= CONTEXT
            assert (benchmark.sampling.temperature, benchmark.sampling.top_p, benchmark.sampling.top_k) == (
                0.6,
                0.95,
                20,
            )


def test_the_pool_of_the_large_configs_is_what_they_say():
    cfg = load_config(EvalConfig, "eval_math", ["model=Qwen3-4B"])
    layers, kv_heads, head_dim = 36, 8, 128  # of Qwen3-4B
    assert cfg.engine.kv_tokens * layers * kv_heads * head_dim * 2 * 2 == pytest.approx(97e9, rel=0.01)


@pytest.mark.parametrize(("prompts", "size"), [(1, 64), (64, 64), (65, 64), (500, 128), (10, 3), (7, 1)])
def test_windows_cover_all_prompts_and_none_is_small(prompts, size):
    plan = windows(prompts, size)
    assert [number for window in plan for number in window] == list(range(prompts))
    assert max(map(len, plan)) <= size and max(map(len, plan)) - min(map(len, plan)) <= 1
    assert len(plan) == -(-prompts // size)


def test_seeds_differ_between_benchmarks_and_not_with_their_order():
    cfg = load_config(EvalConfig, "eval_math", ["model=Qwen3-4B"])
    seeds = {benchmark.name: cfg.seed_of(benchmark) for benchmark in cfg.benchmarks}
    assert len(set(seeds.values())) == len(seeds) and all(0 <= seed < 2**64 for seed in seeds.values())
    fewer = load_config(EvalConfig, "eval_math", ["model=Qwen3-4B", "only=[gsm8k]"])
    assert [(b.name, fewer.seed_of(b)) for b in fewer.chosen] == [("gsm8k", seeds["gsm8k"])]
    other = load_config(EvalConfig, "eval_math", ["model=Qwen3-4B", "seed=1"])
    assert other.seed_of(other.benchmarks[0]) != seeds["math_500"]
