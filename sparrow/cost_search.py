"""The cheapest budget schedule that keeps the acceptance tail above tau, from a calibration surface.

A surface holds, for one page size, the P5 that was measured at each budget in each bin of cached lengths. Budgets may
not fall with length; of all such paths through cells that hold tau, a dynamic programme takes the one of least cost.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparrow.errors import UserError

COLUMNS = ("page_size", "bin_start", "budget_pages", "p5", "p5_low", "p5_high", "tokens")
Bound = Literal["p5", "p5_low"]


@dataclass(frozen=True)
class Cell:
    """P5 with the bounds of its confidence interval, and the tokens it rests on."""

    p5: float
    p5_low: float
    p5_high: float
    tokens: int


@dataclass(frozen=True)
class Surface:
    """Cells by (first cached length of the bin, budget in pages)."""

    page_size: int
    cells: dict[tuple[int, int], Cell]

    @property
    def budgets(self) -> list[int]:
        return sorted({budget for _, budget in self.cells})

    @property
    def start(self) -> int:
        """First cached length of the first bin that was measured; before it there are only prompts."""
        return min(start for start, _ in self.cells)

    @property
    def end(self) -> int:
        """First cached length of the last bin that was measured."""
        return max(start for start, _ in self.cells)


@dataclass(frozen=True)
class Criterion:
    """When a cell holds.

    Attributes:
        tau: what P5 has to reach.
        bound: the column that has to reach it.
        min_tokens: a cell that rests on fewer is not used.
        bin_width: cached tokens per bin.
    """

    tau: float
    bound: Bound = "p5_low"
    min_tokens: int = 1000
    bin_width: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.tau <= 1:
            raise UserError(f"tau: {self.tau} must be above 0 and at most 1")
        if self.min_tokens < 1 or self.bin_width < 1:
            raise UserError(f"min_tokens {self.min_tokens} and bin_width {self.bin_width} must be at least 1")

    def holds(self, surface: Surface, start: int, budget: int) -> bool:
        """A bin whose longest sequence fits into the budget is dense, whatever was measured."""
        if budget * surface.page_size >= start + self.bin_width - 1:
            return True
        cell = surface.cells.get((start, budget))
        return cell is not None and cell.tokens >= self.min_tokens and getattr(cell, self.bound) >= self.tau


@dataclass(frozen=True)
class Choice:
    """A schedule: total pages for each bin from length 0 to `end`, and what it costs in the unit of `bin_cost`."""

    page_size: int
    pages: list[int]
    end: int
    cost: float


def read_surfaces(paths: Sequence[str]) -> list[Surface]:
    """One surface for each page size in the files, ordered by it; UserError names file, line and column."""
    cells: dict[int, dict[tuple[int, int], Cell]] = defaultdict(dict)
    for path in map(Path, paths):
        if not path.is_file():
            raise UserError(f"{path}: no such calibration surface; sparrow_calibrate writes a surface.csv")
        for line, row in _rows(path):
            page_size, start, budget, cell = _parse(row, f"{path}: line {line}")
            if (start, budget) in cells[page_size]:
                raise UserError(
                    f"{path}: line {line}: page_size {page_size}, bin_start {start}, budget_pages {budget} was there "
                    "before; give the surfaces of one selector and model"
                )
            cells[page_size][start, budget] = cell
    if not cells:
        raise UserError(f"{', '.join(paths)}: no rows")
    return [Surface(size, cells[size]) for size in sorted(cells)]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbers and fields of the lines after the header."""
    data = path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line}: not text in UTF-8: {error.reason}") from None
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
            raise UserError(f"{path}: line 1: column {', '.join(missing)} is missing")
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{path}: line {reader.reader.line_num}: {error}") from None


def _parse(row: dict[str, str], where: str) -> tuple[int, int, int, Cell]:
    if missing := [name for name in COLUMNS if row[name] is None]:
        raise UserError(f"{where}: {', '.join(missing)} is missing; the line is cut off")
    if None in row:
        raise UserError(f"{where}: more fields than the header has columns")
    try:
        page_size, start, budget, tokens = (
            int(row[name]) for name in ("page_size", "bin_start", "budget_pages", "tokens")
        )
        p5, low, high = (float(row[name]) for name in ("p5", "p5_low", "p5_high"))
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if page_size < 1 or start < 0 or budget < 1:
        raise UserError(f"{where}: page_size {page_size}, bin_start {start} and budget_pages {budget} are no sizes")
    if tokens < 0 or not all(0 <= value <= 1 for value in (p5, low, high)):
        raise UserError(
            f"{where}: p5 {p5}, p5_low {low} and p5_high {high} must be from 0 to 1, tokens {tokens} at least 0"
        )
    return page_size, start, budget, Cell(p5, low, high, tokens)


def cheapest_schedule(
    surface: Surface, criterion: Criterion, longest: int, bin_cost: Callable[[int, int, int], float]
) -> Choice:
    """The path of least cost; among equals, the one of smaller budgets.

    Args:
        longest: cached length that has to be covered. Where the surface ends before it, the last entry holds on, and
            is charged for what it holds on for; so is the first one for what comes before the surface.
        bin_cost: cost of the cached lengths from `first` to before `end` with a budget of so many pages.

    Raises:
        UserError: no monotone path holds, with the first bin where none is left and the best that was measured there.
    """
    width = criterion.bin_width
    if stray := [start for start, _ in surface.cells if start % width]:
        raise UserError(f"surface of page size {surface.page_size}: bin_start {stray[0]} is no multiple of {width}")
    budgets, starts = surface.budgets, range(surface.start, max(min(longest, surface.end), surface.start) + 1, width)
    costs, came_from = [0.0] * len(budgets), []
    for start in starts:
        first, end = start if start > starts[0] else 0, start + width if start < starts[-1] else longest + 1
        sources = _cheapest_up_to(costs)
        costs = [
            costs[source] + bin_cost(first, end, budget) if criterion.holds(surface, start, budget) else math.inf
            for source, budget in zip(sources, budgets, strict=True)
        ]
        came_from.append(sources)
        if min(costs) == math.inf:
            raise UserError(_nothing_holds(surface, criterion, start))
    last = costs.index(min(costs))
    path = [last]
    for sources in reversed(came_from[1:]):
        path.append(sources[path[-1]])
    pages = [budgets[index] for index in reversed(path)]
    return Choice(surface.page_size, [pages[0]] * (starts[0] // width) + pages, starts[-1] + width, min(costs))


def _cheapest_up_to(costs: Sequence[float]) -> list[int]:
    """For each budget, the index of the cheapest one that is not larger."""
    best, result = 0, []
    for index, cost in enumerate(costs):
        best = index if cost < costs[best] else best
        result.append(best)
    return result


def _nothing_holds(surface: Surface, criterion: Criterion, start: int) -> str:
    measured = [
        (getattr(cell, criterion.bound), budget)
        for (at, budget), cell in surface.cells.items()
        if at == start and cell.tokens >= criterion.min_tokens
    ]
    best = "no cell has that many" if not measured else "the best is {:.3f} with {} pages".format(*max(measured))
    return (
        f"surface of page size {surface.page_size}: from cached length {start} on, no budget that is not below the "
        f"bins' before it has {criterion.bound} >= {criterion.tau} on {criterion.min_tokens} tokens; {best}"
    )
