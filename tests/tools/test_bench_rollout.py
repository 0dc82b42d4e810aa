"""The benchmark's command line, on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import bench_rollout
import plot_rollout
import pytest
import torch
from tool_results import write_json

QUEUE = "--model tiny --samples 2 --prompt 20 --lengths uniform --median 10 --shortest 5 --longest 30 --max-rows 4"


def test_makespan_writes_what_it_prints(tmp_path: Path, capsys):
    out = tmp_path / "new" / "makespan.json"
    command = f"makespan {QUEUE} --requests 6 --cache 64 dense --stride 4 --backend gather --out {out}"
    assert bench_rollout.main(command.split()) == 0
    printed = capsys.readouterr()
    assert "one step in 4 taken" in printed.out and "x dense" in printed.out and not printed.err
    content = json.loads(out.read_text())
    sparse, dense = content["results"]
    assert dense["over_dense"] == 1 and sparse["over_dense"] == dense["makespan_s"] / sparse["makespan_s"]
    assert sparse["lengths"] == dense["lengths"] and sparse["requests"] == 6
    assert content["torch"] == torch.__version__ and list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("out", "words"), [(".", "is a folder"), ("file/deeper.json", "file cannot be made: ")])
def test_an_output_that_cannot_be_written_shows_before_the_work(tmp_path: Path, capsys, out: str, words: str):
    (tmp_path / "file").touch()
    command = f"makespan {QUEUE} --requests 6 --cache dense --backend gather --out {tmp_path / out}"
    assert bench_rollout.main(command.split()) == 2
    printed = capsys.readouterr()
    assert not printed.out and words in printed.err and printed.err.count("\n") == 1


def test_cold_adds_up(capsys):
    assert bench_rollout.main(f"cold {QUEUE} --cache 64 --backend gather".split()) == 0
    assert "first tokens" in capsys.readouterr().out
    assert bench_rollout.main(f"cold {QUEUE} --cache 64 dense --backend gather".split()) == 2
    assert "one model, one cache and one backend" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--cache qwen3-4b-0.68", "--cache qwen3-4b-0.68: .*did you mean 'qwen3-4b-0.86'"),
        ("--cache 8", "--cache 8: .*pages must be a whole number"),
        ("--cache dense --kv-tokens 128", "engine.kv_tokens: the pool has 128 tokens"),
        ("--cache dense --median 40", "--shortest 5, --median 40 and --longest 30"),
    ],
)
def test_bad_input_is_one_line(arguments, words, capsys):
    assert bench_rollout.main(f"makespan {QUEUE} --requests 6 --backend gather {arguments}".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(words, error)


def test_an_unknown_model_is_refused_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_rollout.main(["makespan", "--model", "5b", "--cache", "dense"])
    assert stopped.value.code == 2
    assert "invalid choice: '5b'" in (error := capsys.readouterr().err) and "14b" in error


def test_step_needs_a_gpu():
    # A process of its own, that sees no GPU where there is one.
    arguments = ["step", "--model", "tiny", "--batch", "2", "--cache", "dense"]
    command = [sys.executable, bench_rollout.__file__, *arguments]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "needs a CUDA device" in done.stderr, done.stderr


def test_the_plot_is_drawn_from_step_results(tmp_path: Path, capsys):
    rows = [
        {"model": m, "batch": 20, "cache": c, "backend": "triton", "context": n, "ms": n / 1e3, "roof_ms": n / 2e3}
        for m in ("4b", "8b")
        for c in ("dense", "qwen3-4b-0.86")
        for n in (32768, 8192)
    ]
    steps, other, png = tmp_path / "steps.json", tmp_path / "other.json", tmp_path / "img" / "ms.png"
    write_json(steps, {"results": rows})
    write_json(other, {"results": [{"makespan_s": 1.0}]})
    assert plot_rollout.main([str(steps), "--png", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG") and list(png.parent.iterdir()) == [png]
    assert plot_rollout.main([str(other), "--png", str(png)]) == 2
    assert "other.json: no result of mode `step`" in capsys.readouterr().err
    other.write_text("{")
    for path in (other, tmp_path / "none.json"):
        assert plot_rollout.main([str(path), "--png", str(png)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path}: not a JSON file of bench_rollout.py") and error.count("\n") == 1


@pytest.mark.parametrize(("caches", "code"), [(7, 0), (18, 0), (19, 2)])
def test_a_panel_has_lines_enough_or_says_so(tmp_path: Path, capsys, caches: int, code: int):
    row = {"model": "4b", "batch": 20, "backend": "triton", "context": 8192, "ms": 2.0, "roof_ms": 1.0}
    names = ["dense", *(str(16 * (number + 1)) for number in range(caches))]
    write_json(tmp_path / "steps.json", {"results": [row | {"cache": name} for name in names]})
    assert plot_rollout.main([str(tmp_path / "steps.json"), "--png", str(tmp_path / "ms.png")]) == code
    assert ("4b, batch 20: 19 caches are more than the 18 lines" in capsys.readouterr().err) == (code == 2)
    assert (tmp_path / "ms.png").exists() == (code == 0)
