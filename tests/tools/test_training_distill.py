"""What distilling adds to an RL step: the arithmetic by hand, and the command line on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_training
import pytest
from training_distill import Part, memory, shares, show_distill

COMMAND = "distill --model tiny --tokens 150 --prompt 30 --micro-batch-tokens 320 --chunk 64"


def parts(score: int | None = None, distill: int | None = None, update: int | None = None) -> dict[str, Part]:
    return {"score": Part(1.0, score), "distill": Part(4.0, distill), "update": Part(3.0, update)}


def test_a_share_is_held_against_the_step_without_it() -> None:
    result = shares(parts(), rollout_s=4.0, share=0.25)
    assert (result["step_s"], result["overhead"]) == (8.0, 0.125)
    assert result["largest_share"] == pytest.approx(0.3)
    at_most = shares(parts(), rollout_s=4.0, share=result["largest_share"])
    assert at_most["overhead"] == pytest.approx(0.15)


def test_all_sequences_are_the_largest_share() -> None:
    assert shares(parts(), rollout_s=200.0, share=1.0)["largest_share"] == 1.0


def test_no_overhead_without_the_rollouts_seconds() -> None:
    assert shares(parts(), rollout_s=None, share=0.25) == {}


@pytest.mark.parametrize(("distill", "added"), [(90, 5), (100, 5), (130, 35)])
def test_memory_that_the_update_needs_anyway_does_not_count(distill: int, added: int) -> None:
    # The update peaks at 100, with an adapter of 5 that it would not have.
    result = memory(parts(score=20, distill=distill, update=100), adapter=5)
    assert (result["added_bytes"], result["distill_peak_bytes"], result["adapter_bytes"]) == (added, distill, 5)


def test_peaks_are_printed_where_there_are_some() -> None:
    gib = 2**30
    given = {
        "model": "tiny", "sequences": 2, "tokens": 9, "prompt": 3, "schedule": "64", "loss": "k3", "rank": 8,
        "teacher": "current", "score_s": 1.0, "update_s": 3.0, "distill_s": 4.0, "distill_over_update": 4 / 3,
    }  # fmt: skip
    text = show_distill(given | memory(parts(score=2 * gib, distill=7 * gib, update=6 * gib), adapter=gib))
    assert "adapter's step    4.000 s a sequence, peak 7.00 GiB" in text
    assert "distilling adds 2.00 GiB to the training half's peak, 1.00 GiB of it the adapter" in text
    assert "RL step" not in text


def measured(tmp_path: Path, extra: str) -> dict[str, object]:
    out = tmp_path / "distill.json"
    assert bench_training.main(f"{COMMAND} --out {out} {extra}".split()) == 0
    return json.loads(out.read_text())["result"]


@pytest.mark.parametrize("extra", ["", "--loss top_k", "--loss full --teacher current --activation-checkpointing"])
def test_the_adapters_step_is_measured_whole(tmp_path: Path, extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--schedule 64 --rank 8 --share 0.5 --rollout-s-per-sequence 2.5"
    result = measured(tmp_path, f"{given} {extra}")
    printed = capsys.readouterr()
    assert "2 x 150 tokens, 30 of them prompt" in printed.out and "a share of 0.5 adds" in printed.out
    assert not printed.err
    assert result["distill/tokens"] == 2 * (150 - 30) and result["distill/grad_norm"] > 0
    # TINY, inputs and outputs of a layer's matrices: q and o 64, 64; k and v 64, 32; gate, up and down 64, 128.
    numbers = 4 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    # Three of fp32 each, weight and AdamW's two, and a count of steps of each of 7 pairs in 4 layers.
    assert result["adapter_bytes"] == 4 * (3 * numbers + 2 * 7 * 4)
    step = 2.5 + result["score_s"] + result["update_s"]
    assert result["overhead"] == pytest.approx(0.5 * result["distill_s"] / step)
    assert result["distill_over_update"] == result["distill_s"] / result["update_s"]
    assert "added_bytes" not in result, "memory is CUDA's"


@pytest.mark.parametrize("loss", ["k3", "top_k"])
def test_the_adapter_sees_the_schedules_pages_and_the_dense_pass_is_its_teacher(tmp_path: Path, loss: str) -> None:
    # With every page there is nothing between the two policies, but for the few steps the adapter took.
    few, every = (measured(tmp_path, f"--loss {loss} --schedule {tokens}")["distill/kl"] for tokens in (64, 4096))
    assert few > 1e-3 > 1e-5 > abs(every)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("--prompt 150", "--prompt 150: must be below --tokens 150"),
        ("--share 0", "--share 0.0: must be above 0 and at most 1"),
        ("--share 1.5", "--share 1.5: must be above 0 and at most 1"),
        ("--rollout-s-per-sequence 0", "--rollout-s-per-sequence 0.0: must be above 0"),
        ("--loss full", "distiller.teacher: before_step has no whole distributions"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], extra: str, words: str) -> None:
    assert bench_training.main(f"{COMMAND} --schedule 64 {extra}".split()) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
