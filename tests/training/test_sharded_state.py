"""Optimizer state of which a save has only a part: no step had given the other parameters a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparrow.instantiate import Component
from sparrow.training.sharded_state import load_shards, load_whole, save_shards

OPTIMIZERS = {
    "adamw": Component("torch.optim.AdamW", {"lr": 0.01}),
    "fused": Component("torch.optim.AdamW", {"lr": 0.01, "fused": True}),
    "8-bit": Component("torchao.optim.AdamW8bit", {"lr": 0.01}),
    "muon": Component("sparrow.components.optimizer.MuonWithAdamW", {"muon_lr": 0.01, "adamw_lr": 0.01}),
    "momentum": Component("torch.optim.SGD", {"lr": 0.1, "momentum": 0.9}),
}


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step for each shape; on the CPU that takes longer than the test."""
    with torch.compiler.set_stance("force_eager"):
        yield


def build(name: str, sharded: bool = False) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model, OPTIMIZERS[name].build(model.named_parameters())


def train(model: nn.Sequential, optimizer: Any, steps: range, used: int = 4) -> None:
    """Of the four parameters, the first `used` get a gradient."""
    for step in steps:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        for parameter in list(model.parameters())[used:]:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()


def whole(parameter: nn.Parameter) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(ours), whole(theirs))


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_state_begin_afresh(name: str, used: int, tmp_path: Path) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(2), used)
    save_shards(tmp_path / "shards", model, optimizer)
    resumed, fresh = build(name)
    load_shards(tmp_path / "shards", resumed, fresh, list(resumed.parameters()))
    assert_equal(resumed, model)
    train(model, optimizer, range(2, 4))
    train(resumed, fresh, range(2, 4))
    assert_equal(resumed, model)


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("name", ["adamw", "fused", "muon", "momentum"])  # 8-bit state saved whole is not shared out
def test_the_state_of_a_whole_model_likewise(name: str, used: int, process_group: None) -> None:
    model, optimizer = build(name)
    train(model, optimizer, range(2), used)
    sharded, fresh = build(name, sharded=True)
    with torch.no_grad():
        for parameter, source in zip(sharded.parameters(), model.parameters(), strict=True):
            parameter.to_local().copy_(source)
    load_whole(deepcopy(optimizer.state_dict()), fresh, list(sharded.parameters()))
    train(model, optimizer, range(2, 4))
    train(sharded, fresh, range(2, 4))
    for ours, expected in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(ours), expected.detach(), atol=1e-6, rtol=0)
