"""Copies from device to host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def to_host(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, with one wait for all of them; from CUDA they arrive in pinned memory.

    A generator's tensors are dropped as soon as their copy is queued, so that they need not fit the device together.
    Tensors of the CPU are returned as they are: pass copies of what changes later.
    """
    host, devices = [], set()
    for tensor in tensors:
        # A non-blocking copy to the host allocates its target pinned.
        host.append(tensor.to("cpu", non_blocking=True))
        devices.add(tensor.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return host
