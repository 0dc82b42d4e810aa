"""The planner's command line, and that the tables of the documents are what it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import plan_memory
import pytest
import torch
from rollout_shapes import QWEN3, model_config

from sparrow.models.decoder_config import to_huggingface

DOCS = Path(__file__).parents[2] / "docs" / "training.md"
README = Path(__file__).parents[2] / "README.md"
COMMAND = re.compile(r"```\n(python tools/plan_memory\.py (?:.|\n)+?)```\n\n(?:```\n((?:.|\n)+?)```|((?:\|.*\n)+))")


def planned(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = plan_memory.main(shlex.split(command))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_folder_needs_only_its_config(tmp_path: Path, capsys) -> None:
    config = to_huggingface(model_config("14b"), torch.bfloat16, {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = planned(capsys, f"--config qwen3_14b --gpus 8 --memory 1410GB model={tmp_path}")
    assert folder == planned(capsys, "--config qwen3_14b --gpus 8 --memory 1410GB")
    assert folder[0] == 0 and "on each of 8 GPUs" in folder[1] and not folder[2]


@pytest.mark.parametrize("size", QWEN3)
def test_a_published_model_by_name(size: str, capsys) -> None:
    code, out, _ = planned(capsys, f"--config qwen3_4b --memory 9000GB model=somewhere/Qwen3-{size.upper()}")
    assert code == 0
    weights = next(line.split()[-1] for line in out.splitlines() if line.startswith("weights, fp32"))
    assert float(weights) == pytest.approx({"0.6b": 2.22, "1.7b": 6.41, "4b": 14.98, "8b": 30.51, "14b": 55.02}[size])


def test_what_cannot_fit_is_shown_and_refused(capsys) -> None:
    code, out, err = planned(capsys, "--config qwen3_14b --gpus 4 --memory 141GB offload_activations=false")
    assert code == 2 and "left" in out
    assert re.fullmatch(
        r"error: memory: the update phase needs .* activations kept: offload_activations: true .*\n", err
    )


def test_overrides_and_units(capsys) -> None:
    small = planned(capsys, "--config qwen3_0.6b --memory 80GiB engine.kv_tokens=131072 engine.max_new_tokens=1000 "
                            "micro_batch_tokens=4000")  # fmt: skip
    assert small[0] == 0 and "GiB, 80.0 on each of 1 GPU," in small[1] and "4000 tokens in a forward" in small[1]
    first = planned(capsys, "--config qwen3_0.6b engine.kv_tokens=131072 --memory 85.9GB engine.max_new_tokens=1000 "
                            "micro_batch_tokens=4000")  # fmt: skip
    assert first == small


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("--config qwen3_4b --memory 141", "--memory 141: is no size such as 141GB"),
        ("--config qwen3_4b --memory 0GB", "--memory 0GB: is no size"),
        ("--config qwen3_4b --gpus 0 --memory 141GB", "--gpus [0]"),
        ("--config qwen3_4b qwen3_8b --gpus 1 2 3 --memory 141GB", "--gpus [1, 2, 3]"),
        ("--config qwen3_4bb --memory 141GB", "did you mean 'qwen3_4b'"),
        ("--config tiny_sft --memory 141GB", "is for sparrow_sft"),
        ("--config tiny --memory 141GB", "model: outputs/tiny_sft/model is neither a folder with a config.json nor"),
        ("--config qwen3_4b --memory 141GB model=Qwen3-32B", "nor one of Qwen3-0.6B"),
        ("--config qwen3_4b --memory 141GB enginee.max_rows=3", "did you mean 'engine'"),
        ("--config qwen3_4b --gpus 3 --memory 141GB replicate=2", "replicate: 2 does not divide the 3 processes"),
    ],
)
def test_bad_input_is_one_line(command: str, words: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = planned(capsys, command)
    assert code == 2 and not out
    assert words in err and err.count("\n") == 1


def test_without_a_gpu_the_memory_must_be_given() -> None:
    # A process of its own, that sees no GPU where there is one.
    command = [sys.executable, plan_memory.__file__, "--config", "qwen3_4b"]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 2 and "give the size of one" in done.stderr


@pytest.mark.parametrize("file", [DOCS, README], ids=["docs/training.md", "README.md"])
def test_documented_tables_are_what_the_command_prints(file: Path, capsys) -> None:
    cases = COMMAND.findall(file.read_text())
    assert cases
    for command, block, table in cases:
        words = command.replace("\\\n", " ").removeprefix("python tools/plan_memory.py ")
        _, out, _ = planned(capsys, words)
        shown = (block or table).rstrip("\n")
        assert out.rstrip("\n") == shown, command
