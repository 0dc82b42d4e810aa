"""The keys of a sparrow_eval config."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal
from zlib import crc32

from sparrow.config import Component
from sparrow.engine.engine import EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.registry import did_you_mean
from sparrow.training import distributed

Mode = Literal["dense", "sparse"]


@dataclass(kw_only=True)
class Benchmark:
    """Prompts with their reward.

    Attributes:
        name: of the folder of its samples, and in the tables.
        prompts: the first so many of the data; all by default.
        num_samples: of each prompt: N of mean@N.
        sampling, enable_thinking, max_new_tokens: of this benchmark, in the place of the config's.
        reference: how published figures were made, and which they are; printed.
    """

    name: str
    data: Component
    reward: Component
    prompts: int | None = None
    num_samples: int = 1
    sampling: SamplingParams | None = None
    enable_thinking: bool | None = None
    max_new_tokens: int | None = None
    reference: str | None = None


@dataclass(kw_only=True)
class EvalConfig:
    """Every key of a sparrow_eval config."""

    recipe: str = "sparrow_eval"
    output_dir: str  # one that holds samples made with the same settings is gone on with
    model: str  # a Hugging Face folder, or a save of sparrow_grpo
    adapter: str | None = None  # a folder of peft, merged into the weights
    warmup: str | None = None  # config of sparrow_sft that makes `model` where it does not exist yet
    seed: int = 0  # that of a benchmark follows from it and from the benchmark's name
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights
    threads: int | None = None

    data_dir: str | None = None  # for ${data_dir} in the paths of benchmarks
    benchmarks: list[Benchmark]
    only: list[str] | None = None  # names of the benchmarks to run; all by default
    mode: Literal["dense", "sparse", "both"] = "dense"  # what the rollouts read of the KV cache
    kv_cache: Component | None = None  # of the sparse rollouts
    sampling: SamplingParams = field(default_factory=SamplingParams)
    enable_thinking: bool | None = None
    engine: EngineConfig
    prompts_per_window: int = 64  # samples are written, and gone on from, in windows of about so many prompts

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("dense", "sparse") if self.mode == "both" else (self.mode,)

    @property
    def filled(self) -> list[Benchmark]:
        """All benchmarks, with nothing left to inherit."""
        return [
            replace(
                benchmark,
                sampling=benchmark.sampling or self.sampling,
                enable_thinking=self.enable_thinking
                if benchmark.enable_thinking is None
                else benchmark.enable_thinking,
                max_new_tokens=benchmark.max_new_tokens or self.engine.max_new_tokens,
            )
            for benchmark in self.benchmarks
        ]

    @property
    def chosen(self) -> list[Benchmark]:
        """The benchmarks to run."""
        return [benchmark for benchmark in self.filled if self.only is None or benchmark.name in self.only]

    def seed_of(self, benchmark: Benchmark) -> int:
        """Another one for each benchmark, however they are ordered; the same for dense and sparse."""
        return self.seed * 2**32 + crc32(benchmark.name.encode())


def check(cfg: EvalConfig) -> None:
    """What no single component can see."""
    names = [benchmark.name for benchmark in cfg.benchmarks]
    if not names:
        raise UserError("benchmarks: there are none")
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"benchmarks: two are called {sorted(twice)[0]!r}; names must differ")
    for name in names:
        if not name or name != name.strip(".") or not all(c.isalnum() or c in "._+-" for c in name):
            raise UserError(
                f"benchmarks: name {name!r} must be of letters, digits, '.', '_', '+' and '-', for a folder"
            )
    _check_only(cfg, names)
    for benchmark in cfg.benchmarks:
        for key in ("prompts", "num_samples", "max_new_tokens"):
            value = getattr(benchmark, key)
            if value is not None and value < 1:
                raise UserError(f"benchmark {benchmark.name}: {key}: {value} must be at least 1")
        sampling = benchmark.sampling or cfg.sampling
        if sampling.temperature == 0 and benchmark.num_samples > 1:
            raise UserError(
                f"benchmark {benchmark.name}: num_samples {benchmark.num_samples}: at temperature 0 all are the same"
            )
    if cfg.prompts_per_window < 1:
        raise UserError(f"prompts_per_window: {cfg.prompts_per_window} must be at least 1")
    if "sparse" in cfg.modes and (cfg.kv_cache is None or "budget" not in cfg.kv_cache.kwargs):
        raise UserError(f"mode: {cfg.mode} needs a kv_cache with a budget, as that of the run to be evaluated")


def _check_only(cfg: EvalConfig, names: list[str]) -> None:
    for name in cfg.only or []:
        if name not in names:
            raise UserError(f"only: no benchmark {name!r}{did_you_mean(name, names) or f', there are {names}'}")
    if cfg.only == []:
        raise UserError(f"only: [] leaves no benchmark of {', '.join(names)}")


def windows(prompts: int, size: int) -> list[range]:
    """As few windows of at most `size` prompts as there can be, of nearly equal sizes."""
    count = -(-prompts // size)
    starts = [prompts * i // count for i in range(count + 1)]
    return [range(first, last) for first, last in pairwise(starts)]


def check_windows(name: str, prompts: int, size: int) -> None:
    """UserError where a window has no prompt for one of the processes."""
    smallest = min(map(len, windows(prompts, size)))
    if smallest < distributed.world_size():
        raise UserError(
            f"benchmark {name}: of {prompts} prompts with prompts_per_window {size} there are {smallest} in a window, "
            f"fewer than the {distributed.world_size()} processes"
        )
