"""What users get wrong: one clear line each, exit code 2, nothing lost."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from sparrow.components.schedule_file import read_schedule
from sparrow.recipes import sparrow_grpo, sparrow_sft

from .conftest import HERE, metrics

SEGMENTS = "sparrow.components.selector.SegmentSoftmaxSelector"
PARTS = """
import math
import os
import signal
import torch
from sparrow.components.pointer_chase import PointerChase
from sparrow.components.loss import ClippedSurrogate, LossOutput

def short(completions, **columns):
    return [1.0]

class NanLoss:
    def __call__(self, inputs):
        output = ClippedSurrogate()(inputs)
        return LossOutput(output.loss_T * math.nan, output.metrics)

class Stopping:
    # Prompts whose reader presses Ctrl-C before number `at`, counted over all readings.
    size = None
    def __init__(self, at: int):
        self.problems, self.at, self.read = PointerChase(nodes=5, hops=2), at, 0
    def example(self, number):
        self.read += 1
        if self.read == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return self.problems.example(number)

class NanOnce:
    calls = 0
    def __call__(self, inputs):
        NanOnce.calls += 1
        output = ClippedSurrogate()(inputs)
        return LossOutput(output.loss_T * (math.nan if NanOnce.calls == 1 else 1.0), output.metrics)
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's own components."""
    name = f"parts_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], *words: str) -> None:
    capsys.readouterr()
    assert sparrow_grpo.main(arguments) == 2
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, errors
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("prompts_per_stp=3", ["prompts_per_stp", "prompts_per_step"]),
        ("minibatches=many", ["minibatches", "many", "int"]),
        ("kv_cache._component_=sparrow.components.kv_cache.SparsKVCache", ["SparsKVCache", "SparseKVCache"]),
        ("kv_cache.pagesize=4", ["pagesize", "page_size"]),
        ("kv_cache.page_size=5", ["block_size 16", "page_size 5"]),
        ("kv_cache.budget.pages=[2]", ["2", "sink", "recent"]),
        ("kv_cache.backend=triton", ["kv_cache.backend", "triton", "CUDA"]),
        ("kv_cache.selector={_component_: " + SEGMENTS + ", segments: 3}", ["segments: 3", "page_size 4"]),
        ("kv_cache.budget.path=qwen3-4b-0.86", ["~kv_cache.budget.pages ~kv_cache.budget.bin_width"]),
        ("num_samples=1", ["num_samples", "1"]),
        ("sampling.temperature=0.0", ["sampling.temperature", "greedy"]),
        ("sampling.top_k=20", ["sampling", "top_k 20", "ratio is not 1"]),
        ("sampling.top_p=0.9", ["sampling", "top_p 0.9", "ratio is not 1"]),
        ("sampling.min_p=0.1", ["sampling", "min_p 0.1", "ratio is not 1"]),
        ("prompts_per_step=0", ["prompts_per_step", "0"]),
        ("replicate=2", ["replicate: 2 does not divide the 1 processes"]),
        ("dtype=float16", ["dtype", "float16", "bfloat16"]),
        ("engine.kv_tokens=32", ["engine.kv_tokens", "32"]),
        ("device=tpu", ["device", "tpu"]),
        ("flop_per_s=0", ["flop_per_s", "0"]),
        ("max_grad_norm=-1.0", ["max_grad_norm: -1.0 must be above 0"]),
        ("lr_warmup_steps=-5", ["lr_warmup_steps: -5 must not be negative"]),
        ("logprob_chunk=0", ["logprob_chunk: 0 must be at least 1"]),
        ("keep_last=0", ["keep_last: 0 must be at least 1"]),
        ("validation.every=0", ["validation.every: 0 must be at least 1"]),
        ("offload_activations=true", ["offload_activations", "activation_checkpointing"]),
        ("optimizer={_component_: torchao.optim.CPUOffloadOptimizer}", ["CPUOffloadOptimizer", "OffloadedAdamW"]),
        ("model=nowhere", ["nowhere", "does not exist"]),
        ("resume=nowhere", ["resume", "nowhere"]),
        ("aggregation.mode=mean", ["mean", "token-mean"]),
        ("correction.upper=0.5", ["upper", "0.5"]),
        ("alarms.p5.limit=86", ["alarms", "p5.limit 86", "at most 1", "null"]),
        ("sampling.temperature=1e-39", ["sampling.temperature", "1e-39", "1e-05"]),
    ],
)
def test_a_bad_value_is_named(arguments, capsys, override, words):
    refused(arguments(override), capsys, *words)


def test_a_schedule_of_another_model(arguments, capsys):
    schedule = ["~kv_cache.budget.pages", "~kv_cache.budget.bin_width", "kv_cache.budget.path=qwen3-4b-0.86"]
    refused(arguments(*schedule), capsys, "qwen3-4b", "page_size", "allow_foreign")
    # Before anything expensive: the model is not even looked for.
    refused(arguments(*schedule, "model=nowhere"), capsys, "qwen3-4b", "page_size", "allow_foreign")


def test_a_schedule_of_another_architecture_under_the_name_of_every_save(arguments, tmp_path, capsys):
    """Both are called `model`, and so says the schedule."""
    node = vars(read_schedule("qwen3-4b-0.86")) | {
        "model": "model", "architecture": "qwen3, 5 layers", "weights": "aa", "source": "calibrated",
        "page_size": 4, "selector": "head_softmax", "estimator": "exact",
    }  # fmt: skip
    file = tmp_path / "schedule.yaml"
    file.write_text(yaml.safe_dump({key: value for key, value in node.items() if value is not None}))
    schedule = ["~kv_cache.budget.pages", "~kv_cache.budget.bin_width", f"kv_cache.budget.path={file}"]
    refused(arguments(*schedule), capsys, "architecture is 'qwen3, 5 layers' in the schedule", "3 layers of 64")
    assert sparrow_grpo.main(arguments(*schedule, "kv_cache.budget.allow_foreign=true", "steps=1")) == 0
    printed = capsys.readouterr().out
    assert "allowed to differ: tau is 0.86 in the schedule, 0.91 in this run" in printed
    assert "allowed to differ: weights are not those" in printed


def test_a_truncated_checkpoint(arguments, checkpoint, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    refused(arguments(f"model={broken}"), capsys, "model.safetensors", "truncated")


@pytest.mark.parametrize("rows", [40, 200])
def test_a_tokenizer_of_another_model(arguments, checkpoint, tmp_path, capsys, rows):
    """Before the weights: they are not even there."""
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "eos_token_id": 199}))
    words = ["ids up to 71", "vocab_size of config.json is 40"] if rows == 40 else ["config.json", "eos_token_id 199"]
    refused(arguments(f"model={folder}"), capsys, str(folder), *words, "not the tokenizer of this model")


def test_an_empty_data_set(arguments, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    data = f"data={{_component_: sparrow.components.data.JsonlPrompts, path: {tmp_path / 'empty.jsonl'}}}"
    refused(arguments(data), capsys, "empty.jsonl", "no examples")


def test_a_reward_of_the_wrong_length(arguments, parts, capsys):
    refused(arguments(f"reward.0.function={parts}.short"), capsys, "short", "1 values for")


def test_a_loss_that_is_never_finite_ends_the_run(arguments, parts, tmp_path, capsys):
    capsys.readouterr()
    overrides = [f"loss={{_component_: {parts}.NanLoss}}", "steps=5", "max_nonfinite_steps=2", "checkpoint_every=1"]
    assert sparrow_grpo.main(arguments(*overrides)) == 2
    errors = capsys.readouterr().err
    assert errors.count("warning: step") == 2 and "loss nan" in errors
    assert "error: 2 steps in a row were not finite (max_nonfinite_steps 2)" in errors
    assert [row.get("update/skipped") for row in metrics(tmp_path / "run")] == [None, 1.0]


def test_one_loss_that_is_not_finite_is_skipped(arguments, parts, tmp_path):
    assert sparrow_grpo.main(arguments(f"loss={{_component_: {parts}.NanOnce}}", "steps=2")) == 0
    assert [row.get("update/skipped") for row in metrics(tmp_path / "run")] == [None, 1.0, 0.0]


def test_a_skipped_minibatch_is_not_hidden_by_the_next(arguments, parts, tmp_path):
    overrides = [f"loss={{_component_: {parts}.NanOnce}}", "steps=1", "minibatches=2", "num_samples=8"]
    assert sparrow_grpo.main(arguments(*overrides)) == 0
    row = metrics(tmp_path / "run")[1]
    assert row["update/skipped"] == 1.0
    assert row["loss"] == row["grad_norm"] == "nan"
    assert row["policy/ratio_error"] == 0.0, "the first minibatch took no step, so the second is still on-policy"


def test_ctrl_c_in_a_validation_keeps_the_row_of_the_step_that_is_saved(arguments, parts, tmp_path):
    data = f"validation={{data: {{_component_: {parts}.Stopping, at: 5}}, prompts: 4, every: 1}}"
    assert sparrow_grpo.main(arguments(data, "steps=2")) == 130
    first, second = metrics(tmp_path / "run")
    assert (first["step"], second["step"]) == (0, 1)
    assert "reward" in second and "val/mean@1" not in second
    assert (tmp_path / "run" / "checkpoints" / "step_000001" / "COMPLETE").exists()


def test_a_warm_up_of_another_alphabet(tmp_path, capsys):
    arguments = ["--config", str(HERE / "mini_sft.yaml"), f"output_dir={tmp_path}", "fresh.decoder.vocab_size=7"]
    assert sparrow_sft.main(arguments) == 2
    assert "fresh.decoder.vocab_size: 7, the alphabet has 72" in capsys.readouterr().err


def test_a_validation_of_more_prompts_than_there_are_is_refused(arguments, tmp_path, capsys):
    """They would come round, and count twice. The prompt that is too long does not count as there."""
    prompts = [{"prompt": text, "response": "(1:2)"} for text in ("(0:1)", "(1:2)", "(2:0)", "(3:3)" * 40)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    data = f"{{_component_: sparrow.components.data.JsonlPrompts, path: {tmp_path}/held_out.jsonl}}"
    overrides = [f"validation={{data: {data}, prompts: 4, every: 1}}", "max_prompt_tokens=40"]
    refused(arguments(*overrides), capsys, "validation.prompts: 4 is above the 3 prompts of the data")
