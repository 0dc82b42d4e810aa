"""The training benchmark's command line, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import bench_training
import pytest
import torch

from .conftest import Torchrun


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


@pytest.mark.parametrize("extra", ["", "--activation-checkpointing", "--offload-activations --optimizer offloaded"])
def test_step_counts_its_flops(tmp_path: Path, extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.json"
    command = f"step --model tiny --tokens 100 --documents 3 --chunk 32 --out {out} {extra}"
    assert bench_training.main(command.split()) == 0
    assert "100 tokens in 3 documents" in capsys.readouterr().out
    result = json.loads(out.read_text())["result"]
    assert result["lengths"] == [49, 25, 26]
    # TINY: 4 layers of 64, 4 heads of 16, 2 KV heads, MLP 128, vocabulary 512.
    weights = 4 * 64 * (8 * 16 + 4 * 16 + 3 * 128) + 512 * 64
    pairs = sum(n * (n + 1) / 2 for n in result["lengths"])
    assert result["flop"] == 6 * weights * 100 + 12 * 4 * 4 * 16 * pairs
    assert result["mfu"] == pytest.approx(result["flop"] / result["step_s"] / result["flop_per_s"])


def test_two_processes_step_on_one_model(tmp_path: Path, torchrun: Torchrun) -> None:
    command = "step --model tiny --tokens 100 --chunk 32 --out"
    printed = torchrun(bench_training, *command.split(), tmp_path / "step.json")
    assert printed.count("tiny: 2 processes, each 100 tokens") == 1
    result = json.loads((tmp_path / "step.json").read_text())["result"]
    assert result["tokens_per_s"] == 2 * 100 / result["step_s"]


def test_attention_is_measured_beside_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "attention.json"
    command = f"attention --model tiny --tokens 200 --prompt 40 --schedule 64 --out {out}"
    assert bench_training.main(command.split()) == 0
    assert "200 tokens, 40 of them prompt" in capsys.readouterr().out
    result = json.loads(out.read_text())["result"]
    for name in ("dense", "sparse"):
        assert result[name]["both_s"] > 0 and result[name]["forward_s"] > 0
    assert "select_s" not in result, "a mask selects while it attends"


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_training.main(f"logprob --model tiny --tokens 8 --out {tmp_path}".split()) == 2
    assert "is a folder" in capsys.readouterr().err
    assert bench_training.main(["step", "--model", "tiny", "--tokens", "2", "--documents", "3"]) == 2
    assert "--documents 3: more than --tokens 2" in capsys.readouterr().err
    assert bench_training.main(["step", "--model", "tiny", "--tokens", "8", "--attention", "flex"]) == 2
    assert "flex needs a CUDA device" in capsys.readouterr().err
    bad = "attention --model tiny --tokens 8 --schedule 64 --prompt"
    assert bench_training.main([*bad.split(), "9"]) == 2
    assert "--prompt 9: more than --tokens 8" in capsys.readouterr().err
    assert bench_training.main([*bad.split(), "1", "--likeness", "2"]) == 2
    assert "--likeness 2.0: from 0 to 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_training.main(["logprob", "--model", "tiny", "--tokens", "0"])
    assert "must be at least 1" in capsys.readouterr().err
