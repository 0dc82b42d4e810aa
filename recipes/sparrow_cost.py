"""What rollouts cost with each KV cache: FLOPs, bytes, seconds; beside measurements; the cheapest schedule above tau.

    tune run sparrow_cost --config qwen3_4b_cost

Needs neither weights nor a GPU. docs/cost.md has the formulas, and what they leave out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparrow.cost import CacheShape, Cost, rollout_cost, step_cost, token_cost
from sparrow.cost_search import Choice, cheapest_schedule, read_surfaces
from sparrow.errors import UserError
from sparrow.launch import run_recipe
from sparrow.rates import measure_rates
from sparrow.recipes.cost_config import CostConfig, Search, cache_shape, check, check_lengths, named_model
from sparrow.recipes.cost_measured import Comparison, compare, latencies
from sparrow.recipes.cost_provenance import foreign_schedule, foreign_surfaces
from sparrow.recipes.cost_report import comparison_table, draw_costs, rollout_table, search_table, step_table
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.whole_files import write_text


class SparrowCost:
    """The paper's cost model (arXiv 2606.08446), corrected, over a length distribution."""

    def __init__(self, cfg: CostConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)

    def setup(self) -> None:
        """Shapes, lengths, surfaces and the machine's rates; what cannot be used is refused before it is needed."""
        if distributed.world_size() > 1:
            raise UserError("sparrow_cost: one process is enough; leave --nproc_per_node out")
        cfg = self.cfg
        name, self.model = named_model(cfg)
        check_lengths(cfg, self.model)
        built = {cache.name: cache.kv_cache.build() for cache in cfg.caches}
        self.caches = {cache: cache_shape(component) for cache, component in built.items()}
        for cache, component in built.items():
            for difference in foreign_schedule(name, component):
                print(f"schedule of {cache}, foreign but allowed: {difference}", flush=True)
        if cfg.search is not None:
            self.surfaces = read_surfaces(cfg.search.surfaces)
            for difference in foreign_surfaces(cfg.search, name, built[cfg.search.cache]):
                print(f"surface, foreign but allowed: {difference}", flush=True)
        self.work = cfg.workload.work(cfg.seed)
        self._make_output_dir()
        self.rates = measure_rates(resolve_device(cfg.device, None)) if cfg.rates is None else cfg.rates

    def _make_output_dir(self) -> None:
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir: {self.output_dir} cannot be made: {error.strerror}") from None

    def train(self) -> None:
        """The tables on standard output, and the same as cost.json and cost.png."""
        rows, rates = self.cfg.workload.rows, self.rates
        source = "measured here" if self.cfg.rates is None else "given"
        print(f"{rates.flop_per_s / 1e12:.1f} TFLOP/s and {rates.bytes_per_s / 1e9:.0f} GB/s, {source}")
        steps = {context: self._steps(context) for context in self.cfg.contexts}
        rollouts = {name: rollout_cost(self.model, cache, self.work) for name, cache in self.caches.items()}
        comparisons = self._comparisons()
        tables = [step_table(steps, rows, rates), rollout_table(rollouts, rates)]
        if comparisons:
            tables.append(comparison_table(comparisons, latencies(comparisons, rollouts)))
        choices: list[Choice] = []
        if self.cfg.search is not None:
            choices, table = self._search(self.cfg.search)
            tables.append(table)
        print("\n".join("\n".join(["", *table]) for table in tables), flush=True)
        self._write(steps, rollouts, comparisons, choices)
        draw_costs(steps, rates, rows, comparisons, self.output_dir / "cost.png")
        print(f"\npicture  {self.output_dir / 'cost.png'}\nfigures  {self.output_dir / 'cost.json'}", flush=True)

    def _steps(self, context: int) -> dict[str, Cost]:
        rows = self.cfg.workload.rows
        return {name: step_cost(self.model, cache, context, rows) for name, cache in self.caches.items()}

    def _comparisons(self) -> list[Comparison]:
        found = [compare(file, self.model, self.caches, self.rates, self.work) for file in self.cfg.measured]
        return [comparison for comparisons in found for comparison in comparisons]

    def _search(self, search: Search) -> tuple[list[Choice], list[str]]:
        """The cheapest schedule of each page size; UserError where no page size has one."""
        longest = len(self.work.tokens_L()) - 1
        choices, failures = [], []
        for surface in self.surfaces:
            bin_cost = partial(self._bin_seconds, replace(self.caches[search.cache], page_size=surface.page_size))
            try:
                choices.append(cheapest_schedule(surface, search.criterion, longest, bin_cost))
            except UserError as error:
                failures.append(str(error))
        if not choices:
            raise UserError("\n".join(failures))
        dense = self._bin_seconds(self.caches["dense"], 0, longest + 1, None)
        return choices, search_table(choices, failures, dense, longest)

    def _bin_seconds(self, cache: CacheShape, first: int, end: int, budget: int | None) -> float:
        """Of attention and scoring over the workload's tokens of a bin; weights do not depend on the budget."""
        lengths_L = torch.arange(first, end)
        if budget is not None:
            cache = replace(cache, pages=lambda lengths: torch.full_like(lengths, budget))
        return float(self.work.tokens_L()[first:end] @ token_cost(self.model, cache, lengths_L).seconds_L(self.rates))

    def _write(
        self,
        steps: dict[int, dict[str, Cost]],
        rollouts: dict[str, Cost],
        comparisons: Sequence[Comparison],
        choices: Sequence[Choice],
    ) -> None:
        content = {
            "rates": asdict(self.rates) | {"intensity": self.rates.intensity},
            "step": {
                context: {name: self._figures(c) for name, c in costs.items()} for context, costs in steps.items()
            },
            "rollouts": {name: self._figures(cost) for name, cost in rollouts.items()},
            "measured": [asdict(comparison) for comparison in comparisons],
            "schedules": [asdict(choice) for choice in choices],
        }
        write_text(self.output_dir / "cost.json", json.dumps(content, indent=1))

    def _figures(self, cost: Cost) -> dict[str, Any]:
        """The parts of a cost and what they sum to, as plain numbers."""
        parts = {name: value for name, value in vars(cost).items() if name != "steps_R"}
        sums = {"eflop": cost.eflop(self.rates.intensity), "seconds": cost.seconds(self.rates)}
        return parts | sums | {"selection_share": cost.selection_share}

    def cleanup(self) -> None:
        """Nothing is held."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowCost, CostConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
