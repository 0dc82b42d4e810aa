"""sparrow_eval on a mini model: real files, real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from sparrow.components.data import Example
from sparrow.components.distiller import LoRADistiller
from sparrow.errors import UserError
from sparrow.models.adapted import copy_weights
from sparrow.models.checkpoint import load_decoder, save_decoder
from sparrow.recipes import sparrow_eval
from sparrow.recipes.eval_benchmark import Task
from sparrow.recipes.eval_config import Benchmark
from sparrow.recipes.eval_store import SampleStore
from sparrow.training.run_state import save_run_state

from .conftest import HERE

ALL_PAGES = "kv_cache.budget.pages=1000"
FILES = ("samples.jsonl", "settings.json")


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(*overrides: str, name: str = "eval") -> list[str]:
        config = ["--config", str(HERE / "mini_eval.yaml"), f"model={checkpoint}", f"output_dir={tmp_path / name}"]
        return [*config, *overrides]

    return make


@pytest.fixture
def evaluate(arguments: Callable[..., list[str]], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs an evaluation in this process and returns results.json."""

    def run(*overrides: str, name: str = "eval") -> dict[str, Any]:
        assert sparrow_eval.main(arguments(*overrides, name=name)) == 0
        return json.loads((tmp_path / name / "results.json").read_text())

    return run


def samples(folder: Path, mode: str = "dense", benchmark: str = "pointers") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / benchmark / mode / "samples.jsonl").read_text().splitlines()]


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]], *but: str) -> bool:
    def kept(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in but}

    return list(map(kept, rows)) == list(map(kept, others))


def assert_identical(one: Path, other: Path) -> None:
    for name in ("results.json", *(f"pointers/dense/{name}" for name in FILES)):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_figures_are_those_of_the_samples(evaluate, tmp_path, capsys):
    results = evaluate("mode=both")["benchmarks"]["pointers"]
    printed, errors = capsys.readouterr()
    assert "samples" not in errors, "no bar where there is no terminal"
    rows = samples(tmp_path / "eval")
    assert [(row["id"], row["sample"]) for row in rows] == [(str(i), s) for i in range(10) for s in range(4)]
    rewards = [[row["reward"] for row in rows[i : i + 4]] for i in range(0, 40, 4)]
    assert 0 < sum(map(sum, rewards)) < 40, "else nothing is tested"
    pairs = [max(pair) for group in rewards for pair in combinations(group, 2)]
    dense = results["dense"]
    assert dense["mean@4"]["value"] == pytest.approx(sum(map(sum, rewards)) / 40)
    assert dense["pass@2"]["value"] == pytest.approx(sum(pairs) / len(pairs))
    assert dense["pass@4"]["value"] == pytest.approx(sum(map(max, rewards)) / 10)
    assert dense["mean@4"]["low"] < dense["mean@4"]["value"] < dense["mean@4"]["high"]
    assert dense["mean_length"] == pytest.approx(sum(row["tokens"] for row in rows) / 40)
    assert dense["clipped_ratio"] == pytest.approx(sum(not row["terminated"] for row in rows) / 40)
    assert dense["kv_read_ratio"] == 1.0 and 0.5 < results["sparse"]["kv_read_ratio"] < 1
    difference = results["sparse_minus_dense"]["mean@4"]["value"]
    assert difference == pytest.approx(results["sparse"]["mean@4"]["value"] - dense["mean@4"]["value"])
    assert "maj@4" not in dense, "this reward finds no answers"
    for words in (
        "pointers: 10 prompts x 4 samples, dense and sparse, seed", "first prompt, 24 tokens: '(", "temperature=1.0",
        "sparse - dense", "KV read", "tokens/s", "few problems, hence wide intervals: pointers (10)",
    ):  # fmt: skip
        assert words in printed, words


def test_sparse_with_all_pages_is_dense(evaluate, tmp_path):
    results = evaluate("mode=both", ALL_PAGES)["benchmarks"]["pointers"]
    assert same(samples(tmp_path / "eval"), samples(tmp_path / "eval", "sparse"), "mode")
    assert set(results["sparse_minus_dense"]["mean@4"].values()) == {0.0}
    assert results["sparse"]["kv_read_ratio"] == 1.0


def test_sparse_and_greedy(evaluate, tmp_path):
    results = evaluate("mode=sparse", "sampling.temperature=0", "benchmarks.0.num_samples=1")["benchmarks"]["pointers"]
    assert "dense" not in results and 0 <= results["sparse"]["mean@1"]["value"] <= 1
    assert len(samples(tmp_path / "eval", "sparse")) == 10


def test_killed_half_way_the_same_command_ends_in_the_same_files(arguments, evaluate, tmp_path, capsys):
    evaluate(name="whole")
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_eval", *arguments(name="parts")]
    log = tmp_path / "parts" / "pointers" / "dense" / "windows.jsonl"
    for wanted in (1, 2):  # twice
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not (log.is_file() and log.read_bytes().count(b"\n") >= wanted) and time.monotonic() < deadline:
            time.sleep(0.005)
        process.kill()
        process.wait()
    done = log.read_bytes().count(b"\n")
    # What a kill within a window leaves, whenever it was.
    with (log.parent / "samples.jsonl").open("ab") as file:
        file.write(b'{"benchmark": "pointers", "id"')
    with log.open("ab") as file:
        file.write(b'{"prompts": 3')
    capsys.readouterr()
    evaluate(name="parts")
    assert f"going on: pointers, dense has {done} of 4 windows" in capsys.readouterr().out
    assert_identical(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_is_clean_and_goes_on(arguments, evaluate, tmp_path):
    evaluate(name="whole")
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_eval", *arguments(name="parts")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "parts" / "pointers" / "dense" / "windows.jsonl"
    deadline = time.monotonic() + 120
    while not log.is_file() and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "error: stopped; the same command goes on" in errors and "Traceback" not in errors
    evaluate(name="parts")
    assert_identical(tmp_path / "whole", tmp_path / "parts")


def test_two_processes_equal_one(arguments, evaluate, tmp_path):
    one = evaluate("mode=both", name="one")
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_eval"]
    run = arguments("mode=both", "engine.max_rows=4", name="two")  # rows for less than a share: prompts are claimed
    subprocess.run([*command, *run], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    for mode in ("dense", "sparse"):
        assert same(samples(tmp_path / "one", mode), samples(tmp_path / "two", mode))
    assert json.loads((tmp_path / "two" / "results.json").read_text())["benchmarks"] == one["benchmarks"]


def test_an_adapter_is_merged(evaluate, checkpoint, tmp_path):
    model = load_decoder(checkpoint)
    adapter = LoRADistiller(learning_rate=0.1, rank=4)
    adapter.attach(model)
    torch.manual_seed(0)
    for name, parameter in adapter.adapter.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapter.export(tmp_path / "adapter")
    merged = load_decoder(checkpoint)
    with adapter.rollout():
        copy_weights(merged, model)
    save_decoder(merged, tmp_path / "merged", checkpoint)
    evaluate(name="plain")
    evaluate(f"adapter={tmp_path / 'adapter'}", name="with_adapter")
    evaluate(f"model={tmp_path / 'merged'}", name="merged")
    assert same(samples(tmp_path / "with_adapter"), samples(tmp_path / "merged"))
    assert not same(samples(tmp_path / "with_adapter"), samples(tmp_path / "plain"))


def test_the_model_within_a_save(evaluate, arguments, checkpoint, tmp_path, capsys):
    save = save_run_state(tmp_path, 3, lambda folder: shutil.copytree(checkpoint, folder / "model"), keep_last=1)
    evaluate(name="plain")
    evaluate(f"model={save}", name="saved")
    assert same(samples(tmp_path / "plain"), samples(tmp_path / "saved"))
    (save / "COMPLETE").unlink()
    assert sparrow_eval.main(arguments(f"model={save}", name="broken")) == 2
    assert "no complete run state" in capsys.readouterr().err


PARTS = """
from pathlib import Path

class Judge:
    name, weight = "judge", 0.5
    def __init__(self, note):
        self.note, self.counts = note, {}
    def __call__(self, completions, answer, prompts, completion_lengths, truncated, **columns):
        assert all(isinstance(p, str) for p in prompts) and all(n >= 1 for n in completion_lengths)
        right = [text.startswith(gold) for text, gold in zip(completions, answer)]
        rewards = [None if cut else float(r) for r, cut in zip(right, truncated)]
        self.counts = {"correct": rewards.count(1.0), "wrong": rewards.count(0.0), "error": rewards.count(None)}
        return rewards
    def problems(self, columns):
        return [None if answer else "empty" for answer in columns["answer"]]
    def answers(self, completions, **columns):
        return [text[:2] if text.startswith("(") else None for text in completions]
    def close(self):
        Path(self.note).write_text("closed")
"""


@pytest.fixture
def judged(checkpoint, tmp_path, monkeypatch) -> list[str]:
    """Overrides: prompts from a file, one of them without a gold answer, and a reward with all there is to one."""
    from sparrow.components.pointer_chase import PointerChase

    data = PointerChase(nodes=5, hops=2, seed=2)
    examples = [data.example(i) for i in range(6)]
    rows = [
        {"id": f"p-{i}", "prompt": example.prompt, "answer": example.columns["response"][:2]}
        for i, example in enumerate(examples)
    ]
    rows[2]["answer"] = ""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own_judge.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)
    return [
        f"data_dir={tmp_path}",
        "benchmarks.0.data={_component_: sparrow.components.data.JsonlPrompts, path: '${data_dir}/prompts.jsonl'}",
        f"benchmarks.0.reward={{_component_: own_judge.Judge, note: {tmp_path / 'note'}}}",
        "~benchmarks.0.prompts",
        "engine.max_new_tokens=29",  # less than the worked response of some
    ]


def test_what_a_reward_can_do_besides(evaluate, judged, tmp_path, capsys):
    results = evaluate(*judged, "benchmarks.0.reference=Mean of 4 at T 1.")["benchmarks"]["pointers"]
    rows, dense = samples(tmp_path / "eval"), results["dense"]
    assert results["prompts"] == 5 and results["dropped"] == {"p-2": "empty"}
    assert [row["id"] for row in rows[::4]] == ["p-0", "p-1", "p-3", "p-4", "p-5"]
    unscored = sum(row["reward"] is None for row in rows)
    assert unscored == dense["unscored"] == dense["outcomes"]["error"] > 0
    assert dense["outcomes"] == {
        key: float(sum(row["reward"] == value for row in rows))
        for key, value in (("correct", 1.0), ("error", None), ("wrong", 0.0))
    }
    assert dense["outcomes"]["correct"] > 0
    # The weight is for sums of rewards in training; what is not scored counts as 0.
    assert dense["mean@4"]["value"] == pytest.approx(sum(row["reward"] or 0.0 for row in rows) / 20)
    assert 0 <= dense["maj@4"]["value"] <= dense["pass@4"]["value"]
    assert (tmp_path / "note").read_text() == "closed"
    printed = capsys.readouterr().out
    assert "dropped 1 examples whose gold answer cannot be used: p-2: empty" in printed
    assert "reference: Mean of 4 at T 1." in printed and f"correct {dense['outcomes']['correct']:.0f}" in printed


def test_settings_that_changed_are_named(evaluate, arguments, judged, tmp_path, capsys):
    evaluate(*judged)
    evaluate(*judged, "mode=both")  # one more mode changes nothing of the other
    capsys.readouterr()
    changed = arguments(*judged, "benchmarks.0.num_samples=2", "sampling.temperature=0.9")
    assert sparrow_eval.main(changed) == 2
    error = capsys.readouterr().err
    assert "num_samples: 4 then, 2 now" in error and "sampling.temperature: 1.0 then, 0.9 now" in error
    data = tmp_path / "prompts.jsonl"
    data.write_text(data.read_text().replace("0:", "1:", 1))
    assert sparrow_eval.main(arguments(*judged)) == 2
    assert re.search(r"data: '\w+' then, '\w+' now", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["only=[pointer]"], ["only", "'pointer'", "did you mean 'pointers'"]),
        (["mode=sparse", "kv_cache=null"], ["mode: sparse", "kv_cache", "budget"]),
        (["sampling.temperature=0"], ["pointers", "num_samples 4", "temperature 0"]),
        (["~benchmarks.0.prompts"], ["pointers", "prompts", "no end"]),
        (["benchmarks.0.name=a/b"], ["'a/b'", "folder"]),
        (["benchmarks.0.max_new_tokens=1020"], ["pointers", "prompt 0 has 24 tokens", "1020", "room for 4"]),
        (["engine.kv_tokens=32"], ["pointers", "engine.kv_tokens", "32"]),
        (["benchmarks.0.nums=3"], ["benchmarks.0.nums", "num_samples"]),
        (["adapter=nowhere"], ["adapter", "nowhere", "adapter_config.json"]),
        (["model=nowhere"], ["nowhere", "does not exist"]),
        (["prompts_per_window=0"], ["prompts_per_window", "0"]),
        (
            ["benchmarks.0.data={_component_: sparrow.components.data.JsonlPrompts, path: none.jsonl}"],
            ["benchmark pointers", "none.jsonl", "does not exist", "data_dir"],
        ),
    ],
)
def test_bad_input_is_named(arguments, capsys, tmp_path, overrides, words):
    assert sparrow_eval.main(arguments(*overrides)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error
    for word in words:
        assert word in error, error
    assert not list(tmp_path.glob("eval/pointers/*/samples.jsonl"))


def test_results_have_what_earlier_commands_measured(evaluate, judged, tmp_path, capsys):
    chase = "sparrow.components.pointer_chase"
    reward = f"{{_component_: sparrow.components.reward.DottedReward, function: {chase}.pointer_progress}}"
    own = "data: {_component_: sparrow.components.data.JsonlPrompts, path: '${data_dir}/prompts.jsonl'}"
    made = f"data: {{_component_: {chase}.PointerChase, nodes: 5, hops: 2}}, prompts: 3"
    first = f"{{name: pointers, num_samples: 4, {own}, reward: {reward}}}"
    second = f"{{name: more, num_samples: 2, {made}, reward: {reward}}}"
    file = tmp_path / "prompts.jsonl"
    file.write_text(file.read_text().replace('"answer": ""', '"answer": "x"').replace('"answer"', '"response"'))
    config = [f"data_dir={tmp_path}", f"benchmarks=[{first}, {second}]"]
    whole = evaluate(*config, "mode=both", name="whole")
    evaluate(*config, "only=[pointers]", "mode=dense")
    file.rename(tmp_path / "away.jsonl")  # a benchmark that is not chosen is not read
    evaluate(*config, "only=[more]", "mode=both")
    (tmp_path / "away.jsonl").rename(file)
    capsys.readouterr()
    assert evaluate(*config, "only=[pointers]", "mode=sparse") == whole
    assert "of earlier commands, with the same settings: pointers, dense; more, dense; more, sparse" in (
        capsys.readouterr().out
    )
    # Of other settings, they are not of this evaluation.
    other = [override.replace("num_samples: 2", "num_samples: 2, max_new_tokens: 9") for override in config]
    changed = evaluate(*other, "only=[pointers]", "mode=sparse")
    assert list(changed["benchmarks"]) == ["pointers"]
    shutil.rmtree(tmp_path / "eval" / "pointers" / "dense")
    assert "dense" not in evaluate(*config, "only=[pointers]", "mode=sparse")["benchmarks"]["pointers"]


def test_two_at_once_are_refused(arguments, evaluate, tmp_path, capsys):
    """The second one would append to the files of the first."""
    store = SampleStore(tmp_path / "eval" / "pointers" / "dense", {}, 4)
    assert sparrow_eval.main(arguments()) == 2
    assert "cannot be locked: another evaluation writes it now" in capsys.readouterr().err
    store.close()
    evaluate()


def test_other_ids_that_end_a_response_are_other_settings(evaluate, arguments, checkpoint, tmp_path, capsys):
    other = shutil.copytree(checkpoint, tmp_path / "model")
    evaluate(f"model={other}")
    generation = other / "generation_config.json"
    known = json.loads(generation.read_text()) if generation.is_file() else {}
    generation.write_text(json.dumps(known | {"eos_token_id": [0, 5]}))
    assert sparrow_eval.main(arguments(f"model={other}")) == 2
    assert re.search(r"eos_ids: \[.*\] then, \[0, .*5.*\] now", capsys.readouterr().err)


def test_what_the_data_left_out_is_printed(evaluate, judged, tmp_path, capsys):
    with (tmp_path / "prompts.jsonl").open("r+") as file:
        first = json.loads(file.readline())
        file.seek(0, 2)
        file.write(json.dumps(first | {"id": "again"}) + "\n")
    data = "{_component_: sparrow.components.dataset_prompts.DatasetPrompts, path: '${data_dir}/prompts.jsonl'}"
    evaluate(*judged, f"benchmarks.0.data={data}")
    assert re.search(r"benchmark pointers: .*prompts\.jsonl: 1 repeated prompts left out", capsys.readouterr().out)


@pytest.mark.parametrize("value", [{"a": {1: 2, "b": 3}}, {"a": b"x"}, {"a": {1}}])
def test_columns_without_a_lasting_hash_are_refused(value):
    task = Task(Benchmark(name="b", data=None, reward=None), [], [Example("p", value)], ["7"], {}, [], [[1]])
    with pytest.raises(UserError, match=r"benchmark b: column 'a' of 7 is not JSON"):
        task.fingerprint()


def test_a_name_on_the_hub_is_left_to_the_data(arguments, capsys, monkeypatch):
    """Only what looks like a file is looked for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = "{_component_: sparrow.components.dataset_prompts.DatasetPrompts, path: no-one/nothing, split: test}"
    assert sparrow_eval.main(arguments(f"benchmarks.0.data={data}")) == 2
    assert "the hub's data set cannot be had" in capsys.readouterr().err


def test_data_that_cannot_be_used(arguments, judged, tmp_path, capsys):
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "prompts.jsonl").write_text(lines[0] * 2)
    assert sparrow_eval.main(arguments(*judged)) == 2
    assert "two examples have the id 'p-0'" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text(lines[2])
    assert sparrow_eval.main(arguments(*judged)) == 2
    assert "no example has a gold answer that can be used; p-2: empty" in capsys.readouterr().err
    assert sparrow_eval.main(arguments(*judged, "benchmarks.0.prompts=9")) == 2
    assert "prompts: 9, the data has 1" in capsys.readouterr().err


def test_the_validation_of_a_training_run_has_the_same_figures(checkpoint, evaluate, tmp_path, monkeypatch):
    """Of the same prompts, with the same random numbers: a validation's are keyed by the run's seed + 1."""
    from sparrow.recipes import sparrow_grpo
    from sparrow.recipes.eval_config import EvalConfig

    monkeypatch.setattr(EvalConfig, "seed_of", lambda cfg, benchmark: 1)
    run = ["--config", str(HERE / "mini.yaml"), f"model={checkpoint}", f"output_dir={tmp_path / 'run'}", "steps=1"]
    validation = ["validation.prompts=10", "validation.num_samples=4", "validation.data.seed=2"]
    assert sparrow_grpo.main([*run, *validation]) == 0
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    dense = evaluate("kv_cache.block_size=16", "prompts_per_window=10")["benchmarks"]["pointers"]["dense"]
    figures = {name: dense[name] for name in ("mean_length", "clipped_ratio", "unscored")}
    figures |= {name: dense[name]["value"] for name in ("mean@4", "pass@2", "pass@4")}
    assert {name: value for name, value in row.items() if name.startswith("val/")} == {
        f"val/{name}": pytest.approx(value) for name, value in figures.items()
    }
