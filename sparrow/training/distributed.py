"""Data parallelism by hand: gradients are summed, figures are gathered. Each call is the identity in a single process.

All functions are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


class SharedQueue:
    """Numbers from 0 to `size` - 1, each given to the one process that asks for it first; making it is collective.

    Every process gets its own rank first, so that none goes without. `size` is at least the number of processes.

    Attributes:
        share: numbers per process, rounded up.
    """

    _made = 0

    def __init__(self, size: int) -> None:
        assert size >= world_size(), (size, world_size())
        SharedQueue._made += 1
        self.size, self.share = size, -(-size // world_size())
        self._key, self._first = f"sparrow/queue/{SharedQueue._made}", True
        self._store = _get_default_store() if dist.is_initialized() else dist.HashStore()

    def claim(self) -> int | None:
        """The next number; None when all are taken."""
        number = rank() if self._first else world_size() - 1 + self._store.add(self._key, 1)
        self._first = False
        return number if number < self.size else None

    def deal(self) -> Callable[[], int | None]:
        """As `claim`, but each process gets every so manieth number, however fast it is: the same in every run."""
        numbers = iter(range(rank(), self.size, world_size()))
        return lambda: next(numbers, None)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Adds up each gradient over the ranks; a sum, because losses are divided by the whole step's totals already."""
    if not dist.is_initialized():
        return
    members = list(parameters)
    for parameter in members:
        if parameter.grad is None:  # A rank without tokens still has to take part.
            parameter.grad = torch.zeros_like(parameter)
    # One message: a small model's many small ones would cost more than its gradients.
    flat = torch.cat([parameter.grad.flatten() for parameter in members if parameter.grad is not None])
    dist.all_reduce(flat)
    for parameter, summed in zip(members, flat.split([p.numel() for p in members]), strict=True):
        parameter.grad = summed.view_as(parameter)


def sum_values(values: dict[str, float]) -> dict[str, float]:
    """Sums each value over the ranks; a rank without tokens may lack keys."""
    total: dict[str, float] = {}
    for part in gather_objects(values):
        for key, value in part.items():
            total[key] = total.get(key, 0.0) + value
    return total


def sum_tensor(values: Tensor) -> Tensor:
    """Sums a CPU tensor of one shape over the ranks, the same bits on each; the argument is left alone."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def gather(values: Tensor) -> Tensor:
    """Concatenates a CPU tensor of any length over the ranks, in rank order."""
    return torch.cat(gather_objects(values))


def gather_objects(value: Any) -> list[Any]:
    """One picklable object per rank, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        dist.barrier()
