"""The keys of a sparrow_grpo config; docs/paper.md says which part of the paper each belongs to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from sparrow.attention.dense import DenseBackend
from sparrow.config import Component, Positional
from sparrow.engine.engine import EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.recipes.evaluate import figure_names
from sparrow.training import distributed
from sparrow.training.alarms import Alarms
from sparrow.training.run_state import KeepBest


@dataclass(kw_only=True)
class Validation:
    """Dense rollouts on held-out prompts, before the first step, every so many steps and after the last.

    Attributes:
        data: prompts; the first `prompts` of it are used, always the same.
        every: steps between two validations.
        num_samples: N of `val/mean@N`; of several samples there are `val/pass@k` and `val/maj@k` too.
        temperature: 0 is greedy.
    """

    data: Component
    every: int
    prompts: int
    num_samples: int = 1
    temperature: float = 1.0


@dataclass(kw_only=True)
class GRPOConfig:
    """Every key of a sparrow_grpo config."""

    recipe: str = "sparrow_grpo"
    output_dir: str
    steps: int
    model: str  # a Hugging Face folder
    warmup: str | None = None  # config of sparrow_sft that makes `model` where it does not exist yet
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of forward and backward; the optimizer's weights are fp32
    replicate: int = 1  # copies of the model, each shared by an equal number of processes
    threads: int | None = None  # of PyTorch on the CPU; pinned, the last bits do not depend on how many cores there are

    data: Component
    reward: list[Component]
    prompts_per_step: int
    num_samples: int
    enable_thinking: bool | None = None
    max_prompt_tokens: int | None = None  # longer prompts are dropped at the start; null is what the model has room for
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig
    kv_cache: Component
    validation: Validation | None = None

    acceptance: Component
    advantage: Component
    mask_truncated: bool = False  # responses cut by the limit of tokens teach nothing (DAPO's overlong filtering)
    correction: Component
    loss: Component
    aggregation: Component
    kl_coef: float = 0.0  # above 0, a frozen copy of the first weights is kept as the reference
    optimizer: Annotated[Component, Positional(1)]
    lr_warmup_steps: int = 0
    final_lr: float = 1.0  # share of the rate that the last step has, linearly; 1 is constant
    max_grad_norm: float = 1.0
    minibatches: int = 1  # optimizer steps per batch of rollouts; each takes whole groups
    micro_batch_tokens: int = 16384
    logprob_chunk: int = 1024
    activation_checkpointing: bool = False  # the backward recomputes each layer but for its attention
    offload_activations: bool = False  # recomputes whole layers, from inputs that wait in the host's memory
    attention: DenseBackend = "auto"  # of the dense forward: sdpa pads documents, flex packs them
    compile: bool = False  # the trainer's layers, by torch.compile
    flop_per_s: float | None = None  # of one device, for train/mfu; null measures a large product's
    distiller: Component | None = None
    alarms: Alarms | None = field(default_factory=Alarms)  # null turns all off

    trackers: list[Component]
    measure_speedup_every: int = 50  # steps; decodes a few steps with a dense cache for speedup/measured; 0 never
    profile: bool = False  # a trace of this process's second step, in output_dir/profile
    samples_per_step: int = 2
    checkpoint_every: int = 10
    keep_last: int = 2
    keep_best: int = 0  # saves that stay besides, and are made for it, because `best_metric` is highest there
    best_metric: str | None = None  # val/mean@N of the validation by default
    resume: str | None = None  # auto, or the folder of one save
    dump_rollouts: bool | int = False  # true for every step, N for every Nth; under output_dir/rollouts
    replay: str | None = None  # such a folder: train on its rollouts, without an engine
    max_nonfinite_steps: int = 3  # in a row


def best_saves(cfg: GRPOConfig) -> KeepBest | None:
    """Which saves stay for being the best."""
    if cfg.keep_best == 0:
        if cfg.best_metric is not None:
            raise UserError(f"best_metric: {cfg.best_metric} has no use with keep_best 0")
        return None
    if cfg.keep_best < 0:
        raise UserError(f"keep_best: {cfg.keep_best} must not be negative")
    measured = [] if cfg.validation is None else figure_names(cfg.validation.num_samples)
    validated = [f"val/{name}" for name in measured]
    metric = cfg.best_metric or next(iter(validated), None)
    if metric is None:
        raise UserError("best_metric: must be given where keep_best is above 0 and there is no validation")
    if metric.startswith("val/") and metric not in validated:
        raise UserError(f"best_metric: {metric} is not measured; {', '.join(validated) or 'there is no validation'}")
    if metric.startswith(("time/", "time_share/", "memory/", "speedup/")) or metric in (
        "tokens_per_second",
        "train/mfu",
    ):
        raise UserError(f"best_metric: {metric} says nothing of the model")
    return KeepBest(metric, cfg.keep_best)


def _check_replay(cfg: GRPOConfig) -> None:
    if cfg.dump_rollouts < 0:
        raise UserError(f"dump_rollouts: {cfg.dump_rollouts} must be true, false or a number of steps")
    if cfg.replay is not None and cfg.validation is not None:
        raise UserError("validation: a replay has no engine to validate with; leave it out with ~validation")
    if cfg.replay is not None and cfg.dump_rollouts:
        raise UserError("dump_rollouts: a replay generates no rollouts")


_AT_LEAST_ONE = (
    "steps", "prompts_per_step", "num_samples", "minibatches", "micro_batch_tokens", "logprob_chunk",
    "checkpoint_every", "keep_last", "max_nonfinite_steps",
)  # fmt: skip
_NOT_NEGATIVE = ("kl_coef", "lr_warmup_steps", "final_lr", "measure_speedup_every", "samples_per_step")


def _check_numbers(cfg: GRPOConfig) -> None:
    for key in _AT_LEAST_ONE:
        if getattr(cfg, key) < 1:
            raise UserError(f"{key}: {getattr(cfg, key)} must be at least 1")
    for key in _NOT_NEGATIVE:
        if not 0 <= getattr(cfg, key) < math.inf:
            raise UserError(f"{key}: {getattr(cfg, key)} must not be negative, and finite")
    for key in ("max_prompt_tokens", "flop_per_s", "max_grad_norm"):
        value = getattr(cfg, key)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key}: {value} must be above 0 and finite")
    for key in ("every", "prompts", "num_samples"):
        if cfg.validation is not None and getattr(cfg.validation, key) < 1:
            raise UserError(f"validation.{key}: {getattr(cfg.validation, key)} must be at least 1")


def check(cfg: GRPOConfig) -> None:
    """What no single component can see."""
    _check_numbers(cfg)
    best_saves(cfg)
    _check_replay(cfg)
    if cfg.prompts_per_step < distributed.world_size():
        raise UserError(f"prompts_per_step: {cfg.prompts_per_step} is below the {distributed.world_size()} processes")
    if cfg.replicate < 1 or distributed.world_size() % cfg.replicate:
        raise UserError(f"replicate: {cfg.replicate} does not divide the {distributed.world_size()} processes")
    if cfg.sampling.temperature == 0:
        raise UserError("sampling.temperature: 0 is greedy; reinforcement learning needs samples that differ")
    if cfg.sampling.truncates:
        raise UserError(
            f"sampling: top_k {cfg.sampling.top_k}, top_p {cfg.sampling.top_p} and min_p {cfg.sampling.min_p} cut the "
            "distribution that is sampled from, not the dense one that is trained, so that their ratio is not 1 even "
            "for dense rollouts; leave them out"
        )
    if cfg.optimizer.path.rpartition(".")[2] == "CPUOffloadOptimizer":
        raise UserError(
            f"optimizer: {cfg.optimizer.path} takes each gradient in the backward, before it is summed over ranks and "
            "clipped; use sparrow.components.offloaded_adamw.OffloadedAdamW"
        )
    if cfg.offload_activations and not cfg.activation_checkpointing:
        raise UserError("offload_activations: what is offloaded are the checkpoints of activation_checkpointing: true")
    if cfg.validation is not None and cfg.validation.prompts < distributed.world_size():
        raise UserError(f"validation.prompts: {cfg.validation.prompts} is below the number of processes")
