"""Mode `distill` of the training benchmark: what the rollout-only adapter adds to an RL step, in time and memory.

Sequences of one length, of random tokens, go as one micro-batch through the dense pass, the update, and the step of the
adapter, which is the recipe's own (`DistillStep`, `LoRADistiller`). Beside seconds of the rollout that are given, that
makes an RL step, and says which share of the sequences may be distilled on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from random_trainer import compute_dtype, random_trainer
from rollout_shapes import kv_cache, model_config
from training_logprob import timed
from training_parts import MicroTimer
from training_rl import random_batch
from training_step import TrainingOptions

from sparrow.components.distill_loss import DistillLoss, FullKL, SampledK3, TopKKL
from sparrow.components.distiller import LoRADistiller
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.protocols import KVCache
from sparrow.recipes.grpo_distill import DistillStep
from sparrow.recipes.grpo_minibatches import packed
from sparrow.rollout import RolloutBatch
from sparrow.training.layers import prepare_layers

LIMIT = 0.15  # of the seconds of an RL step
LEARNING_RATE = 5e-6  # five times the dense policy's (paper)
LOSSES: dict[str, Callable[[int], DistillLoss]] = {
    "k3": lambda top_k: SampledK3(),
    "top_k": lambda top_k: TopKKL(top_k),
    "full": lambda top_k: FullKL(),
}


@dataclass(frozen=True, kw_only=True)
class DistillOptions(TrainingOptions):
    """What mode `distill` measures.

    Attributes:
        tokens, prompt: of each sequence, and how many of them are its prompt.
        loss, teacher, rank: of the distiller.
        top_k: of the dense pass, and of the loss `top_k`.
        share: of the sequences, distilled on.
        rollout_s: seconds of the rollout a sequence; None where they are not known.
    """

    tokens: int
    prompt: int
    schedule: str
    selector: str
    loss: str
    teacher: str
    rank: int
    micro_batch_tokens: int
    top_k: int
    share: float
    rollout_s: float | None


@dataclass(frozen=True)
class Part:
    """A part of the training half.

    Attributes:
        seconds: of one sequence.
        peak_bytes: of all that is on the device meanwhile; None on the CPU.
    """

    seconds: float
    peak_bytes: int | None


def measure_distill(options: DistillOptions, device: torch.device) -> dict[str, Any]:
    """Seconds a sequence of each part, the overhead of distilling, and memory on CUDA."""
    _check(options)
    distiller = LoRADistiller(
        LEARNING_RATE, rank=options.rank, loss=LOSSES[options.loss](options.top_k), teacher=options.teacher
    )
    cache = kv_cache(options.schedule, options.selector, "auto")
    model = random_trainer(model_config(options.model), device, compute_dtype(device))
    distiller.attach(model)
    prepare_layers(model, options.recompute, options.offload, options.compiled)
    sequences = max(options.micro_batch_tokens // options.tokens, 1)
    response = options.tokens - options.prompt
    batch = random_batch([options.prompt] * sequences, [response] * sequences, model.config.vocab_size)
    parts, metrics = _run(options, model, distiller, cache, batch, device)
    return {
        **vars(options), "sequences": sequences, **{f"{name}_s": part.seconds for name, part in parts.items()},
        "distill_over_update": parts["distill"].seconds / parts["update"].seconds,
        **shares(parts, options.rollout_s, options.share), **memory(parts, adapter_bytes(distiller)), **metrics,
    }  # fmt: skip


def shares(parts: dict[str, Part], rollout_s: float | None, share: float) -> dict[str, float]:
    """What distilling on a share adds to the rest of an RL step, and the largest share within the limit."""
    if rollout_s is None:
        return {}
    distill_s, step_s = parts["distill"].seconds, rollout_s + parts["score"].seconds + parts["update"].seconds
    return {
        "step_s": step_s, "overhead": share * distill_s / step_s, "limit": LIMIT,
        "largest_share": min(LIMIT * step_s / distill_s, 1.0),
    }  # fmt: skip


def memory(parts: dict[str, Part], adapter: int) -> dict[str, int]:
    """Peaks, and what distilling adds to the training half's: the update would peak without the adapter."""
    peaks = {f"{name}_peak_bytes": part.peak_bytes for name, part in parts.items() if part.peak_bytes is not None}
    if not peaks:
        return {"adapter_bytes": adapter}
    update, distill = peaks["update_peak_bytes"], peaks["distill_peak_bytes"]
    return {"adapter_bytes": adapter, **peaks, "added_bytes": max(update, distill) - (update - adapter)}


def adapter_bytes(distiller: LoRADistiller) -> int:
    """Of the adapter and its optimizer's state, which stay on the device."""
    states = [value for state in distiller.optimizer.state.values() for value in state.values()]
    return sum(tensor.nbytes for tensor in [*distiller.adapter.values(), *states])


def show_distill(result: dict[str, Any]) -> str:
    """A few lines."""
    r = result
    lines = [
        f"{r['model']}: {r['sequences']} x {r['tokens']} tokens, {r['prompt']} of them prompt, {r['schedule']}, loss "
        f"{r['loss']}, teacher {r['teacher']}, rank {r['rank']}"
    ]
    for name, text in (("score", "dense pass"), ("update", "update"), ("distill", "adapter's step")):
        peak = f", peak {r[f'{name}_peak_bytes'] / 2**30:.2f} GiB" if "added_bytes" in r else ""
        lines.append(f"  {text:15s}{r[f'{name}_s']:8.3f} s a sequence{peak}")
    lines.append(f"  the adapter's step takes {r['distill_over_update']:.2f} x the update of the same sequences")
    if "added_bytes" in r:
        lines.append(
            f"  memory: distilling adds {r['added_bytes'] / 2**30:.2f} GiB to the training half's peak, "
            f"{r['adapter_bytes'] / 2**30:.2f} GiB of it the adapter and its optimizer"
        )
    if "overhead" in r:
        lines.append(
            f"  RL step {r['step_s']:.3f} s a sequence, {r['rollout_s']:.3f} s of it the rollout, as given: a share of "
            f"{r['share']:g} adds {r['overhead']:.1%}; the largest share within {r['limit']:.0%} is "
            f"{r['largest_share']:.3f}"
        )
    return "\n".join(lines)


def _check(options: DistillOptions) -> None:
    if options.prompt >= options.tokens:
        raise UserError(f"--prompt {options.prompt}: must be below --tokens {options.tokens}")
    if not 0 < options.share <= 1:
        raise UserError(f"--share {options.share}: must be above 0 and at most 1")
    if options.rollout_s is not None and options.rollout_s <= 0:
        raise UserError(f"--rollout-s-per-sequence {options.rollout_s}: must be above 0")


def _run(
    options: DistillOptions, model: Decoder, distiller: LoRADistiller, cache: KVCache, batch: RolloutBatch,
    device: torch.device,
) -> tuple[dict[str, Part], dict[str, float]]:  # fmt: skip
    """The parts by name, and what the adapter's last step said of itself."""
    everything_S = torch.ones(batch.num_sequences, dtype=torch.bool)
    (micro,) = packed(batch, everything_S, options.micro_batch_tokens, device)
    timer = MicroTimer(model, options.attention, options.chunk, options.top_k, device)
    step = DistillStep(distiller, model, options.attention, 1.0, options.micro_batch_tokens, options.chunk, device)
    metrics: dict[str, float] = {}

    def score() -> None:
        # Sequences of one length keep their order: the micro-batch's tokens are the batch's.
        scores = timer.dense_pass(micro)
        batch.dense_logprobs_T = scores.logprobs_N.cpu()
        if distiller.recorded_top_k:
            batch.dense_top_ids_TK, batch.dense_top_logprobs_TK = scores.top_ids_NK.cpu(), scores.top_logprobs_NK.cpu()

    # The update last: the adapter's optimizer has its state by then, and the update's gradients, which add up from one
    # micro-batch to the next, stand beside the update alone, as in a run.
    work: dict[str, Callable[[], None]] = {
        "score": score,
        "distill": lambda: metrics.update(step(batch, cache, None)),
        "update": lambda: timer.update(micro),
    }
    parts = {name: _part(each, batch.num_sequences, device) for name, each in work.items()}
    assert not metrics["distill/skipped"], "without its optimizer's step the adapter's step is not whole"
    return parts, metrics


def _part(work: Callable[[], None], sequences: int, device: torch.device) -> Part:
    seconds, _ = timed(work, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None  # since the first run's end
    return Part(seconds / sequences, peak)
