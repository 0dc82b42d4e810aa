"""Forward, backward and optimizer step of packed sequences, with fp32 weights and, on CUDA, bf16 products.

Axes: T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rollout_shapes import model_config
from torch.distributed.device_mesh import init_device_mesh
from training_logprob import timed

from sparrow.attention.dense import DenseAttention, DenseBackend
from sparrow.instantiate import Component
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rates import measure_flop_per_s
from sparrow.training.flops import UPDATE_FORWARDS, forward_flop
from sparrow.training.layers import prepare_layers
from sparrow.training.logprob import token_logprobs
from sparrow.training.sharding import shard

OPTIMIZERS = {
    "adamw": Component("torch.optim.AdamW", {"lr": 1e-6, "fused": True}),
    "adamw8bit": Component("torchao.optim.AdamW8bit", {"lr": 1e-6}),
    "offloaded": Component("sparrow.components.offloaded_adamw.OffloadedAdamW", {"lr": 1e-6}),
}


@dataclass(frozen=True)
class StepOptions:
    """What a run measures; `recompute`, `offload` and `compiled` as in `prepare_layers`.

    Attributes:
        beside_gib: memory that something else holds meanwhile, as the engine's weights would.
    """

    model: str
    tokens: int
    documents: int
    optimizer: str
    attention: DenseBackend
    chunk: int
    recompute: bool
    offload: bool
    compiled: bool
    beside_gib: float


def measure_step(options: StepOptions, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step, its share of what a bf16 product reaches (`train/mfu`), and peak memory on CUDA."""
    config = model_config(options.model)
    flop_per_s = measure_flop_per_s(device)
    beside = torch.empty(int(options.beside_gib * 2**30), dtype=torch.uint8, device=device)
    model = random_policy(config, device)
    prepare_layers(model, options.recompute, options.offload, options.compiled)
    optimizer = OPTIMIZERS[options.optimizer].build(model.named_parameters())
    lengths = _lengths(options.tokens, options.documents)
    tokens_T = torch.randint(config.vocab_size, (options.tokens,), device=device)
    targets_T = tokens_T.roll(-1)
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])

    def step() -> None:
        hidden_TE = model(tokens_T, positions_T, DenseAttention(options.attention, lengths, device))
        logprobs_T, _ = token_logprobs(hidden_TE, model.summing_head(), targets_T, 1.0, options.chunk)
        (-logprobs_T.mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds, _ = timed(step, device)
    flop = UPDATE_FORWARDS * forward_flop(config, lengths, options.tokens)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    del beside
    return {
        **vars(options), "lengths": lengths, "step_s": seconds, "flop": flop, "flop_per_s": flop_per_s,
        "mfu": flop / seconds / flop_per_s, "tokens_per_s": options.tokens / seconds, "peak_bytes": peak,
    }  # fmt: skip


def show_step(result: dict[str, Any]) -> str:
    memory = "not measured" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2**30:.1f} GiB"
    return (
        f"{result['model']}: {result['tokens']} tokens in {result['documents']} documents, {result['step_s']:.3f} s, "
        f"{result['tokens_per_s']:.0f} tokens/s\n  {result['flop'] / 1e12:.1f} TFLOP, {result['mfu']:.1%} of "
        f"{result['flop_per_s'] / 1e12:.0f} TFLOP/s (a large product's); peak memory {memory}"
    )


def random_policy(config: DecoderConfig, device: torch.device) -> Decoder:
    """fp32 master weights drawn on the device; on CUDA forward and backward see bf16 copies of them."""
    with torch.device(device):
        model = Decoder(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        # The name by which peft knows that a share is not a matrix of its own.
        shard(model, init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",)), torch.bfloat16)
    return model


def _lengths(tokens: int, documents: int) -> list[int]:
    """Unequal documents: the first is as long as all others, the second as those after it, and so on."""
    lengths = []
    for left in range(documents - 1, 0, -1):
        lengths.append(max((tokens - sum(lengths) - left) // 2, 1))
    return [*lengths, tokens - sum(lengths)]
