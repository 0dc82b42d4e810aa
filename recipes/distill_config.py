"""The keys of a sparrow_distill config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sparrow.components.distiller import Distiller
from sparrow.config import Component
from sparrow.engine.engine import EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.recipes.calibrate_config import check_sampling, measured_with, plain
from sparrow.training import distributed


@dataclass(kw_only=True)
class DistillConfig:
    """Every key of a sparrow_distill config."""

    recipe: str = "sparrow_distill"
    output_dir: str  # one that holds a run of the same settings is gone on with
    steps: int  # may be raised later
    model: str  # a Hugging Face folder; its weights stay as they are
    warmup: str | None = None  # config of sparrow_sft that makes `model` where it does not exist yet
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the model; the adapter is fp32
    threads: int | None = None

    data: Component
    held_out_prompts: int  # the first so many of the data, on which P5 is measured; steps take those after them
    prompts_per_step: int
    num_samples: int = 1
    enable_thinking: bool | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig
    kv_cache: Component  # its budget is what the adapter is trained under
    distiller: Component

    budgets: list[int]  # total pages that P5 is measured at, rising
    mode: Literal["teacher_forced", "generate"] = "teacher_forced"
    acceptance: Component  # estimator and bin width
    confidence: float = 0.95  # of the two-sided bootstrap interval of each P5
    resamples: int = 1000

    micro_batch_tokens: int = 16384
    logprob_chunk: int = 1024
    activation_checkpointing: bool = False
    trackers: list[Component] = field(default_factory=list)
    checkpoint_every: int = 20


def check(cfg: DistillConfig) -> None:
    """What no single component can see."""
    for key in ("steps", "num_samples", "resamples", "micro_batch_tokens", "logprob_chunk", "checkpoint_every"):
        if getattr(cfg, key) < 1:
            raise UserError(f"{key}: {getattr(cfg, key)} must be at least 1")
    for key in ("held_out_prompts", "prompts_per_step"):
        if getattr(cfg, key) < distributed.world_size():
            raise UserError(f"{key}: {getattr(cfg, key)} is below the {distributed.world_size()} processes")
    if not 0 < cfg.confidence < 1:
        raise UserError(f"confidence: {cfg.confidence} must be between 0 and 1")
    if not cfg.budgets or cfg.budgets != sorted(set(cfg.budgets)) or cfg.budgets[0] < 1:
        raise UserError(f"budgets: {cfg.budgets} must be numbers of pages, at least 1 and rising")
    if "budget" not in cfg.kv_cache.kwargs:
        raise UserError(
            f"kv_cache: {cfg.kv_cache.path} has no budget to distil under; give the sparse cache of the run"
        )
    check_sampling(cfg.sampling)


def check_distiller(distiller: Distiller) -> None:
    """Offline there are no rewards and there is no other learning rate."""
    if distiller.ppo is not None:
        raise UserError("distiller.ppo: there are no rewards here; leave it out, or distil in sparrow_grpo")
    if distiller.rate_factor is not None:
        raise UserError("distiller.rate_factor: there is no base rate here; give distiller.learning_rate")


def settings(cfg: DistillConfig) -> dict[str, Any]:
    """What a run that is gone on with has to share with the one before, by dotted key."""
    more = {
        "held_out_prompts": cfg.held_out_prompts,
        "prompts_per_step": cfg.prompts_per_step,
        "mode": cfg.mode,
        "kv_cache.budget": plain(cfg.kv_cache.kwargs["budget"]),
        "distiller": plain(cfg.distiller),
    }
    return {**measured_with(cfg), **more}


def adapter_folder(cfg: DistillConfig) -> Path:
    return Path(cfg.output_dir) / "adapter"
