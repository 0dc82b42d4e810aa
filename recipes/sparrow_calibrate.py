"""Calibration of a budget schedule: the acceptance tail by length and budget, and the smallest budgets above tau.

    tune run sparrow_calibrate --config tiny_calibrate

prompts -> trajectories -> acceptance rates under each budget -> P5 per bin with bootstrap bounds -> smallest budgets,
never falling with length, whose lower bound reaches tau -> schedule.yaml, surface.csv, pictures.

Budgets that are measured already are not measured again: run the same command to go on, or with other `budgets`, tau,
bins or limits to choose anew from what is there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from sparrow.components.acceptance import AcceptanceTail
from sparrow.components.data import PromptData
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.config import Component
from sparrow.errors import Interrupted, UserError
from sparrow.launch import check_stop, run_recipe
from sparrow.models.checkpoint import load_decoder
from sparrow.models.tokenizer import Tokenizer
from sparrow.protocols import KVCache
from sparrow.recipes.calibrate_config import (
    CalibrateConfig,
    Mode,
    check,
    check_estimator,
    fixed_budget,
    measured_with,
    with_budget,
)
from sparrow.recipes.calibrate_measure import (
    Sampler,
    Scorer,
    Trajectories,
    decoded_positions,
    joined_trajectories,
    share_of,
)
from sparrow.recipes.calibrate_picture import draw_path, draw_surface
from sparrow.recipes.calibrate_report import agreement_line, held_out_table, progress_line, schedule_table
from sparrow.recipes.calibrate_results import Results, write_csv, write_surface
from sparrow.recipes.calibrate_schedule import schedule_of, write_schedule
from sparrow.recipes.calibrate_surface import Cell, Measured, agreement, bins_of, cells_of, choose, refuse_small_cells
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.device import resolve_device


class SparrowCalibrate:
    """Finds the budget schedule of a model (arXiv 2606.08446, dynamic budget schedule)."""

    def __init__(self, cfg: CalibrateConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)

    # Setup

    def setup(self) -> None:
        """Cheap checks first, every budget's cache among them, then the model."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.device = resolve_device(cfg.device, cfg.threads)
        self.acceptance: AcceptanceTail = cfg.acceptance.build()
        check_estimator(self.acceptance)
        self.data: PromptData = cfg.data.build()
        wanted = cfg.prompts + cfg.held_out_prompts
        if self.data.size is not None and self.data.size < wanted:
            raise UserError(f"prompts: {wanted} with the held-out ones, the data has {self.data.size}")
        self.caches = {budget: self._cache(fixed_budget(budget)) for budget in cfg.budgets}
        self.page_size = self.caches[cfg.budgets[0]].page_size
        self.results = Results(self.output_dir / "measured", measured_with(cfg))
        if cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        self.model = load_decoder(Path(cfg.model), self.device, getattr(torch, cfg.dtype))
        self.tokenizer = Tokenizer(Path(cfg.model))
        self.sampler = Sampler(cfg, self.data, self.model, self.tokenizer, self.acceptance.top_k)
        self.scorer = Scorer(cfg, self.model, self.acceptance, self.device)
        if distributed.rank() == 0:
            self.results.start()

    def _cache(self, budget: Component) -> SparseKVCache:
        cache: SparseKVCache = with_budget(self.cfg.kv_cache, budget).build()
        return cache

    # The sweep

    def train(self) -> None:
        """Measures what is missing, then chooses."""
        try:
            for mode in self.cfg.modes:
                self._sweep(mode)
        except Interrupted:
            raise Interrupted("stopped; the same command goes on with the budgets that are missing") from None
        self._choose()
        if self.cfg.held_out_prompts:
            self._held_out()

    def _sweep(self, mode: Mode) -> None:
        """One file for each budget that has none yet."""
        missing = [budget for budget in self.cfg.budgets if not self.results.has(mode, budget)]
        missing = distributed.gather_objects(missing)[0]
        if not missing:
            return
        measure = self._generated if mode == "generate" else self._rescored()
        started = time.perf_counter()
        for done, budget in enumerate(missing, start=1):
            check_stop()
            measured = measure(self.caches[budget])
            if distributed.rank() == 0:
                self.results.save(mode, budget, measured)
                seconds = time.perf_counter() - started
                line = progress_line(measured, self.acceptance.bin_width, self.acceptance.estimator)
                eta = f"{seconds:.0f}s, eta {seconds / done * (len(missing) - done):.0f}s"
                print(f"{mode}  {done}/{len(missing)}  budget {budget}  {line}  {eta}", flush=True)
        distributed.barrier()

    def _generated(self, cache: KVCache) -> Measured:
        return self.scorer.generated(self.sampler.sample(cache, range(self.cfg.prompts), keep_hidden=True))

    def _rescored(self) -> Callable[[KVCache], Measured]:
        """Re-scores one set of dense trajectories, whose dense side is computed once for all budgets."""
        batch = self._share(self._trajectories())
        dense = [self.scorer.dense_hidden(micro) for micro in self.scorer.pack(batch)]
        return lambda cache: self.scorer.rescored(batch, cache, dense)

    def _share(self, trajectories: Trajectories) -> RolloutBatch:
        return share_of(trajectories, self.cfg.num_samples, distributed.rank(), distributed.world_size())

    def _trajectories(self) -> Trajectories:
        """The saved ones, so that all budgets see the same tokens, also those of a later run."""
        if distributed.gather_objects(self.results.load_trajectories() is None)[0]:
            whole = self._sampled_dense(range(self.cfg.prompts))
            if distributed.rank() == 0:
                self.results.save_trajectories(whole)
            distributed.barrier()
        trajectories = self.results.load_trajectories()
        assert trajectories is not None
        # Each budget will have these cells: too few tokens in one shows before the sweep takes its time.
        self._refuse_small(self._cells({self.cfg.budgets[0]: decoded_positions(trajectories)}))
        return trajectories

    def _sampled_dense(self, prompts: range) -> Trajectories:
        """Over all ranks."""
        started = time.perf_counter()
        some = self.caches[self.cfg.budgets[0]]
        batch = self.sampler.sample(DenseKVCache(some.page_size, some.block_size), prompts, keep_hidden=False)
        mine = Trajectories(batch.prompts, batch.lengths_S, batch.tokens_T)
        whole = joined_trajectories(distributed.gather_objects(mine), self.cfg.num_samples)
        if distributed.rank() == 0:
            figures = f"{len(whole.prompts)} sequences, {len(whole.tokens_T):,} tokens"
            print(f"dense trajectories  {figures}  {time.perf_counter() - started:.0f}s", flush=True)
        return whole

    # The choice: all ranks read the same files and take the same path, one of them writes

    def _choose(self) -> None:
        """The schedule, and all that is to be seen of how it came about."""
        primary, *others = self.cfg.modes
        surfaces = {mode: self._surface(mode) for mode in self.cfg.modes}
        for mode in self.cfg.modes:
            self._refuse_small(surfaces[mode])
        chosen = choose(surfaces[primary], self.acceptance.tau)
        if distributed.rank() == 0:
            self._write_schedule(chosen, primary)
            for mode in others:
                self._report_agreement(surfaces[primary], surfaces[mode], chosen)
        distributed.barrier()

    def _surface(self, mode: Mode) -> list[Cell]:
        """All cells of a mode, written and drawn before anything can be refused."""
        cells = self._cells({budget: self.results.load(mode, budget) for budget in self.cfg.budgets})
        if distributed.rank() == 0:
            suffix = "" if mode == self.cfg.modes[0] else f"_{mode}"
            write_surface(self.output_dir / f"surface{suffix}.csv", cells, self.page_size)
            title = f"{Path(self.cfg.model).name}, pages of {self.page_size}, {self.acceptance.estimator_name}, {mode}"
            picture = self.output_dir / f"p5_by_position{suffix}.png"
            draw_surface(picture, cells, self.acceptance.bin_width, self.acceptance.tau, title)
        return cells

    def _cells(self, measured: Mapping[int, Measured]) -> list[Cell]:
        cfg = self.cfg
        lengths = [tokens.cached_length_N for tokens in measured.values()]
        bins = bins_of(lengths, self.acceptance.bin_width, cfg.from_length, cfg.until_length)
        return [
            cell
            for budget, tokens in measured.items()
            for cell in cells_of(tokens, budget, bins, cfg.confidence, cfg.resamples, cfg.seed)
        ]

    def _refuse_small(self, cells: Sequence[Cell]) -> None:
        refuse_small_cells(cells, self.cfg.min_tokens, self.cfg.min_sequences)

    def _write_schedule(self, chosen: Sequence[Cell], mode: Mode) -> None:
        """Writes it, and reads it back as a run will: by StepSchedule, whose check must find no difference."""
        cfg, acceptance, file = self.cfg, self.acceptance, self.output_dir / "schedule.yaml"
        pattern = self.caches[cfg.budgets[0]].pattern
        write_schedule(file, schedule_of(chosen, mode, cfg, acceptance, pattern))
        cache = self._scheduled()
        differences = cache.check(cfg.model, cfg.sampling.temperature, acceptance.estimator_name)
        assert not differences, differences
        title = f"smallest budgets with P5 >= {acceptance.tau:g}, lower bound at {cfg.confidence:.0%}"
        layers = self.model.config.num_layers
        draw_path(self.output_dir / "path.png", chosen, cache, acceptance.bin_width, layers, title)
        print("\n".join(["", *schedule_table(chosen, self.page_size), f"schedule  {file}"]), flush=True)

    def _scheduled(self) -> SparseKVCache:
        """The cache with the schedule that was written."""
        arguments = {"path": str(self.output_dir / "schedule.yaml")}
        return self._cache(Component("sparrow.components.budget.StepSchedule", arguments, "schedule"))

    def _report_agreement(self, cells: Sequence[Cell], others: Sequence[Cell], chosen: Sequence[Cell]) -> None:
        differences = agreement(cells, others)
        rows = [(start, budget, f"{value:.5f}") for (start, budget), value in differences.items()]
        write_csv(self.output_dir / "agreement.csv", ("bin_start", "budget_pages", "difference"), rows)
        print(agreement_line(differences, chosen, choose(others, self.acceptance.tau, strict=False)), flush=True)

    # Held-out prompts

    def _held_out(self) -> None:
        """The chosen schedule on prompts that had no part in choosing it, in the mode that it was chosen in."""
        cfg, cache = self.cfg, self._scheduled()
        prompts = range(cfg.prompts, cfg.prompts + cfg.held_out_prompts)
        if cfg.modes[0] == "generate":
            measured = self.scorer.generated(self.sampler.sample(cache, prompts, keep_hidden=True))
        else:
            batch = self._share(self._sampled_dense(prompts))
            measured = self.scorer.rescored(batch, cache)
        cells = [
            replace(cell, budget=int(cache.pattern.budget.pages(torch.tensor(cell.bin_start))))
            for cell in self._cells({0: measured})
        ]
        if distributed.rank() == 0:
            write_surface(self.output_dir / "held_out.csv", cells, self.page_size)
            print("\n".join(held_out_table(cells, self.acceptance.tau, cfg.min_tokens)), flush=True)

    def cleanup(self) -> None:
        """Nothing is held."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowCalibrate, CalibrateConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
