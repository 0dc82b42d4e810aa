"""A trainer's decoder of random weights, and the processes that share it where torchrun started several."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.training.sharding import shard, training_mesh


@contextmanager
def trainer_device() -> Iterator[torch.device]:
    """This process's device, inside of the group of torchrun's processes, if it was started by torchrun."""
    device = resolve_device("auto", threads=None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    yield device
    if dist.is_initialized():  # not after an error: the other ranks may wait in a collective
        dist.destroy_process_group()


def compute_dtype(device: torch.device) -> torch.dtype:
    """What forward and backward are measured in: bf16 on CUDA, as the configs of real models say."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@torch.no_grad()
def random_trainer(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """A decoder as `load_trained` returns it, its fp32 weights drawn on the device at the scale of a trained model's.

    Args:
        dtype: of forward and backward; sharded where it is not fp32, or where there are several processes.
    """
    with torch.device("meta"):
        model = Decoder(config)
    if distributed.world_size() > 1 or dtype != torch.float32:
        shard(model, training_mesh(device), dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(distributed.rank())
    for parameter in model.parameters():
        share = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.ndim == 1:
            share.fill_(1)
        else:
            share.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    return model
