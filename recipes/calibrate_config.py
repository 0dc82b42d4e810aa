"""The keys of a sparrow_calibrate config, and which of them a measurement depends on."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparrow.attention.pattern import SparsePattern
from sparrow.components.acceptance import AcceptanceTail
from sparrow.components.schedule_file import ESTIMATORS
from sparrow.config import Component
from sparrow.engine.engine import EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.instantiate import locate
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.identity import adapter_identity, fingerprint
from sparrow.training import distributed

Mode = Literal["generate", "teacher_forced"]

# With one of these changed, earlier measurements say nothing. The others choose from what was measured (tau, bins,
# confidence, limits of a cell), say how much (prompts) or only how it is computed, and may change between two runs into
# one output_dir.
MEASURED_WITH = (
    "data",
    "num_samples",
    "enable_thinking",
    "seed",
    "dtype",
    "sampling",
    "engine.max_new_tokens",
    "engine.dtype",
    "kv_cache",
    "acceptance.estimator",
    "acceptance.top_k",
)
FEWEST_TOKENS = 20  # below, a 5th percentile is the minimum


@dataclass(kw_only=True)
class CalibrateConfig:
    """Every key of a sparrow_calibrate config."""

    recipe: str = "sparrow_calibrate"
    output_dir: str  # one that holds measurements of the same settings is gone on with
    model: str  # a Hugging Face folder
    adapter: str | None = None  # a folder of peft, on for the sparse side alone, as in the rollouts of a distilled run
    warmup: str | None = None  # config of sparrow_sft that makes `model` where it does not exist yet
    seed: int = 0
    device: str = "auto"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"  # of the weights, on both sides of the acceptance rate
    threads: int | None = None

    data: Component
    prompts: int  # the first so many of the data
    num_samples: int = 1
    held_out_prompts: int = 0  # the next so many, on which the chosen schedule is measured afterwards
    enable_thinking: bool | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    engine: EngineConfig

    kv_cache: Component  # that of the run the schedule is for; its budget gives way to each of `budgets`
    budgets: list[int]  # total pages, rising
    mode: Literal["generate", "teacher_forced", "both"] = "teacher_forced"
    acceptance: Component  # estimator, bin width and tau

    confidence: float = 0.95  # of the two-sided bootstrap interval of each P5
    resamples: int = 1000
    min_tokens: int = 400  # fewer in a cell of bin and budget, and nothing is chosen
    min_sequences: int = 8  # likewise: the interval comes from resampling whole sequences
    from_length: int = 0  # bins that start before this cached length take the budget of the first that does not
    until_length: int | None = None  # bins that start at this cached length or later are left out
    micro_batch_tokens: int = 16384
    logprob_chunk: int = 1024

    @property
    def modes(self) -> tuple[Mode, ...]:
        """What is measured; the schedule is chosen from the first."""
        return ("generate", "teacher_forced") if self.mode == "both" else (self.mode,)


def check(cfg: CalibrateConfig) -> None:
    """What no single component can see."""
    for key in ("prompts", "num_samples", "resamples", "min_sequences", "micro_batch_tokens", "logprob_chunk"):
        if getattr(cfg, key) < 1:
            raise UserError(f"{key}: {getattr(cfg, key)} must be at least 1")
    for key in ("held_out_prompts", "from_length"):
        if getattr(cfg, key) < 0:
            raise UserError(f"{key}: {getattr(cfg, key)} must not be negative")
    for key in ("prompts", "held_out_prompts"):
        if 0 < getattr(cfg, key) < distributed.world_size():
            raise UserError(f"{key}: {getattr(cfg, key)} is below the {distributed.world_size()} processes")
    if cfg.min_tokens < FEWEST_TOKENS:
        raise UserError(f"min_tokens: {cfg.min_tokens} must be at least {FEWEST_TOKENS}: P5 of fewer is their minimum")
    if not 0 < cfg.confidence < 1:
        raise UserError(f"confidence: {cfg.confidence} must be between 0 and 1")
    if cfg.until_length is not None and cfg.until_length <= cfg.from_length:
        raise UserError(f"until_length: {cfg.until_length} must be above from_length {cfg.from_length}")
    _check_budgets(cfg)
    check_sampling(cfg.sampling)


def _check_budgets(cfg: CalibrateConfig) -> None:
    if not cfg.budgets or cfg.budgets != sorted(set(cfg.budgets)) or cfg.budgets[0] < 1:
        raise UserError(f"budgets: {cfg.budgets} must be numbers of pages, at least 1 and rising")
    if "budget" not in cfg.kv_cache.kwargs:
        raise UserError(f"kv_cache: {cfg.kv_cache.path} has no budget to calibrate; give the sparse cache of the run")


def check_sampling(sampling: SamplingParams) -> None:
    if sampling.temperature == 0 or sampling.truncates:
        raise UserError(
            f"sampling: {sampling} is not what is trained on: the acceptance rate compares whole distributions at a "
            "temperature above 0; leave top_k, top_p and min_p out"
        )


def check_estimator(acceptance: AcceptanceTail) -> None:
    """A schedule file knows the paper's estimator and the exact one."""
    if acceptance.estimator_name not in ESTIMATORS:
        raise UserError(
            f"acceptance.top_k: {acceptance.top_k}: schedules are made for {' or '.join(ESTIMATORS)}; set "
            "acceptance.top_k: 20 or acceptance.estimator: exact"
        )


def check_reserved(budgets: Sequence[int], pattern: SparsePattern) -> None:
    """A budget holds at least the pages that are always kept."""
    reserved = pattern.sink_pages + pattern.recent_pages
    if budgets[0] < reserved:
        raise UserError(
            f"budgets: {budgets[0]} pages do not hold the {pattern.sink_pages} sink and {pattern.recent_pages} recent "
            "pages of kv_cache that are always kept"
        )


def check_model(config: DecoderConfig, pattern: SparsePattern) -> None:
    """The model has sparse layers."""
    if pattern.dense_layers >= config.num_layers:
        raise UserError(
            f"kv_cache.dense_layers: {pattern.dense_layers} of the model's {config.num_layers} layers leave none that "
            "reads by budget"
        )


def with_budget(kv_cache: Component, budget: Component) -> Component:
    """The same cache with another budget."""
    return replace(kv_cache, kwargs={**kv_cache.kwargs, "budget": budget})


def fixed_budget(pages: int) -> Component:
    return Component("sparrow.components.budget.FixedBudget", {"pages": pages}, "budgets")


def measured_with(cfg: Any) -> dict[str, Any]:
    """The settings that a measurement depends on, by dotted key, however they are spelt; of any config that has them.

    Arguments that are left out have their defaults, paths are absolute, and the checkpoint is known by its weights.
    """
    checkpoint = Path(cfg.model)
    names = dict.fromkeys(key.partition(".")[0] for key in MEASURED_WITH)
    flat = _flat({name: plain(getattr(cfg, name)) for name in names})
    flat = {key: value for key, value in flat.items() if not key.startswith("kv_cache.budget.")}
    wanted = {key: flat[key] for key in flat if any(f"{key}.".startswith(f"{name}.") for name in MEASURED_WITH)}
    return {"model": f"{checkpoint.absolute().name}, weights {fingerprint(checkpoint)}", **wanted}


def settings(cfg: CalibrateConfig) -> dict[str, Any]:
    """What measurements of one output_dir share; the schedule's provenance knows the adapter by the same text."""
    return {**measured_with(cfg), "adapter": None if cfg.adapter is None else adapter_identity(Path(cfg.adapter))}


def plain(value: Any) -> Any:
    """A setting as JSON holds it."""
    if isinstance(value, Component):
        arguments = {**_defaults(value.path), **value.kwargs}
        return {"_component_": value.path} | {name: plain(argument) for name, argument in arguments.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in vars(value).items()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str) and os.sep in value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    return value


def _defaults(path: str) -> dict[str, Any]:
    """Of a component's arguments."""
    parameters = inspect.signature(locate(path)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in node.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result
