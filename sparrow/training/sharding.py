"""FSDP2: each rank holds a share of the fp32 weights, gradients and optimizer state; a layer is whole while it is used.

With `dtype: bfloat16` the whole layers are bf16 copies and the shares stay the fp32 master weights, which also serves a
single process. The functions marked so are collective: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from sparrow.models.checkpoint import load_decoder, plain_state_dict
from sparrow.models.decoder import Decoder
from sparrow.training import distributed


def load_trained(path: Path | str, device: torch.device, dtype: torch.dtype, replicate: int = 1) -> Decoder:
    """The decoder as it is trained, its parameters fp32; collective.

    Sharded where there are several processes or `dtype` is not fp32, and a plain module otherwise.

    Args:
        path: Hugging Face folder; each rank reads it, one tensor at a time.
        dtype: of forward and backward; gradients are summed in fp32.
        replicate: copies of the model; the processes of one copy share it. Divides their number.
    """
    if distributed.world_size() == 1 and dtype == torch.float32:
        return load_decoder(path, device, torch.float32)
    mesh = training_mesh(device, replicate)
    return load_decoder(path, device, torch.float32, lambda model: shard(model, mesh, dtype), copy_share)


def shard(model: Decoder, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shards in place, by layers; what stands outside of them (embedding, last norm, head) is the root's."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The root stays whole after its forward: the head is used outside of it, by the chunked log-probs.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the whole step's totals already: gradients are added up, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def training_mesh(device: torch.device, replicate: int = 1) -> DeviceMesh:
    """All processes, for `shard`: one dimension, or copies times shares; makes a group of one where there is none."""
    if not dist.is_initialized():  # one process that no torchrun started
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    ranks = dist.get_world_size()
    assert ranks % replicate == 0, (ranks, replicate)
    if replicate == 1:  # the name by which peft knows that a share is not a matrix of its own
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("fsdp",))
    # Neighbouring ranks, those of one node, share a copy: only sums of gradients cross between the nodes.
    return init_device_mesh(device.type, (replicate, ranks // replicate), mesh_dim_names=("replicate", "fsdp"))


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` was applied to this module."""
    return isinstance(model, FSDPModule)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of the module's own share group are whole, in the compute dtype; collective.

    Those of a layer are not the root's, so that never more than one group is held whole.
    """
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


def release(model: nn.Module) -> None:
    """Drops whole parameters that a forward without backward left behind."""
    if isinstance(model, FSDPModule):
        model.reshard()


def share_of(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's share of a tensor that every rank holds whole; nothing is sent."""
    mesh = like.device_mesh
    same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return same.redistribute(placements=like.placements)


def copy_share(parameter: Tensor, whole: Tensor) -> None:
    """Writes a whole tensor's share into a sharded parameter."""
    assert isinstance(parameter, DTensor)
    parameter.copy_(share_of(whole.to(parameter.device), parameter))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Clips to a norm over all parameters and returns what it was; collective."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def full_state_dict(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """Whole weights on the CPU under plain names, gathered one at a time; collective, and empty but on rank 0."""
    release(model)
    state = {}
    for name, tensor in plain_state_dict(model).items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if distributed.rank() == 0:
            state[name] = whole.detach().to("cpu", dtype)
    return state
