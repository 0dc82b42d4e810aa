"""The training benchmark's command line, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_training
import pytest
import torch


def test_logprob_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "logprob.json"
    command = f"logprob --model tiny --tokens 96 --chunk 40 --out {out}"
    assert bench_training.main(command.split()) == 0
    printed = capsys.readouterr()
    assert "96 tokens x 64 x 512" in printed.out and not printed.err
    content = json.loads(out.read_text())
    result = content["result"]
    assert result["forward_over_matmul"] == result["forward_s"] / result["matmul_s"] > 0
    assert result["forward_extra_bytes"] is None, "memory is CUDA's"
    assert content["torch"] == torch.__version__


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_training.main(f"logprob --model tiny --tokens 8 --out {tmp_path}".split()) == 2
    assert "is a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_training.main(["logprob", "--model", "tiny", "--tokens", "0"])
    assert "must be at least 1" in capsys.readouterr().err
