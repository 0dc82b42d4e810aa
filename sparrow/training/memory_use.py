"""Memory that a step took at its peak."""

from __future__ import annotations

import resource

import torch

from sparrow.training import distributed

GIB = 2**30


def memory_metrics(device: torch.device) -> dict[str, float]:
    """The most that any rank held since the last call, in GiB; collective.

    On CUDA `memory/peak_gib`, of tensors, and `memory/reserved_gib`, of PyTorch's allocator. On the CPU
    `memory/peak_gib` is that of the process since it began: the system keeps no other.
    """
    if device.type == "cuda":
        mine = {
            "memory/peak_gib": torch.cuda.max_memory_allocated(device) / GIB,
            "memory/reserved_gib": torch.cuda.max_memory_reserved(device) / GIB,
        }
        torch.cuda.reset_peak_memory_stats(device)
    else:
        mine = {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
    everywhere = distributed.gather_objects(mine)
    return {name: max(one[name] for one in everywhere) for name in mine}
