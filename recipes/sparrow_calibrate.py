"""Calibration of a budget schedule: the acceptance tail by length and budget, and the smallest budgets above tau.

    tune run sparrow_calibrate --config tiny_calibrate

prompts -> trajectories -> acceptance rates under each budget -> P5 per bin with bootstrap bounds -> smallest budgets,
never falling with length, whose lower bound reaches tau -> schedule.yaml, surface.csv, pictures.

What is measured already is not measured again: run the same command to go on, with more `prompts` to measure those that
are new, or with other `budgets`, tau, bins or limits to choose anew from what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from sparrow.components.acceptance import AcceptanceTail
from sparrow.components.budget import UNBOUNDED
from sparrow.components.data import PromptData
from sparrow.components.kv_cache import SparseKVCache, check_runs
from sparrow.config import Component
from sparrow.errors import Interrupted, UserError
from sparrow.launch import run_recipe
from sparrow.models.adapted import adapters_on
from sparrow.models.checkpoint import load_decoder
from sparrow.models.decoder_config import read_config
from sparrow.models.merge import attach_adapter
from sparrow.models.tokenizer import tokenizer_of_model
from sparrow.recipes.calibrate_config import (
    CalibrateConfig,
    Mode,
    check,
    check_estimator,
    check_model,
    check_reserved,
    fixed_budget,
    settings,
    with_budget,
)
from sparrow.recipes.calibrate_measure import Sampler, Scorer, decoded_positions
from sparrow.recipes.calibrate_picture import draw_path, draw_surface
from sparrow.recipes.calibrate_report import agreement_line, held_out_table, schedule_table
from sparrow.recipes.calibrate_results import Results, remove_chosen, write_surface
from sparrow.recipes.calibrate_schedule import schedule_of, write_schedule
from sparrow.recipes.calibrate_surface import (
    Cell,
    Measured,
    agreement,
    bins_of,
    by_response,
    cells_of,
    choose,
    first_sequences,
    refuse_small_cells,
)
from sparrow.recipes.calibrate_sweep import Sweep
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.whole_files import write_csv


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
        self.cache = self._cache(fixed_budget(UNBOUNDED))  # for all that does not depend on the budget
        check_reserved(cfg.budgets, self.cache.pattern)
        if cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        self._check_against_model()
        results = Results(self.output_dir / "measured", settings(cfg))
        tokenizer = tokenizer_of_model(cfg.model)
        self.model = load_decoder(Path(cfg.model), self.device, getattr(torch, cfg.dtype))
        self.sampler = Sampler(cfg, self.data, self.model, tokenizer, self.acceptance.top_k)
        scorer = Scorer(cfg, self.model, self.acceptance, self.device)
        adapter = nullcontext if cfg.adapter is None else self._attached(Path(cfg.adapter))
        caches = {budget: self._cache(fixed_budget(budget)) for budget in cfg.budgets}
        self.results, self.sweep = results, Sweep(cfg, results, self.sampler, scorer, caches, adapter)

    def _attached(self, folder: Path) -> Callable[[], AbstractContextManager[None]]:
        return partial(adapters_on, attach_adapter(self.model, folder))

    def _check_against_model(self) -> None:
        """From its config.json alone."""
        config = read_config(Path(self.cfg.model))
        check_model(config, self.cache.pattern)
        check_runs(self.cache, config, self.device, getattr(torch, self.cfg.engine.dtype or self.cfg.dtype))

    def _cache(self, budget: Component) -> SparseKVCache:
        cache: SparseKVCache = with_budget(self.cfg.kv_cache, budget).build()
        return cache

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
        missing = self.sweep.missing(mode)
        if missing and mode == "teacher_forced":
            # Each budget will have these cells: too few tokens in one shows before the sweep takes its time.
            tokens = decoded_positions(self.sweep.trajectories())
            self._refuse_small(self._cells({self.cfg.budgets[0]: tokens}))
        self.sweep.measure(mode, missing)

    # The choice: all ranks read the same files and take the same path, one of them writes

    def _choose(self) -> None:
        """The schedule, and all that is to be seen of how it came about."""
        primary, *others = self.cfg.modes
        if distributed.rank() == 0:
            remove_chosen(self.output_dir)
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
        cfg, width = self.cfg, self.acceptance.bin_width
        S = cfg.prompts * cfg.num_samples
        measured = {budget: first_sequences(self.results.load(mode, budget), S) for budget in cfg.budgets}
        cells = self._cells(measured)
        if distributed.rank() == 0:
            suffix = "" if mode == cfg.modes[0] else f"_{mode}"
            write_surface(self.output_dir / f"surface{suffix}.csv", cells, self.cache.page_size)
            title = f"{Path(cfg.model).name}, pages of {self.cache.page_size}, {self.acceptance.estimator_name}, {mode}"
            draw_surface(self.output_dir / f"p5_by_position{suffix}.png", cells, width, self.acceptance.tau, title)
            responses = {budget: by_response(tokens, self.prompt_length_S) for budget, tokens in measured.items()}
            bins = bins_of([tokens.cached_length_N for tokens in responses.values()], width, 0, None)
            by_position = self._cells_in(bins, responses)
            write_surface(self.output_dir / f"surface_by_response{suffix}.csv", by_position, self.cache.page_size)
        return cells

    @cached_property
    def prompt_length_S(self) -> Tensor:
        """Tokens of the prompt of each sequence that is measured."""
        lengths = [len(self.sampler.encode(number)) for number in range(self.cfg.prompts)]
        return torch.tensor(lengths).repeat_interleave(self.cfg.num_samples)

    def _cells(self, measured: Mapping[int, Measured]) -> list[Cell]:
        lengths = [tokens.cached_length_N for tokens in measured.values()]
        limits = (self.cfg.from_length, self.cfg.until_length)
        return self._cells_in(bins_of(lengths, self.acceptance.bin_width, *limits), measured)

    def _cells_in(self, bins: range, measured: Mapping[int, Measured]) -> list[Cell]:
        cfg = self.cfg
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
        adapter = self.results.settings["adapter"]  # as it was measured: its folder may have gone since
        run = (cfg.model, cfg.sampling.temperature, acceptance.estimator_name, acceptance.tau, adapter)
        write_schedule(file, schedule_of(chosen, mode, cfg, acceptance.bin_width, self.cache.settings(*run)))
        cache = self._scheduled()
        differences = cache.check(*run)
        assert not differences, differences
        title = f"smallest budgets with P5 >= {acceptance.tau:g}, lower bound at {cfg.confidence:.0%}"
        layers = self.model.config.num_layers
        draw_path(self.output_dir / "path.png", chosen, cache, acceptance.bin_width, layers, title)
        print("\n".join(["", *schedule_table(chosen, self.cache.page_size), f"schedule  {file}"]), flush=True)

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
        measured = self.sweep.unseen(cfg.modes[0], cache, prompts)
        cells = [
            replace(cell, budget=int(cache.pattern.budget.pages(torch.tensor(cell.bin_start))))
            for cell in self._cells({0: measured})
        ]
        if distributed.rank() == 0:
            write_surface(self.output_dir / "held_out.csv", cells, self.cache.page_size)
            print("\n".join(held_out_table(cells, self.acceptance.tau, cfg.min_tokens)), flush=True)

    def cleanup(self) -> None:
        """Nothing is held."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowCalibrate, CalibrateConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
