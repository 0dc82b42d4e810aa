"""Muon with AdamW: who trains what, the two rules by hand, and a resume that is bit-equal."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from sparrow.components.muon import Muon
from sparrow.components.optimizer import MuonWithAdamW
from sparrow.errors import UserError

HIDDEN = {"model.layers.0.q_proj.weight", "model.layers.0.down_proj.weight"}


class TinyModel(nn.Module):
    """The parameter names of a decoder; every parameter has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        projections = {"q_proj": nn.Linear(6, 4), "down_proj": nn.Linear(4, 6, bias=False)}
        layer = nn.ModuleDict({**projections, "norm": nn.LayerNorm(6)})
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(5, 6), "layers": nn.ModuleList([layer])})
        self.layer = [layer]
        self.lm_head = nn.Linear(6, 5, bias=False)

    def loss(self, tokens_T: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layer
        hidden = layer["norm"](self.model["embed_tokens"](tokens_T))
        hidden = hidden + layer["down_proj"](layer["q_proj"](hidden).tanh())
        return nn.functional.cross_entropy(self.lm_head(hidden), tokens_T.roll(1))


def build(model: nn.Module) -> MuonWithAdamW:
    return MuonWithAdamW(model.named_parameters(), muon_lr=0.02, adamw_lr=0.003, weight_decay=0.1)


def train(model: TinyModel, optimizer: MuonWithAdamW, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        model.loss(torch.randint(5, (12,), generator=generator)).backward()
        optimizer.step()


def tiny() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel()


def test_parameters_are_split_by_name_and_shape() -> None:
    model = tiny()
    muon, adamw, gains = build(model).param_groups
    assert set(muon["param_names"]) == HIDDEN
    assert set(adamw["param_names"]) | set(gains["param_names"]) == {n for n, _ in model.named_parameters()} - HIDDEN
    assert set(gains["param_names"]) == {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    assert gains["lr"] == adamw["lr"]
    named = MuonWithAdamW(model.named_parameters(), muon_lr=0.1, adamw_lr=0.2, gain_lr=0.3)
    assert [group["lr"] for group in named.param_groups] == [0.1, 0.2, 0.3]
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (0.02, 0.1, 0.95)
    assert (adamw["lr"], adamw["weight_decay"]) == (0.003, 0.1)


def test_one_step_is_that_of_the_two_optimizers() -> None:
    model = tiny()
    twin = copy.deepcopy(model)
    train(model, build(model), range(1))
    twin.loss(torch.randint(5, (12,), generator=torch.Generator().manual_seed(0))).backward()
    named = dict(twin.named_parameters())
    Muon([named[name] for name in sorted(HIDDEN)], lr=0.02, weight_decay=0.1, momentum=0.95).step()
    rest = [parameter for name, parameter in named.items() if name not in HIDDEN]
    torch.optim.AdamW(rest, lr=0.003, weight_decay=0.1).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_resume_is_bit_equal() -> None:
    model = tiny()
    optimizer = build(model)
    train(model, optimizer, range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    train(model, optimizer, range(3, 6))

    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    resumed = TinyModel()
    resumed.load_state_dict(state["model"])
    resumed_optimizer = build(resumed)
    resumed_optimizer.load_state_dict(state["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6))
    for (name, parameter), other in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(parameter, other), name


def test_a_learning_rate_written_into_the_groups_takes_effect_also_after_a_resume() -> None:
    model = tiny()
    optimizer = build(model)
    optimizer.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(2))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_zero_grad_clears_both() -> None:
    model = tiny()
    optimizer = build(model)
    train(model, optimizer, range(1))
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_are_passed_over() -> None:
    model = tiny()
    model.lm_head.requires_grad_(False)
    assert all("lm_head.weight" not in group["param_names"] for group in build(model).param_groups)


def test_nothing_for_one_of_the_two_is_an_error() -> None:
    with pytest.raises(UserError, match="found 1 hidden matrices and 0 other"):
        MuonWithAdamW(nn.Linear(3, 3, bias=False).named_parameters(), muon_lr=0.1, adamw_lr=0.1)
    with pytest.raises(UserError, match="found 0 hidden matrices and 2 other"):
        MuonWithAdamW(nn.LayerNorm(3).named_parameters(), muon_lr=0.1, adamw_lr=0.1)
