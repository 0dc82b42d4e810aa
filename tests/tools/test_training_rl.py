"""An RL step from makespans and sampled micro-batches: packing, extrapolation, sums, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import bench_rollout
import bench_training
import pytest
import torch
from rollout_shapes import TINY
from tool_results import write_json
from training_parts import PartSeconds
from training_rl import TrainingHalf, extrapolate, figures, random_batch, rl_steps, spread

from sparrow.recipes.grpo_minibatches import packed
from sparrow.training.packing import MicroBatch

CPU = torch.device("cpu")
HALF = TrainingHalf(PartSeconds(8.0, 2.0, 0.5, 0.25, 1.5, 24.0), 1.0, {"exact": 0.5, "top_k": 0.25})


def micro_batches(prompts: list[int], responses: list[int], max_tokens: int) -> list[MicroBatch]:
    batch = random_batch(prompts, responses, TINY.vocab_size)
    return packed(batch, torch.ones(batch.num_sequences, dtype=torch.bool), max_tokens, CPU)


def test_the_queue_is_packed_as_the_recipe_packs_it() -> None:
    # Two samples of each of two prompts. What goes in is the prompt and all of the response but its last token.
    micros = micro_batches([3, 5], [10, 4, 2, 20], max_tokens=24)
    assert [micro.lengths for micro in micros] == [[24], [12, 6], [6]]
    assert [len(micro.targets_N) for micro in micros] == [20, 10 + 4, 2]
    assert [micro.prompt_lengths for micro in micros] == [[5], [3, 3], [5]]


@pytest.mark.parametrize(
    ("count", "samples", "expected"),
    [(8, 4, [1, 3, 5, 7]), (80, 4, [10, 30, 50, 70]), (3, 1, [1]), (3, 4, [0, 1, 2]), (1, 4, [0])],
)
def test_samples_stand_in_the_middle_of_equal_parts(count: int, samples: int, expected: list[int]) -> None:
    assert spread(count, samples) == expected


def test_parts_are_extrapolated_by_their_own_flops() -> None:
    # Inputs of 4 and 12 tokens, of which 3 and 10 are scored.
    micros = micro_batches([2, 3], [3, 10], max_tokens=12)
    assert [(micro.lengths, len(micro.targets_N)) for micro in micros] == [([12], 10), ([4], 3)]
    # A layer of TINY: queries and output 64 x 64, keys and values 64 x 32, three of 64 x 128. Its head is 512 x 64.
    layers, head = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), 512 * 64
    forward = [2 * layers * n + 4 * 4 * 4 * 16 * n * (n + 1) / 2 for n in (12, 4)]
    update = [flop + 2 * head * scored for flop, scored in zip(forward, (10, 3), strict=True)]
    run = PartSeconds(forward=6.0, logprob=3.0, top_k=0.3, rates=0.6, exact=0.9, update=9.0)
    whole = extrapolate(TINY, micros, [1], [run])
    assert whole.forward == pytest.approx(6.0 * (1 + forward[0] / forward[1]))
    assert whole.update == pytest.approx(9.0 * (1 + update[0] / update[1]))
    assert [whole.logprob, whole.top_k, whole.rates, whole.exact] == pytest.approx([13.0, 1.3, 2.6, 3.9])
    # With all of them run, nothing is left to extrapolate.
    other = PartSeconds(*[2.0] * 6)
    every = extrapolate(TINY, micros, [0, 1], [other, run])
    assert [every.forward, every.logprob, every.update] == pytest.approx([8.0, 5.0, 11.0])


def test_the_training_half_adds_up() -> None:
    assert HALF.parts.score == 10.5
    assert HALF.metric("top_k") == 0.5 and HALF.metric("exact") == 2.25
    assert HALF.seconds("top_k") == 10.5 + 0.5 + 24 + 1 and HALF.seconds("exact") == 37.75
    # The set is made for the metric's sake: it counts on that side here.
    assert HALF.metric_adds("top_k") == 1.0 / 35 and HALF.metric_adds("exact") == 2.75 / 35
    result = figures(HALF, flop=21.0, flop_per_s=4.0)
    assert (result["score_mfu"], result["update_mfu"], result["mfu"]) == (0.5, 63 / 96, 84 / 138)


def test_steps_share_all_but_the_rollout() -> None:
    rows = [
        {"cache": "64", "backend": "gather", "makespan_s": 20.0},
        {"cache": "dense", "backend": "gather", "makespan_s": 62.0},
    ]
    top_k, exact = sorted(rl_steps(rows, HALF, sync_s=2.0), key=lambda step: step["estimator"] == "exact")
    assert (top_k["dense_step_s"], top_k["sparse_step_s"]) == (100.0, 58.0)
    assert top_k["over_dense"] == 100 / 58 and top_k["rollout_share_of_dense"] == 0.62
    assert exact["sparse_step_s"] == 59.75 and exact["cache"] == "64"


def test_a_measured_queue_becomes_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollouts, out = tmp_path / "makespan.json", tmp_path / "rl.json"
    queue = "--samples 2 --prompt 20 --lengths uniform --median 10 --shortest 5 --longest 30 --max-rows 4 --requests 6"
    command = f"makespan --model tiny {queue} --cache dense 64 --backend gather --stride 4 --out {rollouts}"
    assert bench_rollout.main(command.split()) == 0
    command = f"rl --model tiny --rollouts {rollouts} --micro-batch-tokens 64 --samples 2 --chunk 16 --sync-s 0.5"
    assert bench_training.main(f"{command} --activation-checkpointing --out {out}".split()) == 0
    printed = capsys.readouterr()
    assert "rollout's share of the dense step" in printed.out and not printed.err
    dense, sparse = json.loads(rollouts.read_text())["results"]
    result = json.loads(out.read_text())["result"]
    assert result["sequences"] == 6 and result["scored_tokens"] == sum(dense["response_lengths"])
    assert result["tokens"] == 2 * sum(dense["prompt_lengths"]) + sum(dense["response_lengths"]) - 6
    assert len(result["sampled"]) == 2 < result["micro_batches"]
    flops = [sample["forward_flop"] for sample in result["sampled"]]
    assert flops == sorted(flops)
    assert [step["estimator"] for step in result["steps"]] == ["exact", "top_k"]
    for step in result["steps"]:
        training = result["score_s"] + result["metric_s"][step["estimator"]] + result["update_s"]
        training += result["optimizer_s"]
        assert step["dense_step_s"] == pytest.approx(dense["makespan_s"] + training + 0.5)
        assert step["sparse_step_s"] == pytest.approx(sparse["makespan_s"] + training + 0.5)


ROW = {"model": "tiny", "backend": "gather", "makespan_s": 1.0, "prompt_lengths": [4], "response_lengths": [4]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROW | {"cache": "dense"}], "no dense and sparse makespans of tiny"),
        ([ROW | {"cache": "dense", "backend": "flex"}, ROW | {"cache": "64"}], "with the same backend"),
        ([ROW | {"cache": "dense"}, ROW | {"cache": "64", "response_lengths": [5]}], "of different queues"),
        ([{"model": "tiny", "cache": "64", "backend": "gather", "ms": 1.0}], "lacks makespan_s, prompt_lengths"),
        ([ROW | {"cache": cache, "model": "4b"} for cache in ("dense", "64")], "makespans of tiny"),
        ([{"cache": "dense"}], "not a JSON file of bench_rollout.py: KeyError('model')"),
    ],
)
def test_other_files_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], rows, words) -> None:
    path = tmp_path / "rows.json"
    write_json(path, {"results": rows})
    assert bench_training.main(["rl", "--model", "tiny", "--rollouts", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --rollouts {path}: ") and words in error and error.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_training.main(["rl", "--model", "tiny", "--rollouts", str(tmp_path / "none.json")]) == 2
    assert "none.json: not a JSON file" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_a_sync_takes_some_time_or_none(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    with pytest.raises(SystemExit):
        bench_training.main(["rl", "--model", "tiny", "--rollouts", "none.json", f"--sync-s={seconds}"])
    assert f"--sync-s: {seconds} must be at least 0" in capsys.readouterr().err
