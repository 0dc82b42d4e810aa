"""Measures what a calibration lacks, budget by budget; what is measured already is kept, and grown by more prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from sparrow.components.kv_cache import SparseKVCache
from sparrow.errors import UserError
from sparrow.launch import check_stop
from sparrow.protocols import KVCache
from sparrow.recipes.calibrate_config import CalibrateConfig, Mode
from sparrow.recipes.calibrate_measure import Sampler, Scorer, Trajectories, appended, some_of
from sparrow.recipes.calibrate_rates import TokenRates
from sparrow.recipes.calibrate_report import progress_line
from sparrow.recipes.calibrate_results import Results
from sparrow.recipes.calibrate_surface import Measured, bins_of, joined
from sparrow.training import distributed


class Sweep:
    """Fills `results` for every budget of `caches`; all methods are collective.

    Args:
        adapter: as `TokenRates` takes it.
    """

    def __init__(
        self,
        cfg: CalibrateConfig,
        results: Results,
        sampler: Sampler,
        scorer: Scorer,
        caches: Mapping[int, SparseKVCache],
        adapter: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.cfg, self.results, self.scorer, self.caches = cfg, results, scorer, caches
        self.rates = TokenRates(cfg.num_samples, sampler, scorer, adapter)

    def missing(self, mode: Mode) -> dict[int, list[int]]:
        """The budgets that have not seen all prompts, by the first prompt that they lack."""
        budgets: dict[int, list[int]] = {}
        for budget in self.caches:
            if (first := self.results.prompts(mode, budget)) < self.cfg.prompts:
                budgets.setdefault(first, []).append(budget)
        return distributed.gather_objects(budgets)[0]

    def measure(self, mode: Mode, missing: Mapping[int, list[int]]) -> None:
        """One file for each of the missing budgets, whole at every moment."""
        done, started = 0, time.perf_counter()
        total = sum(map(len, missing.values()))
        for first, budgets in missing.items():
            measure = self._measure(mode, self._prompts_from(first))
            for budget in budgets:
                check_stop()
                measured = measure(self.caches[budget])
                if distributed.rank() == 0:
                    done += 1
                    seconds = time.perf_counter() - started
                    line = self._keep(mode, budget, first, measured)
                    eta = f"{seconds:.0f}s, eta {seconds / done * (total - done):.0f}s"
                    print(f"{mode}  {done}/{total}  budget {budget}  {line}  {eta}", flush=True)
        distributed.barrier()

    def _keep(self, mode: Mode, budget: int, first: int, measured: Measured) -> str:
        """Saves the tokens of the prompts from `first` on, with those that there were before; says what they show."""
        measured = replace(measured, sequence_N=measured.sequence_N + first * self.cfg.num_samples)
        if first:
            measured = joined([self.results.load(mode, budget), measured])
        self.results.save(mode, budget, self.cfg.prompts, measured)
        acceptance, limits = self.scorer.acceptance, (self.cfg.from_length, self.cfg.until_length)
        bins = bins_of([measured.cached_length_N], acceptance.bin_width, *limits)
        return progress_line(measured, bins, acceptance.estimator)

    def _prompts_from(self, first: int) -> range:
        prompts = range(first, self.cfg.prompts)
        if 0 < len(prompts) < distributed.world_size():
            raise UserError(
                f"prompts: {first} are measured, and the {len(prompts)} after them are fewer than the "
                f"{distributed.world_size()} processes: use more prompts or fewer processes"
            )
        return prompts

    def _measure(self, mode: Mode, prompts: range) -> Callable[[KVCache], Measured]:
        """For `teacher_forced` the dense side is computed once for all budgets."""
        if mode == "generate":
            return lambda cache: self.rates.generated(cache, prompts)
        n = self.cfg.num_samples
        return self.rates.rescoring(some_of(self.trajectories(), prompts.start * n, prompts.stop * n))

    def unseen(self, mode: Mode, cache: SparseKVCache, prompts: range) -> Measured:
        """The tokens of prompts that are kept nowhere, under one cache."""
        if mode == "generate":
            return self.rates.generated(cache, prompts)
        return self.rates.rescoring(self.rates.dense_trajectories(cache, prompts))(cache)

    def trajectories(self) -> Trajectories:
        """The saved ones, so that all budgets see the same tokens, also those of a later run; sampled where missing."""
        saved = self.results.load_trajectories()
        first = distributed.gather_objects(len(saved.prompts) // self.cfg.num_samples)[0]
        if prompts := self._prompts_from(first):
            more = self.rates.dense_trajectories(next(iter(self.caches.values())), prompts)
            if distributed.rank() == 0:
                self.results.save_trajectories(appended(saved, more))
            distributed.barrier()
            saved = self.results.load_trajectories()
        return some_of(saved, 0, self.cfg.prompts * self.cfg.num_samples)
