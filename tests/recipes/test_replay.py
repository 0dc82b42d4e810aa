"""Rollouts of a run, dumped, and the training half run from them again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparrow.recipes import sparrow_grpo
from sparrow.recipes.sparrow_grpo import SparrowGRPO
from sparrow.rollout_dump import Replay

from .conftest import HERE, metrics

COMMON = ["steps=2", "validation=null"]
LORA = "distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001, rank: 4}"
TIMES = ("time/", "time_share/", "tokens_per_second", "train/mfu", "speedup/", "memory/")


def comparable(folder):
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in metrics(folder)]


def weights(folder, step=2):
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def dumping_run(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumping")
    config = ["--config", str(HERE / "mini.yaml"), f"model={checkpoint}", f"output_dir={folder}"]
    assert sparrow_grpo.main([*config, *COMMON, "dump_rollouts=true"]) == 0
    return folder


@pytest.fixture
def dumped(dumping_run, tmp_path):
    """`rollouts` of a run of two steps, to be spoilt."""
    shutil.copytree(dumping_run / "rollouts", tmp_path / "rollouts")
    return tmp_path / "rollouts"


def test_a_replay_is_the_run_bit_for_bit_and_has_no_engine(grpo, tmp_path, monkeypatch, capsys):
    grpo(*COMMON, LORA, "kl_coef=0.01", "dump_rollouts=true")
    engines = []
    setup = SparrowGRPO.setup
    monkeypatch.setattr(SparrowGRPO, "setup", lambda self: (setup(self), engines.append(self.engine)))
    capsys.readouterr()
    replay = f"replay={tmp_path / 'run' / 'rollouts'}"
    grpo(*COMMON, LORA, "kl_coef=0.01", replay, name="again")
    assert "changed since the dump" in capsys.readouterr().out, "the output_dir"
    assert comparable(tmp_path / "run") == comparable(tmp_path / "again")
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "again"))
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("run", "again")]
    assert samples[0] == samples[1]
    (engine,) = engines
    assert isinstance(engine, Replay)
    assert not any(isinstance(value, torch.Tensor) for value in vars(engine.cache).values()), "no KV pool"


def test_every_second_step_goes_on_from_a_save(grpo, tmp_path):
    grpo(*COMMON, "dump_rollouts=2", "checkpoint_every=1")
    rollouts = tmp_path / "run" / "rollouts"
    assert [path.name for path in rollouts.iterdir()] == ["step_000002"]
    save = tmp_path / "run" / "checkpoints" / "step_000001"
    grpo(*COMMON, f"replay={rollouts}", f"resume={save}", name="second")
    assert comparable(tmp_path / "second") == comparable(tmp_path / "run")[1:]
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "second"))


def test_what_a_dump_says_to_its_reader(dumping_run):
    folder = dumping_run / "rollouts" / "step_000001"
    assert {file.name for file in folder.iterdir()} == {
        "rank_000.safetensors", "rank_000.json", "rank_000.jsonl", "config.yaml",
    }  # fmt: skip
    rows = [json.loads(line) for line in (folder / "rank_000.jsonl").read_text().splitlines()]
    sample = json.loads((dumping_run / "samples.jsonl").read_text().splitlines()[0])
    assert (rows[0]["response"], rows[0]["tokens"]) == (sample["response"], sample["length"])
    assert [(row["prompt_number"], row["sample"]) for row in rows] == [(n, k) for n in range(4) for k in range(4)]
    assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


def test_two_processes_dump_and_one_replays(arguments, tmp_path):
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_grpo"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    sgd = "optimizer={_component_: torch.optim.SGD, lr: 0.1}"
    two = arguments(*COMMON, sgd, "dump_rollouts=true", name="two")
    subprocess.run([*command, *two], check=True, env=environment)
    rollouts = tmp_path / "two" / "rollouts"
    assert len(list((rollouts / "step_000002").glob("rank_*.safetensors"))) == 2
    assert sparrow_grpo.main(arguments(*COMMON, sgd, f"replay={rollouts}", name="one")) == 0
    for row, twin in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        for key in ("reward", "acceptance/p5", "completions/mean_length", "loss", "grad_norm", "budget/kv_read_ratio"):
            assert row[key] == pytest.approx(twin[key], abs=1e-4), key
    one, two_weights = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two_weights[name], atol=2e-5, rtol=0)


def edit(file, change) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def drop_tensor(folder, name) -> None:
    tensors = load_file(folder / "rank_000.safetensors")
    del tensors[name]
    save_file(tensors, folder / "rank_000.safetensors")


def shorten_tensor(folder, name) -> None:
    tensors = load_file(folder / "rank_000.safetensors")
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "rank_000.safetensors")


DAMAGE = {
    "missing step": (lambda folder: shutil.rmtree(folder), "step_000002 does not exist; there are step_000001 to"),
    "truncated": (lambda folder: os.truncate(folder / "rank_000.safetensors", 900), "truncated"),
    "no tensors": (lambda folder: (folder / "rank_000.safetensors").unlink(), "rank_000.safetensors is missing"),
    "no json": (lambda folder: (folder / "rank_000.json").write_text("{"), "rank_000.json is no dump"),
    "not ours": (lambda folder: (folder / "rank_000.json").write_text("[]"), "rank_000.json is no dump"),
    "format": (lambda folder: edit(folder / "rank_000.json", lambda c: c.update(format=7)), "has format 7"),
    "missing rank": (lambda folder: edit(folder / "rank_000.json", lambda c: c.update(world_size=2)), "rank_001"),
    "missing tensor": (lambda folder: drop_tensor(folder, "logprobs_T"), "lacks logprobs_T"),
    "short tensor": (lambda folder: shorten_tensor(folder, "logprobs_T"), "logprobs_T has"),
    "short prompts": (lambda folder: shorten_tensor(folder, "prompts_P"), "prompts_P has"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_dump_is_one_line_before_the_first_step(arguments, dumped, tmp_path, capsys, damage):
    spoil, words = DAMAGE[damage]
    spoil(dumped / "step_000002")
    refused(arguments(*COMMON, f"replay={dumped}", name="again"), capsys, words)
    assert not (tmp_path / "again" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("num_samples=2", "num_samples is 4 there and 2 in this run"),
        ("sampling.temperature=0.5", "'temperature': 1.0"),
        ("acceptance.top_k=5", "top_k is 20 there and 5 in this run"),
        ("data.seed=9", "prompt 0 is not that of this run's data"),
        ("prompts_per_step=5", "no rollouts of prompt 4"),
        ("replay=nowhere", "replay: nowhere is not a folder"),
        ("dump_rollouts=true", "dump_rollouts: a replay"),
        ("validation.every=1", "validation: a replay has no engine"),
        ("steps=3", "step_000003 does not exist; there are step_000001 to step_000002"),
    ],
)
def test_a_dump_of_another_run(arguments, dumped, capsys, override, words):
    overrides = [*COMMON, f"replay={dumped}", override]
    if override.startswith("validation"):
        overrides.remove("validation=null")
    refused(arguments(*overrides, name="again"), capsys, words)


def test_hidden_states_that_were_not_kept(grpo, arguments, tmp_path, capsys):
    grpo(*COMMON, "acceptance.estimator=top_k", "dump_rollouts=true")
    refused(arguments(*COMMON, f"replay={tmp_path / 'run' / 'rollouts'}", name="again"), capsys, "no hidden states")


def test_a_negative_interval(arguments, capsys):
    refused(arguments("dump_rollouts=-1"), capsys, "dump_rollouts: -1")


def refused(arguments, capsys, words) -> None:
    capsys.readouterr()
    assert sparrow_grpo.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert words in errors, errors
