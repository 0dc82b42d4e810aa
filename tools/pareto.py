"""Which budget reaches a P5, by interpolation on calibration surfaces, and how it compares with a reference's.

A curve is P5 against budget in one bin. Budgets that give no more than a smaller one do not count: what is asked is the
smallest budget that reaches a P5. Between two budgets of the grid P5 is taken as linear in the logarithm of the budget;
beyond the grid there is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparrow.cost_search import Cell, Surface, read_surfaces
from sparrow.errors import UserError

Point = tuple[int, Cell]  # budget in tokens, and what was measured with it
Curve = list[Point]  # by ascending budget


@dataclass(frozen=True)
class Needed:
    """The smallest budget that reaches a P5, in tokens: interpolated, and the first one of the grid."""

    budget: float
    grid_budget: int


@dataclass(frozen=True)
class Ratio:
    """What a label needs for the P5 that the reference reaches at one of its budgets, in tokens and relative to it."""

    reference_budget: int
    p5: float
    budget: float
    grid_budget: int

    @property
    def ratio(self) -> float:
        return self.budget / self.reference_budget

    @property
    def grid_ratio(self) -> float:
        return self.grid_budget / self.reference_budget


def read_labelled(arguments: Sequence[str]) -> dict[str, Surface]:
    """The surfaces of `label=path` arguments.

    Raises:
        UserError: no label, one that stands twice, or a file of several page sizes.
    """
    surfaces: dict[str, Surface] = {}
    for argument in arguments:
        label, equals, path = argument.partition("=")
        if not label or not equals or label in surfaces:
            raise UserError(f"--surface {argument}: must be label=path, each label once")
        found = read_surfaces([path])
        if len(found) > 1:
            sizes = ", ".join(str(surface.page_size) for surface in found)
            raise UserError(f"--surface {argument}: page sizes {sizes} in one file; give each a label of its own")
        surfaces[label] = found[0]
    return surfaces


def curves(surface: Surface, min_tokens: int) -> dict[int, Curve]:
    """By the bin's first cached length; cells of fewer tokens are left out, and bins of fewer than two cells."""
    by_bin: dict[int, Curve] = {}
    for (start, pages), cell in sorted(surface.cells.items()):
        if cell.tokens >= min_tokens:
            by_bin.setdefault(start, []).append((pages * surface.page_size, cell))
    return {start: curve for start, curve in by_bin.items() if len(curve) > 1}


def budget_for(curve: Curve, p5: float) -> Needed | None:
    """None where the smallest budget already gives more than that, or the largest less."""
    at = next((index for index, (_, cell) in enumerate(curve) if cell.p5 >= p5), None)
    if at is None or (at == 0 and curve[0][1].p5 > p5):
        return None
    budget, cell = curve[at]
    if cell.p5 == p5:
        return Needed(float(budget), budget)
    before, cell_before = curve[at - 1]
    share = (p5 - cell_before.p5) / (cell.p5 - cell_before.p5)
    return Needed(before * (budget / before) ** share, budget)


def ratios(curve: Curve, reference: Curve) -> list[Ratio]:
    """One for each budget of the reference that reaches more than its smaller ones, where the curve covers that P5."""
    found, best = [], -math.inf
    for budget, cell in reference:
        if cell.p5 <= best:
            continue
        best = cell.p5
        needed = budget_for(curve, best)
        if needed is not None:
            found.append(Ratio(budget, best, needed.budget, needed.grid_budget))
    return found


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of no values."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def choose_bins(by_label: Mapping[str, Mapping[int, Curve]], wanted: Sequence[int] | None) -> list[int]:
    """The bins that are wanted, or the last one that every label has; UserError where a label has none of it."""
    shared = sorted(set.intersection(*(set(found) for found in by_label.values())))
    missing = [start for start in wanted or () if start not in shared]
    if missing or not shared:
        each = "; ".join(f"{label}: {', '.join(map(str, found)) or 'none'}" for label, found in by_label.items())
        asked = f"bin {missing[0]} is not" if missing else "no bin is"
        raise UserError(f"--bins: {asked} in every surface with two budgets of enough tokens ({each})")
    return sorted(set(wanted or shared[-1:]))
