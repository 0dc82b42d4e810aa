"""Which device a process uses, and with how many threads."""

from __future__ import annotations

import os

import torch

from sparrow.errors import UserError


def resolve_device(name: str, threads: int | None) -> torch.device:
    """`auto` is CUDA where there is some, else the CPU; under torchrun each process takes the GPU of its local rank.

    Args:
        threads: PyTorch's threads on the CPU; None leaves them. The number is part of a CPU result's last bits.

    Raises:
        UserError: a device that this machine or this PyTorch has not.
    """
    if threads is not None:
        if threads < 1:
            raise UserError(f"threads: {threads} must be at least 1")
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise UserError(f"device: {name!r} is not auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device: cuda was asked for, but PyTorch sees no GPU; use auto or cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"--nproc_per_node: {local_rank + 1} processes or more, this machine has {torch.cuda.device_count()} GPUs; "
            "device=cpu takes none"
        )
    return torch.device("cuda", local_rank)
