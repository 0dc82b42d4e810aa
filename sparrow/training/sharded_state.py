"""Optimizer state and fp32 weights of a sharded run, by torch.distributed.checkpoint: each rank writes its share.

What was saved by any number of processes, one included, is read by any other.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparrow.errors import UserError
from sparrow.models.checkpoint import plain_state_dict
from sparrow.models.decoder import Decoder
from sparrow.training.sharding import share_of


class Optimizer(Protocol):
    """What is asked of an optimizer; `MuonWithAdamW` is none of torch's."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self) -> Any: ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def save_shards(folder: Path, model: Decoder, optimizer: Optimizer) -> None:
    """Writes the folder; collective."""
    dcp.save({"model": plain_state_dict(model), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load_shards(folder: Path, model: Decoder, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Reads what `save_shards` wrote into a model, sharded or not, and its fresh optimizer; collective."""
    _make_state(optimizer, parameters)
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    owners = {name.rpartition(".")[0] for name in saved}
    state = {"model": plain_state_dict(model), "optimizer": _saved_part(optimizer.state_dict(), owners, "optimizer")}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    optimizer.load_state_dict(state["optimizer"])


def load_whole(state: dict[str, Any], optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Loads the state dict of a run that was not sharded into the fresh optimizer of one that is; collective."""
    _make_state(optimizer, parameters)
    optimizer.load_state_dict(_shares(state, optimizer.state_dict()))


def _saved_part(state: dict[str, Any], owners: Set[str], name: str) -> dict[str, Any]:
    """The state without that of parameters that had none when it was saved: no step had given them a gradient.

    Args:
        state: an optimizer's, or those of several by name.
        owners: what owns something in the save, by dotted name.
        name: of the state, likewise.
    """
    if "param_groups" not in state:
        return {key: _saved_part(value, owners, f"{name}.{key}") for key, value in state.items()}
    kept = {key: value for key, value in state["state"].items() if f"{name}.state.{key}" in owners}
    return state | {"state": kept}


def _shares(whole: Any, like: Any) -> Any:
    if isinstance(like, dict):
        return {key: _shares(value, like[key]) for key, value in whole.items()}
    if isinstance(like, DTensor):
        if type(whole) is not Tensor:
            raise UserError(
                f"resume: state of {type(whole).__name__} that one process saved whole cannot be shared out; go on "
                "with one process, or start another run from the save's model"
            )
        return share_of(whole.to(like.device), like)
    return whole


@torch.no_grad()
def _make_state(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """A step without gradient or rate, which moves nothing: the optimizer's tensors exist, and can be read into."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
