"""The configs for Qwen3 as they ship: the paper's settings, components that build, and a plan that holds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

from sparrow import registry
from sparrow.config import load_config
from sparrow.memory_plan import GIB, Job, check_fits
from sparrow.models.decoder_config import DecoderConfig
from sparrow.recipes import sparrow_grpo
from sparrow.recipes.grpo_config import GRPOConfig, check
from sparrow.recipes.grpo_memory import check_memory, memory_plan
from sparrow.recipes.sparrow_grpo import SparrowGRPO

from .conftest import HERE

# layers, hidden size, MLP, query heads, tied head; all have 8 KV heads of 128
SIZES = {
    "0.6b": (28, 1024, 3072, 16, True),
    "1.7b": (28, 2048, 6144, 16, True),
    "4b": (36, 2560, 9728, 32, True),
    "8b": (36, 4096, 12288, 32, False),
    "14b": (40, 5120, 17408, 40, False),
}
CONFIGS = [(size, code) for size in SIZES for code in (False, True)]
MEMORY = 141 * 10**9


def name(size: str, code: bool) -> str:
    return f"qwen3_{size}" + "_code" * code


def shape(size: str) -> DecoderConfig:
    layers, hidden, mlp, heads, tied = SIZES[size]
    return DecoderConfig(
        vocab_size=151936, hidden_size=hidden, intermediate_size=mlp, num_layers=layers, num_heads=heads,
        num_kv_heads=8, head_dim=128, tie_word_embeddings=tied, max_position_embeddings=40960,
    )  # fmt: skip


PREPARED = {
    "polaris_53k.jsonl": {"id": "a", "prompt": "What is 1/2? Answer in \\boxed{}.", "answer": "\\frac{1}{2}"},
    "taco.jsonl": {"id": "b", "prompt": "Echo a line.", "tests": {"style": "stdin", "inputs": ["x"], "outputs": ["x"]}},
}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user who prepared the prompts."""
    (tmp_path / "prompts").mkdir()
    for name, row in PREPARED.items():
        (tmp_path / "prompts" / name).write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overrides(size: str) -> list[str]:
    return [f"model=models/Qwen3-{size.upper()}"]


def test_there_are_no_others() -> None:
    shipped = {config.name for config in registry.configs() if config.recipe == "sparrow_grpo"}
    distilled = {"qwen3_1.7b_distill"}
    assert {n for n in shipped if n.startswith("qwen3_")} == {name(*config) for config in CONFIGS} | distilled


@pytest.mark.parametrize(("size", "code"), CONFIGS)
def test_settings_are_the_papers(size: str, code: bool) -> None:
    cfg = load_config(GRPOConfig, name(size, code), overrides(size))
    check(cfg)
    assert cfg.output_dir == f"outputs/{name(size, code)}"
    assert cfg.num_samples == 8 and cfg.minibatches == 1 and cfg.kl_coef == 0
    assert cfg.sampling.temperature == 1 and not cfg.sampling.truncates
    assert cfg.engine.max_new_tokens == (24000 if code else 37000)
    assert cfg.kv_cache.kwargs["budget"].kwargs == {"path": f"qwen3-{size}-0.86"}
    assert cfg.dtype == "bfloat16" and cfg.activation_checkpointing and cfg.replicate == 1
    assert cfg.optimizer.kwargs["lr"] == (5e-7 if code else 1e-6) and cfg.optimizer.kwargs["weight_decay"] == 0.01


@pytest.mark.parametrize(("size", "code"), CONFIGS)
def test_every_component_builds_and_the_schedule_is_the_models(user: Path, size: str, code: bool) -> None:
    recipe = SparrowGRPO(load_config(GRPOConfig, name(size, code), overrides(size)))
    recipe._build_components()
    columns = recipe.data.example(0).columns
    programs = ["```python\nprint(input())\n```", "```python\npass\n```"]
    completions = programs if code else ["\\boxed{.5}", "\\boxed{5}"]
    try:
        [(_, weight, reward)] = recipe.rewards
        assert reward(completions, **{key: [value] * 2 for key, value in columns.items()}) == [1.0, 0.0]
        assert weight == 1.0 and reward.problems({key: [value] for key, value in columns.items()}) == [None]
    finally:
        recipe.cleanup()
    assert recipe._schedule_differences() == []
    assert (recipe.loss.clip_low, recipe.loss.clip_high, recipe.loss.dual_clip) == (0.2, 0.28, 3.0)
    assert (recipe.correction.level, recipe.correction.mode, recipe.correction.upper) == ("token", "truncate", 2.0)
    assert recipe.aggregation.mode == "token-mean"
    assert isinstance(recipe.cfg.optimizer.build([torch.nn.Parameter(torch.ones(2))]), torch.optim.AdamW)


@pytest.mark.parametrize(("size", "code"), CONFIGS)
def test_the_plan_in_the_comment_holds(size: str, code: bool) -> None:
    text = next(config for config in registry.configs() if config.name == name(size, code)).path.read_text()
    found = re.search(r"^# Memory: planned for (\d) GPUs? of 141 GB, peak (\d+) GiB; bf16, fp32 masters", text, re.M)
    assert found, text
    cfg = load_config(GRPOConfig, name(size, code), overrides(size))
    gpus = int(found[1])
    plan = memory_plan(cfg, shape(size), cfg.kv_cache.build(), gpus)
    assert (f"fp32 masters in {gpus} shards" in text) == (plan.job.shards > 1)
    host = re.search(r"^# and (\d+) GiB of the host's memory for each GPU", text, re.M)
    assert (0 if host is None else int(host[1])) == math.ceil(sum(plan.host.values()) / GIB)
    peak = max(map(plan.total, ("rollout", "score", "update", "step")))
    assert round(peak / GIB) == int(found[2]) and peak < 0.95 * MEMORY
    assert plan.job.prompt_tokens == 3000
    assert plan.job.forward_tokens == cfg.micro_batch_tokens, "a longest sequence is one micro-batch"
    assert cfg.engine.kv_tokens >= plan.job.forward_tokens, "it can be sampled, too"


def test_without_weights_the_run_ends_where_it_would_load_them(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "qwen3_4b", "model=models/Qwen3-4B"]
    assert sparrow_grpo.main(arguments) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert "models/Qwen3-4B/config.json does not exist; a model is a Hugging Face folder" in errors[0]
    assert sparrow_grpo.main([*arguments, "data.path=none.jsonl"]) == 2
    assert "none.jsonl: cannot be read" in capsys.readouterr().err


def test_on_the_cpu_nothing_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    cfg = load_config(GRPOConfig, "qwen3_14b", overrides("14b"))
    check_memory(cfg, shape("14b"), cfg.kv_cache.build(), torch.device("cpu"))
    assert capsys.readouterr().out == ""


def test_unsharded_fp32_at_full_length_is_refused_by_its_activations() -> None:
    """A clear refusal in place of an error out of memory after the rollout."""
    fp32 = [*overrides("4b"), "dtype=float32", "activation_checkpointing=false"]
    cfg = load_config(GRPOConfig, "qwen3_4b", fp32)
    plan = memory_plan(cfg, shape("4b"), cfg.kv_cache.build(), gpus=1)
    with pytest.raises(
        ValueError, match=r"the update phase .* activations kept: activation_checkpointing: true .* 37000 can be \d+ at"
    ):
        check_fits(plan, MEMORY)


@pytest.mark.parametrize("size", ["8b", "14b"])
def test_activations_are_offloaded_only_where_they_must_be(size: str) -> None:
    cfg = load_config(GRPOConfig, f"qwen3_{size}", [*overrides(size), "offload_activations=false"])
    plan = memory_plan(cfg, shape(size), cfg.kv_cache.build(), gpus={"8b": 2, "14b": 4}[size])
    assert plan.job.activations == "recomputed" and plan.total("update") > MEMORY
    more = memory_plan(cfg, shape(size), cfg.kv_cache.build(), gpus={"8b": 4, "14b": 8}[size])
    assert more.total("update") < MEMORY


def test_the_plan_follows_the_config() -> None:
    cache = load_config(GRPOConfig, "qwen3_4b", overrides("4b")).kv_cache.build()

    def job(*changes: str, gpus: int = 1) -> Job:
        return memory_plan(
            load_config(GRPOConfig, "qwen3_4b", [*overrides("4b"), *changes]), shape("4b"), cache, gpus
        ).job

    assert (job().dtype, job().activations, job().flex, job().sharded) == (torch.bfloat16, "recomputed", True, True)
    assert job("offload_activations=true").activations == "offloaded"
    assert not job("attention=sdpa").flex
    fp32 = job("dtype=float32", "~engine.dtype")
    assert not fp32.flex and not fp32.sharded and fp32.rollout_dtype == torch.float32
    assert job("~engine.dtype").rollout_dtype == torch.bfloat16
    assert (job(gpus=8).shards, job("replicate=2", gpus=8).shards) == (8, 4)
    assert job("replay=somewhere").replay
    with pytest.raises(ValueError, match="replicate: 3 does not divide the 8 processes"):
        job("replicate=3", gpus=8)


@pytest.mark.gpu
def test_on_a_gpu_the_recipe_prints_the_plan_and_refuses(checkpoint: Path, tmp_path: Path, capsys) -> None:
    arguments = ["--config", str(HERE / "mini.yaml"), f"model={checkpoint}", f"output_dir={tmp_path / 'run'}"]
    capsys.readouterr()
    before = torch.cuda.memory_allocated()  # what other tests of this process hold
    assert sparrow_grpo.main([*arguments, "device=cuda", "engine.kv_tokens=10000000000"]) == 2
    printed = capsys.readouterr()
    assert re.search(r"^KV pool +\d+\.\d\d$", printed.out, re.M)
    assert "memory: the rollout phase needs" in printed.err and "engine.kv_tokens 10000000000 can be" in printed.err
    assert torch.cuda.memory_allocated() == before
