"""What a training run needs of each GPU's memory, phase by phase, before anything is allocated.

A step has four phases, and what they need does not stand side by side: in the `rollout` there are no gradients and no
activations, after it the engine sleeps, and its copy of the weights and the KV pool are gone; `score` is the dense pass
without gradients, `update` forward and backward, `step` the optimizer's. Weights and optimizer state stay throughout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparrow.engine.memory import KEPT_FREE
from sparrow.errors import UserError
from sparrow.memory_sizes import (
    FP32,
    Activations,
    OptimizerMemory,
    layer_working_bytes,
    offloaded_bytes,
    parameter_counts,
    recomputed_bytes,
    saved_bytes,
)
from sparrow.models.decoder_config import DecoderConfig

KIB, GIB = 2**10, 2**30
PHASES = ("rollout", "score", "update", "step")
CONTEXT = GIB  # CUDA's and cuBLAS's own, and with several GPUs as much for NCCL
LOGITS_HELD = 4  # logits, log-probs, and in the backward the gradients of both
PREFETCHED_LAYERS = 2  # unsharded at a time: the one that runs and the next


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that the plan depends on.

    Attributes:
        gpus: processes, one GPU each.
        replicate: copies of the model; the processes of one share masters, gradients and optimizer state.
        dtype: that the model computes in; the masters are fp32.
        activations: kept, recomputed layer by layer, or recomputed from inputs in the host's memory.
        flex: attention is FlexAttention, and SDPA else.
        reference: a frozen copy of the first weights is kept.
        replay: rollouts come from disk; there is no engine.
        rollout_dtype: of the engine's weights and KV pool.
        kv_tokens, block_size, kv_bytes: of the pool: tokens, tokens of the null block, bytes of a token, landmarks
            included.
        prompt_tokens, max_new_tokens: the longest prompt and response.
        micro_batch_tokens: of a forward; a longer sequence is one of its own.
        logprob_chunk: tokens whose logits are held.
    """

    config: DecoderConfig
    gpus: int = 1
    replicate: int = 1
    dtype: torch.dtype = torch.float32
    activations: Activations = "kept"
    flex: bool = False
    optimizer: OptimizerMemory
    reference: bool = False
    replay: bool = False
    rollout_dtype: torch.dtype
    kv_tokens: int
    block_size: int
    kv_bytes: int
    prompt_tokens: int
    max_new_tokens: int
    micro_batch_tokens: int
    logprob_chunk: int

    @property
    def shards(self) -> int:
        """Processes that share one copy of the model."""
        return self.gpus // self.replicate

    @property
    def sharded(self) -> bool:
        """Whether layers are gathered to compute, apart from their masters, be it by one process from itself."""
        return self.dtype != torch.float32 or self.gpus > 1

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest forward."""
        return max(self.micro_batch_tokens, self.prompt_tokens + self.max_new_tokens)


@dataclass(frozen=True)
class Part:
    """One row of the plan.

    Attributes:
        key: what in the config makes it smaller.
        size: bytes on each GPU.
        phases: those in which it is there.
        allowance: a round figure for what cannot be computed; no run is refused for it.
    """

    name: str
    key: str
    size: int
    phases: tuple[str, ...]
    allowance: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """The parts of a job on each GPU, and by name what stands in the host's memory for each."""

    job: Job
    parts: tuple[Part, ...]
    host: dict[str, int]

    def total(self, phase: str, allowances: bool = True) -> int:
        """Bytes on each GPU in a phase."""
        return sum(part.size for part in self.parts if phase in part.phases and (allowances or not part.allowance))


def plan_memory(job: Job) -> MemoryPlan:
    """All parts, those of 0 bytes left out."""
    parts = (*_trainer(job), *_engine(job), *_forward(job), *_allowances(job))
    host = {
        "optimizer": round(parameter_counts(job.config).total / job.shards * job.optimizer.host),
        "inputs of layers": job.forward_tokens * offloaded_bytes(job.config, job.dtype, job.activations),
    }
    return MemoryPlan(
        job, tuple(part for part in parts if part.size), {name: size for name, size in host.items() if size}
    )


def _trainer(job: Job) -> Iterator[Part]:
    """Weights, gradients, optimizer."""
    count = parameter_counts(job.config)
    own = -(-count.total // job.shards)
    yield Part("weights, fp32", "model", own * FP32, PHASES)
    yield Part("optimizer state", "optimizer", round(own * job.optimizer.state), PHASES)
    yield Part("reference weights, fp32", "kl_coef", own * FP32 if job.reference else 0, PHASES)
    yield Part("gradients, fp32", "model", own * FP32, ("update", "step"))
    yield Part("temporaries of the step", "optimizer", round(own * job.optimizer.step), ("step",))
    if job.sharded:
        gathered = (PREFETCHED_LAYERS * count.layer + count.root) * job.dtype.itemsize
        yield Part(f"layers gathered to compute, {_name(job.dtype)}", "model", gathered, ("score", "update"))
        root = count.root * job.dtype.itemsize if job.reference else 0
        yield Part("the reference's embedding and head", "kl_coef", root, ("score",))
        reduced = (count.layer + count.root) * (job.dtype.itemsize + FP32)
        yield Part("their gradients, before they are dealt out", "model", reduced, ("update",))


def _engine(job: Job) -> Iterator[Part]:
    """The rollout's copy of the weights and its pool, both released by the engine's sleep."""
    if job.replay:
        return
    weights = parameter_counts(job.config).total * job.rollout_dtype.itemsize
    yield Part(f"engine's weights, {_name(job.rollout_dtype)}", "engine.dtype", weights, ("rollout",))
    pool = (job.kv_tokens // job.block_size + 1) * job.block_size * job.kv_bytes
    yield Part("KV pool", "engine.kv_tokens", pool, ("rollout",))


def _forward(job: Job) -> Iterator[Part]:
    """Activations of the largest micro-batch, logits of a chunk."""
    config, dtype = job.config, job.dtype
    final = 3 * config.hidden_size * dtype.itemsize  # hidden states, those of responses, their gradient
    working = layer_working_bytes(config, dtype) + final
    kept = job.forward_tokens * saved_bytes(config, dtype, job.activations, job.flex)
    again = job.forward_tokens * recomputed_bytes(config, dtype, job.activations, job.flex)
    work = job.forward_tokens * working
    yield Part("activations kept", "micro_batch_tokens", kept, ("update",))
    yield Part("activations recomputed", "micro_batch_tokens", again, ("update",))
    yield Part("activations of the layer at work", "micro_batch_tokens", work, ("score", "update"))
    logits = LOGITS_HELD * job.logprob_chunk * config.vocab_size * FP32
    yield Part("logits of a chunk", "logprob_chunk", logits, ("score", "update"))
    # An fp32 sum; in fp32 autograd adds one chunk's to that of those before it.
    head = (2 if dtype == torch.float32 else 1) * config.vocab_size * config.hidden_size * FP32
    yield Part("head's gradient, chunk by chunk", "model", head, ("update",))


def _allowances(job: Job) -> Iterator[Part]:
    yield Part("CUDA graphs, workspaces, fragments", "", KEPT_FREE, PHASES, allowance=True)
    yield Part("CUDA and NCCL" if job.gpus > 1 else "CUDA", "", CONTEXT * (1 + (job.gpus > 1)), PHASES, allowance=True)


def check_fits(plan: MemoryPlan, memory: int) -> None:
    """UserError with phase, need, limit, the largest part and its key where a phase cannot fit, allowances apart."""
    phase = max(PHASES, key=lambda name: plan.total(name, allowances=False))
    need = plan.total(phase, allowances=False)
    if need <= memory:
        return
    there = [part for part in plan.parts if phase in part.phases and not part.allowance]
    largest = max(there, key=lambda part: part.size)
    raise UserError(
        f"memory: the {phase} phase needs {need / GIB:.1f} GiB on each GPU of {memory / GIB:.1f}; most of it, "
        f"{largest.size / GIB:.1f}, is {largest.name}: {_remedy(plan, phase, largest, need - memory)}"
    )


def _remedy(plan: MemoryPlan, phase: str, part: Part, excess: int) -> str:
    """What to set the part's key to, so that the phase is smaller by `excess` bytes."""
    job = plan.job
    if part.key == "engine.kv_tokens":
        blocks = -(-excess // (job.kv_bytes * job.block_size))
        return _at_most(part.key, job.kv_tokens, (job.kv_tokens // job.block_size - blocks) * job.block_size)
    if part.key == "logprob_chunk":
        return _at_most(part.key, job.logprob_chunk, job.logprob_chunk - -(-excess * job.logprob_chunk // part.size))
    if part.key == "micro_batch_tokens":
        return _shorter(plan, phase, excess)
    return {
        "model": "model: only a smaller one, or more shards, takes less",
        "optimizer": "optimizer: torchao.optim.AdamW8bit keeps about two bytes a parameter",
        "engine.dtype": "engine.dtype: bfloat16 takes half of float32",
        "kl_coef": "kl_coef: 0 keeps none",
    }[part.key]


def _shorter(plan: MemoryPlan, phase: str, excess: int) -> str:
    """A smaller forward, as far as it holds a longest sequence; below that shorter responses as well; or an option."""
    job = plan.job
    size = sum(part.size for part in plan.parts if part.key == "micro_batch_tokens" and phase in part.phases)
    tokens = job.forward_tokens - -(-excess * job.forward_tokens // size)
    limits = [_at_most("micro_batch_tokens", job.micro_batch_tokens, tokens)] if tokens < job.micro_batch_tokens else []
    if tokens < job.prompt_tokens + job.max_new_tokens:
        limits.insert(0, _at_most("engine.max_new_tokens", job.max_new_tokens, tokens - job.prompt_tokens))
    option = {"kept": "activation_checkpointing", "recomputed": "offload_activations"}.get(job.activations)
    less = f"{option}: true keeps less, or " if option and phase == "update" else ""
    return less + ", ".join(limits)


def _at_most(key: str, value: int, limit: int) -> str:
    return f"{key} {value} can be {limit} at most" if limit > 0 else f"{key} {value} is not all that must be smaller"


def plan_table(plan: MemoryPlan, memory: int) -> list[str]:
    """A line for each part, a column for each phase, the totals, and what is left of `memory` bytes."""
    job, width = plan.job, max(len(part.name) for part in plan.parts)
    lines = [*_heading(job, memory), _row("", PHASES, width)]
    for part in plan.parts:
        lines.append(_row(part.name, [f"{part.size / GIB:.2f}" if p in part.phases else "" for p in PHASES], width))
    totals = {phase: plan.total(phase) for phase in PHASES}
    lines.append(_row("total", [f"{totals[phase] / GIB:.2f}" for phase in PHASES], width))
    lines.append(_row("left", [f"{(memory - totals[phase]) / GIB:.2f}" for phase in PHASES], width))
    for name, size in plan.host.items():
        lines.append(f"{name} in the host's memory, for each GPU: {size / GIB:.2f}")
    return lines


def _heading(job: Job, memory: int) -> list[str]:
    shared = f"the model in {job.shards} shards" if job.shards > 1 else "the whole model on each"
    copies = f", {job.replicate} copies of it" if job.replicate > 1 and job.shards > 1 else ""
    kept = saved_bytes(job.config, job.dtype, job.activations, job.flex) / KIB
    return [
        f"memory in GiB, {memory / GIB:.1f} on each of {job.gpus} GPU{'s' * (job.gpus > 1)}, {shared}{copies}",
        f"computes in {_name(job.dtype)}, activations {job.activations}, {job.forward_tokens} tokens in a forward",
        f"KiB of a token: activations {kept:.0f}, KV with landmarks {job.kv_bytes / KIB:.0f}",
    ]


def _row(name: str, cells: list[str] | tuple[str, ...], width: int) -> str:
    return (f"{name:{width}}" + "".join(f"{cell:>9}" for cell in cells)).rstrip()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
