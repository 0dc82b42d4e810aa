"""Optimizers that save memory, built as a config builds them: a step, and a resume that is bit-equal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparrow.components.offloaded_adamw import OffloadedAdamW
from sparrow.instantiate import Component
from sparrow.training.learning_rate import LearningRate
from sparrow.training.sharded_state import load_shards, save_shards

FUSED = Component("torch.optim.AdamW", {"lr": 0.01, "weight_decay": 0.1, "fused": True})
EIGHT_BIT = Component("torchao.optim.AdamW8bit", {"lr": 0.01, "weight_decay": 0.1})
OFFLOADED = Component("sparrow.components.offloaded_adamw.OffloadedAdamW", {"lr": 0.01, "weight_decay": 0.1})
ALL = {"fused": FUSED, "8-bit": EIGHT_BIT, "offloaded": OFFLOADED}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step for each shape; on the CPU that takes longer than the test."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(part: Component, device: str) -> tuple[nn.Module, Any, LearningRate]:
    torch.manual_seed(0)
    # Matrices of 8,192 entries: torchao leaves what is smaller than 4,096 in fp32.
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).to(device)
    optimizer = part.build(model.named_parameters())
    return model, optimizer, LearningRate(optimizer, warmup_steps=2, final=0.5)


def train(model: nn.Module, optimizer: Any, rate: LearningRate, steps: range) -> float:
    device = next(model.parameters()).device
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        rate.set(step, step, 6)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ALL)
def test_six_steps_are_three_and_three(name: str, device: str) -> None:
    model, optimizer, rate = build(ALL[name], device)
    train(model, optimizer, rate, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, rate, range(3, 6))

    file.seek(0)
    state = torch.load(file, weights_only=True, map_location="cpu")
    resumed, *_ = build(ALL[name], device)
    resumed.load_state_dict(state["model"])
    optimizer = ALL[name].build(resumed.named_parameters())
    rate = LearningRate(optimizer, warmup_steps=2, final=0.5)
    optimizer.load_state_dict(state["optimizer"])
    train(resumed, optimizer, rate, range(3, 6))
    for ours, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "tolerance"), [("offloaded", 1e-6), ("8-bit", 2e-3)])
def test_the_same_weights_as_adamw(name: str, tolerance: float, device: str) -> None:
    expected, *rest = build(FUSED, device)
    train(expected, *rest, range(6))
    start = build(FUSED, device)[0]
    model, *rest = build(ALL[name], device)
    train(model, *rest, range(6))
    for ours, theirs, before in zip(model.parameters(), expected.parameters(), start.parameters(), strict=True):
        assert (theirs - before).abs().max() > 0.02
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_shards_are_trained_alike(name: str, process_group: None) -> None:
    whole, *rest = build(ALL[name], "cpu")
    train(whole, *rest, range(4))
    sharded = build(FUSED, "cpu")[0]
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    optimizer = ALL[name].build(sharded.named_parameters())
    train(sharded, optimizer, LearningRate(optimizer, warmup_steps=2, final=0.5), range(4))
    for ours, expected in zip(sharded.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.to_local(), expected.data, atol=1e-6, rtol=0)


def test_eight_bits_are_a_quarter_of_the_state() -> None:
    model, optimizer, rate = build(EIGHT_BIT, "cpu")
    train(model, optimizer, rate, range(1))
    state = optimizer.state[model[0].weight]
    assert state["exp_avg"].codes.dtype == state["exp_avg_sq"].codes.dtype == torch.uint8


def test_a_parameter_without_gradient_stays() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(3)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = OffloadedAdamW([("used", used), ("unused", unused), ("frozen", frozen)], lr=0.1)
    used.sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == ["used", "unused"]
    assert (used < 1).all() and torch.equal(unused, torch.ones(3))


def test_a_resume_steps_from_the_weights_that_were_loaded_last() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = OffloadedAdamW([("weight", weight)], lr=0.0)
    weight.sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    resumed = OffloadedAdamW([("weight", weight)], lr=0.0)
    with torch.no_grad():
        weight.fill_(1.0009)  # fp32 masters, over an export that bf16 had rounded to 1
    resumed.load_state_dict(state)
    weight.sum().backward()
    resumed.step()
    assert torch.equal(weight, torch.full((3,), 1.0009))


@pytest.mark.parametrize("name", ALL)
def test_shards_hold_every_optimizers_state(name: str, tmp_path: Path) -> None:
    model, optimizer, rate = build(ALL[name], "cpu")
    train(model, optimizer, rate, range(3))
    save_shards(tmp_path / "shards", model, optimizer)
    train(model, optimizer, rate, range(3, 6))
    resumed, fresh, rate = build(ALL[name], "cpu")
    load_shards(tmp_path / "shards", resumed, fresh, list(resumed.parameters()))
    train(resumed, fresh, rate, range(3, 6))
    for ours, expected in zip(resumed.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, expected)
