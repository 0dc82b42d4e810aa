"""The keys of a sparrow_cost config; docs/cost.md explains them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import torch

from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.config import Component
from sparrow.cost import CacheShape, Work
from sparrow.cost_search import Criterion
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig, read_config
from sparrow.protocols import KVCache
from sparrow.rates import Rates


@dataclass(kw_only=True)
class Shape:
    """A model that needs no checkpoint: how schedules and calibrations call it, and its sizes."""

    name: str
    decoder: DecoderConfig


@dataclass(kw_only=True)
class Workload:
    """Rollouts of log-normal length, clipped; the quantiles of the distribution, in a shuffled order.

    Attributes:
        requests: sequences in all.
        samples: sequences of one prompt, which is prefilled once.
        rows: sequences decoded at once; those that the KV pool has room for.
        prompt: tokens of a prompt.
        median, sigma: of the response length, and of its logarithm; sigma 0 gives all the median.
        shortest, longest: bounds of the response length.
    """

    requests: int = 240
    samples: int = 8
    rows: int
    prompt: int
    median: int
    sigma: float = 0.75
    shortest: int = 1
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.median <= self.longest:
            raise UserError(f"shortest {self.shortest}, median {self.median}, longest {self.longest} must ascend")
        if self.requests < 1 or self.sigma < 0:
            raise UserError(f"requests {self.requests} must be at least 1, sigma {self.sigma} not negative")

    def work(self, seed: int) -> Work:
        """The sequences; the order decides how well rows are filled at the end."""
        shares = [(number + 0.5) / self.requests for number in range(self.requests)]
        normal_S = torch.tensor([NormalDist().inv_cdf(share) for share in shares], dtype=torch.float64)
        lengths_S = (self.median * (self.sigma * normal_S).exp()).round().long().clamp(self.shortest, self.longest)
        order_S = torch.randperm(self.requests, generator=torch.Generator().manual_seed(seed))
        return Work(torch.full_like(lengths_S, self.prompt), lengths_S[order_S], self.rows, self.samples)


@dataclass(kw_only=True)
class NamedCache:
    """A KV cache, by the name that the tables use."""

    name: str
    kv_cache: Component


@dataclass(kw_only=True)
class Measured:
    """A JSON file of tools/bench_rollout.py, mode step or makespan, and the name that it gives the model."""

    path: str
    model: str


@dataclass(kw_only=True)
class Search:
    """Calibration surfaces (surface.csv of sparrow_calibrate), one or more page sizes, and what a schedule must hold.

    Attributes:
        surfaces: CSV files of one model and one selector.
        cache: the entry of `caches` whose selector and dense layers they were measured with.
        criterion: tau, and which cells count.
        allow_foreign: report, not refuse, surfaces of another model or cache, or of which it is not known.
    """

    surfaces: list[str]
    cache: str
    criterion: Criterion
    allow_foreign: bool = False


@dataclass(kw_only=True)
class CostConfig:
    """Every key of a sparrow_cost config."""

    recipe: str = "sparrow_cost"
    output_dir: str
    model: Shape | str  # or a Hugging Face folder, of which only config.json is read
    caches: list[NamedCache]  # the one called `dense` is what the others are compared with
    contexts: list[int] = field(default_factory=lambda: [4096, 8192, 16384, 32768])
    workload: Workload
    rates: Rates | None = None  # measured on this machine where they are not given
    measured: list[Measured] = field(default_factory=list)
    search: Search | None = None
    device: str = "auto"
    seed: int = 0


def named_model(cfg: CostConfig) -> tuple[str, DecoderConfig]:
    """How schedules call the model, and its shape."""
    if isinstance(cfg.model, Shape):
        return cfg.model.name, cfg.model.decoder
    return Path(cfg.model).name, read_config(Path(cfg.model))


def check_lengths(cfg: CostConfig, decoder: DecoderConfig) -> None:
    """UserError where a cached length is one that the engine refuses, so that nobody could ever pay what it costs."""
    longest = decoder.max_position_embeddings
    if max(cfg.contexts) > longest:
        raise UserError(f"contexts: {max(cfg.contexts)} is above max_position_embeddings {longest} of the model")
    work = cfg.workload
    if work.prompt + work.longest > longest:
        raise UserError(
            f"workload: prompt {work.prompt} and longest {work.longest} are above max_position_embeddings {longest} "
            "of the model together"
        )


def cache_shape(cache: KVCache) -> CacheShape:
    """What the cost model needs to know of a KV cache component.

    Raises:
        UserError: a cache of another class, whose reads it cannot know.
    """
    if isinstance(cache, DenseKVCache):
        return CacheShape(page_size=cache.page_size)
    if not isinstance(cache, SparseKVCache):
        raise UserError(f"caches: the cost model knows DenseKVCache and SparseKVCache, not {type(cache).__name__}")
    rule = cache.pattern
    return CacheShape(
        pages=rule.budget.pages,
        page_size=rule.page_size,
        dense_layers=rule.dense_layers,
        landmarks_per_page=rule.selector.landmarks_per_page,
        landmark_size=cache.landmark_size,
        scores_per_head=rule.selector.kernel != "group_mean",
    )


def check(cfg: CostConfig) -> None:
    """What no single node can see."""
    names = [cache.name for cache in cfg.caches]
    if "dense" not in names or len(set(names)) < len(names):
        raise UserError(f"caches: names differ, and one must be called dense; there are {', '.join(names) or 'none'}")
    if not cfg.contexts or min(cfg.contexts) < 1:
        raise UserError(f"contexts: {cfg.contexts} must be cached lengths of at least 1")
    if cfg.search is None:
        return
    if cfg.search.cache not in names:
        raise UserError(f"search.cache: {cfg.search.cache!r} is not one of caches: {', '.join(names)}")
    if cfg.search.cache == "dense":
        raise UserError("search.cache: a dense cache has no budget; name a sparse one")
    if not cfg.search.surfaces:
        raise UserError("search.surfaces: [] names no file; sparrow_calibrate writes a surface.csv")
