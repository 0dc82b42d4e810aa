"""Forward, backward and optimizer step of packed sequences, with fp32 weights and, on CUDA, bf16 products.

Axes: T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from random_trainer import compute_dtype, random_trainer
from rollout_shapes import model_config
from training_logprob import timed

from sparrow.attention.dense import DenseAttention, DenseBackend
from sparrow.instantiate import Component
from sparrow.rates import measure_flop_per_s
from sparrow.training import distributed
from sparrow.training.flops import UPDATE_FORWARDS, forward_flop
from sparrow.training.layers import prepare_layers
from sparrow.training.logprob import token_logprobs

OPTIMIZERS = {
    "adamw": Component("torch.optim.AdamW", {"lr": 1e-6, "fused": True}),
    "adamw8bit": Component("torchao.optim.AdamW8bit", {"lr": 1e-6}),
    "offloaded": Component("sparrow.components.offloaded_adamw.OffloadedAdamW", {"lr": 1e-6}),
}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What every mode that trains is told; `recompute`, `offload` and `compiled` as in `prepare_layers`.

    Attributes:
        chunk: tokens whose logits are held at a time.
    """

    model: str
    attention: DenseBackend
    chunk: int
    recompute: bool
    offload: bool
    compiled: bool


@dataclass(frozen=True, kw_only=True)
class StepOptions(TrainingOptions):
    """What mode `step` measures.

    Attributes:
        tokens, documents: of each process, if there are several.
        beside_gib: memory that something else holds meanwhile, as the engine's weights would.
    """

    tokens: int
    documents: int
    optimizer: str
    beside_gib: float


def measure_step(options: StepOptions, device: torch.device) -> dict[str, Any]:
    """Median seconds of a step, its share of what a bf16 product reaches (`train/mfu`), and peak memory on CUDA.

    Several processes share the model and have tokens of their own; figures but `tokens_per_s` are of one of them.
    """
    config = model_config(options.model)
    flop_per_s = measure_flop_per_s(device)
    beside = torch.empty(int(options.beside_gib * 2**30), dtype=torch.uint8, device=device)
    model = random_trainer(config, device, compute_dtype(device))
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
    processes = distributed.world_size()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    del beside
    return {
        **vars(options), "processes": processes, "lengths": lengths, "step_s": seconds, "flop": flop,
        "flop_per_s": flop_per_s, "mfu": flop / seconds / flop_per_s,
        "tokens_per_s": processes * options.tokens / seconds, "peak_bytes": peak,
    }  # fmt: skip


def show_step(result: dict[str, Any]) -> str:
    memory = "not measured" if result["peak_bytes"] is None else f"{result['peak_bytes'] / 2**30:.1f} GiB"
    several = f"{result['processes']} processes, each " if result["processes"] > 1 else ""
    return (
        f"{result['model']}: {several}{result['tokens']} tokens in {result['documents']} documents, "
        f"{result['step_s']:.3f} s, {result['tokens_per_s']:.0f} tokens/s\n"
        f"  {result['flop'] / 1e12:.1f} TFLOP, {result['mfu']:.1%} of "
        f"{result['flop_per_s'] / 1e12:.0f} TFLOP/s (a large product's); peak memory {memory}"
    )


def _lengths(tokens: int, documents: int) -> list[int]:
    """Unequal documents: the first is as long as all others, the second as those after it, and so on."""
    lengths = []
    for left in range(documents - 1, 0, -1):
        lengths.append(max((tokens - sum(lengths) - left) // 2, 1))
    return [*lengths, tokens - sum(lengths)]
