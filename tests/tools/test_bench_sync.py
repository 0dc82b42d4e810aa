"""The benchmark of the weight sync, on the CPU, where nothing is copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_sync
import pytest
import torch
from random_trainer import random_trainer
from rollout_shapes import model_config

from sparrow.components.kv_cache import DenseKVCache
from sparrow.engine.engine import Engine, EngineConfig

from .conftest import Torchrun

TINY = ["--model", "tiny", "--repeats", "2", "--max-rows", "2", "--kv-tokens", "1024"]


def test_what_is_printed_is_written(tmp_path: Path) -> None:
    out = tmp_path / "new" / "sync.json"
    # A process of its own, that sees no GPU where there is one.
    command = [sys.executable, bench_sync.__file__, *TINY, "--out", str(out)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "SharedWeights" in printed and "nothing copied" in printed
    content = json.loads(out.read_text())
    (result,) = content["results"]
    assert content["target_s"] == 0.5 and result["processes"] == 1 and content["torch"] == torch.__version__
    assert result["model"] == "tiny" and result["repeats"] == 2 and result["gb"] == 0
    assert 0 < result["sync_s"] + result["wake_s"] <= result["worst_s"] * 1.001, "of two, the median is the mean"
    assert list(out.parent.iterdir()) == [out]


def test_each_repeat_is_a_new_version_of_changed_weights() -> None:
    device = torch.device("cpu")
    model = random_trainer(model_config("tiny"), device, torch.float32)
    limits = EngineConfig(max_rows=2, kv_tokens=1024, max_new_tokens=4)
    engine = Engine(model, DenseKVCache(), [], limits)
    before = model.model.norm.weight.clone()
    for version in (1, 2):
        sync_s, wake_s, ready_s = bench_sync._repeat(engine, model, device)
        assert engine.version == version and engine.decoder is not None, "awake again, for the next repeat"
        assert sync_s + wake_s > 0 and sync_s < ready_s
    assert torch.equal(model.model.norm.weight, before * bench_sync.CHANGE**2)


def test_two_processes_fill_their_copies_from_shares(tmp_path: Path, torchrun: Torchrun) -> None:
    printed = torchrun(bench_sync, *TINY, "--out", tmp_path / "sync.json")
    assert printed.count("CopiedWeights, float32 to float32, 2 processes") == 1, "the first speaks for both"
    content = json.loads((tmp_path / "sync.json").read_text())
    (result,) = content["results"]
    assert content["target_s"] == 1.0 and result["processes"] == 2
    assert result["gb"] == pytest.approx(result["parameters"] * (4 / 2 + 4) / 1e9)


@torch.no_grad()
def test_random_weights_have_the_scale_of_trained_ones() -> None:
    model = random_trainer(model_config("tiny"), torch.device("cpu"), torch.float32)
    assert float(model.model.embed_tokens.weight.std()) == pytest.approx(model.config.hidden_size**-0.5, rel=0.05)
    assert float(model.model.layers[0].mlp.down_proj.weight.std()) == pytest.approx(128**-0.5, rel=0.05)
    assert float(model.model.norm.weight.min()) == float(model.model.norm.weight.max()) == 1
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--out", "."], "--out .: is a folder"),
        (["--kv-tokens", "64"], "engine.kv_tokens"),
        (["--max-rows", "0"], "max_rows"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys) -> None:
    assert bench_sync.main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


SMALL = ["--model", "0.6b", "--repeats", "2", "--max-rows", "4", "--kv-tokens", "4096"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_is_measured_on_a_gpu(tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "sync.json"
    assert bench_sync.main([*SMALL, "--dtype", dtype, "--out", str(out)]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["weights"] == "PackedWeights" and result["rollout_in"] == "bfloat16"
    assert result["gb"] == pytest.approx(result["parameters"] * 6 / 1e9)
    assert 0 < result["probe_difference"] < 0.25
    assert result["peak_gib"] > result["parameters"] * 6 / 2**30
