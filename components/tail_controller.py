"""The closed loop: budgets that follow the tail they lead to, bin by bin, from one step of the run to the next.

A bin goes up as soon as the *upper* confidence bound of its P5 is below tau: on evidence. By the lower bound, a bin
with few tokens, whose interval is wide, would rise to the top whatever its tail is. Evidence adds up from step to step,
so that a lasting deficit is found however small a step is; what stays is less than the interval of a whole window.

A bin goes down one grid step when the *lower* bound of a whole window says that there is room. What the step below is
worth is not known before it was tried, so each bin may try once. Where that fails, the bin goes up again and remembers
by what factor the loss 1 - P5 is larger there; the next try waits until the tail, so scaled, would hold. A tail that
stands still is therefore tried once and then left alone, and one that improves is followed.

Axes: T tokens of this rank, N bins, H cells of the histogram of alpha, L grid steps.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from sparrow.components.acceptance import TAIL
from sparrow.components.budget import StepSchedule, StepTable, check_reserved
from sparrow.components.schedule_file import check_whole
from sparrow.errors import UserError
from sparrow.protocols import RunSettings
from sparrow.training.quantiles import UNIT_EDGES, Histogram, Ordered, cell_counts, quantile

# What the paper's calibration sweeps.
GRID = [32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024]
LEAST_LOSS = 1e-3  # below it a ratio of losses is noise
# The loss 1 - P5 of SmolLM2-135M falls as budget^-.5 (16 to 32 pages) to budget^-1.3 (64 to 128) from 3,072 cached
# tokens on, by the table in docs/tail.md.
STEEPEST = 2.0


class TailController:
    """A budget schedule that is moved by `observe` after each step.

    Args:
        start: the schedule to begin with; its bins are those that move, each entry rounded up to the grid, none outside
            its bounds.
        grid: budgets in total pages, rising; None for those of the paper's calibration, from 32 pages on.
        least, most: bounds within the grid; None for its ends.
        margin: how far above tau the lower bound of P5 has to be before a bin tries a step that it has never left.
        patience: steps that saw tokens of a bin which make up a window, at least.
        min_tokens: tokens in a bin that a decision needs; they add up over steps.
        confidence: of the two-sided interval of P5.
        correlated_tokens: tokens that count as one independent draw, because neighbours in a sequence are alike; 1
            takes every token for one, which makes the interval too narrow.

    Raises:
        UserError: a number out of range, a grid that does not rise, an entry of `start` below or above it.
    """

    def __init__(
        self,
        start: StepSchedule,
        grid: list[int] | None = None,
        least: int | None = None,
        most: int | None = None,
        margin: float = 0.005,
        patience: int = 5,
        min_tokens: int = 4000,
        confidence: float = 0.99,
        correlated_tokens: int = 8,
    ) -> None:
        counts = {"patience": patience, "min_tokens": min_tokens, "correlated_tokens": correlated_tokens}
        check_evidence("TailController", margin, confidence, counts)
        self.start, self.grid_L = start, _bounded(GRID if grid is None else grid, least, most)
        self.margin, self.patience, self.min_tokens = margin, patience, min_tokens
        self.confidence, self.correlated_tokens = confidence, correlated_tokens
        # A budget that falls with length is not followed, not even where the start has one.
        self.levels_N = list(accumulate((self._level(n, pages) for n, pages in enumerate(start.entries)), max))
        self.table = StepTable(self._pages(), start.bin_width)
        bins = len(self.levels_N)
        self.window_NH = torch.zeros(bins, len(UNIT_EDGES) - 1, dtype=torch.int64)
        self.steps_N = [0] * bins
        self.failed_p5_N = [math.nan] * bins  # P5 of the step below, for a bin that has just left it
        # Loss of a grid step over that of the next one, NaN until it failed.
        self.loss_ratio_NL = [[math.nan] * len(self.grid_L) for _ in range(bins)]

    @property
    def max_pages(self) -> int:
        """The top of the grid: page lists in captured graphs have to hold what the budget may become."""
        return self.grid_L[-1]

    def max_pages_until(self, length: int) -> int:
        """The same at any length."""
        return self.max_pages

    def pages(self, cached_length: Tensor) -> Tensor:
        """The present budget for each cached length (any shape), int64, on its device."""
        return self.table.pages(cached_length)

    def check(self, run: RunSettings) -> list[str]:
        """Differences of the schedule it starts from; see `StepSchedule.check`."""
        check_reserved(self.grid_L, run, "TailController.grid")
        return self.start.check(run)

    def observe(self, alpha_T: Tensor, cached_length_T: Tensor, tau: float) -> dict[str, float]:
        """Moves the budget; call it once nothing of the step needs the old one any more. Collective.

        Args:
            alpha_T: acceptance rates of this rank's tokens, on the CPU; non-finite ones are left out.
            cached_length_T: where they were sampled.
            tau: the P5 to hold, by the estimator that alpha comes from.

        Returns:
            `budget/pages_bin/<first cached length>` that the step was made with, `budget/moves`: bins that changed.
        """
        finite_T = alpha_T.isfinite()
        bin_T = self.table.bins(cached_length_T[finite_T])
        step_NH = cell_counts(alpha_T[finite_T], bin_T, len(self.levels_N), UNIT_EDGES)
        self.window_NH += step_NH
        metrics = {
            f"budget/pages_bin/{n * self.table.bin_width}": float(pages) for n, pages in enumerate(self.table.entries)
        }
        wanted = [self._decide(n, Histogram(counts_H, UNIT_EDGES), tau) for n, counts_H in enumerate(step_NH)]
        return metrics | {"budget/moves": float(self._move(wanted))}

    def state_dict(self) -> dict[str, Any]:
        """Budgets, the windows begun, and what was learnt."""
        return {
            "grid": self.grid_L,
            "bin_width": self.table.bin_width,
            "levels": self.levels_N,
            "window": self.window_NH.clone(),
            "steps": self.steps_N,
            "failed_p5": self.failed_p5_N,
            "loss_ratio": self.loss_ratio_NL,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError where bins or grid are not those of the save."""
        saved = (state["bin_width"], len(state["levels"]), state["grid"])
        ours = (self.table.bin_width, len(self.levels_N), self.grid_L)
        if saved != ours:
            raise UserError(f"resume: the saved TailController has (bin_width, bins, grid) {saved}, this run {ours}")
        self.levels_N, self.steps_N, self.failed_p5_N = (list(state[key]) for key in ("levels", "steps", "failed_p5"))
        self.loss_ratio_NL = [list(ratios) for ratios in state["loss_ratio"]]
        self.window_NH = state["window"].clone()
        self.table.replace(self._pages())

    def _decide(self, n: int, step: Ordered, tau: float) -> int:
        """The grid step that the bin's own tokens ask for."""
        level, window = self.levels_N[n], Histogram(self.window_NH[n], UNIT_EDGES)
        self.steps_N[n] += step.count > 0
        if step.count == 0 or window.count < self.min_tokens:
            return level
        self._learn(n, window)
        low, high = self._interval(window)
        # The step by itself as well: a jump must not hide behind the good steps before it.
        jumped = step.count >= self.min_tokens and self._interval(step)[1] < tau
        if high < tau or jumped:
            p5 = quantile(step if jumped else window, TAIL)
            self._begin_window(n)
            if level + 1 < len(self.grid_L):
                self.failed_p5_N[n] = p5
                return level + 1
            return level
        if self.steps_N[n] < self.patience:
            return level
        self._begin_window(n)
        return level - 1 if level and self._holds(n, level - 1, low, tau) else level

    def _holds(self, n: int, below: int, low: float, tau: float) -> bool:
        """Whether P5 may be expected to hold at the step below, from its lower bound at the present one."""
        ratio = self.loss_ratio_NL[n][below]
        return low >= tau + self.margin if math.isnan(ratio) else 1 - ratio * (1 - low) >= tau

    def _learn(self, n: int, window: Ordered) -> None:
        """What the step below lacks, from the P5 it was left with and the first one above it."""
        if not math.isnan(self.failed_p5_N[n]):
            below = self.levels_N[n] - 1
            ratio = (1 - self.failed_p5_N[n]) / max(1 - quantile(window, TAIL), LEAST_LOSS)
            # Between the two measurements the tail itself may have moved; that must not bar the step for good.
            most = (self.grid_L[below + 1] / self.grid_L[below]) ** STEEPEST
            self.loss_ratio_NL[n][below] = min(max(ratio, 1.0), most)
            self.failed_p5_N[n] = math.nan

    def _move(self, wanted_N: list[int]) -> int:
        """Puts new grid steps in force, none below that of the bin before; returns how many bins have changed."""
        levels_N = list(accumulate(wanted_N, max))
        moved = [n for n, level in enumerate(levels_N) if level != self.levels_N[n]]
        for n in moved:
            self._begin_window(n)
            if levels_N[n] != wanted_N[n]:
                self.failed_p5_N[n] = math.nan  # carried by the bins before it, past the step to compare with
        self.levels_N = levels_N
        self.table.replace(self._pages())
        return len(moved)

    def _begin_window(self, n: int) -> None:
        self.window_NH[n] = 0
        self.steps_N[n] = 0

    def _interval(self, values: Ordered) -> tuple[float, float]:
        return quantile_interval(values, TAIL, self.confidence, max(values.count // self.correlated_tokens, 1))

    def _pages(self) -> list[int]:
        return [self.grid_L[level] for level in self.levels_N]

    def _level(self, n: int, pages: int) -> int:
        """The lowest grid step of at least so many pages, for a bin's first budget."""
        if not self.grid_L[0] <= pages <= self.grid_L[-1]:
            raise UserError(
                f"TailController: start.pages[{n}] is {pages}, outside the budgets {self.grid_L[0]} to "
                f"{self.grid_L[-1]} of the grid (grid, least, most)"
            )
        return next(level for level, budget in enumerate(self.grid_L) if budget >= pages)


def check_evidence(who: str, margin: float, confidence: float, counts: dict[str, int]) -> None:
    """UserError where what a budget that follows the tail takes for evidence is out of range."""
    for key, value in counts.items():
        check_whole(key, value, who)
    if not 0 <= margin < 1 or not 0 < confidence < 1:
        raise UserError(f"{who}: margin {margin} and confidence {confidence} must be between 0 and 1")


def quantile_interval(values: Ordered, level: float, confidence: float, draws: int) -> tuple[float, float]:
    """Two-sided confidence interval of a quantile between order statistics, whatever the distribution in [0, 1].

    Of `draws` independent values a binomial number lies below the true quantile. The ranks that this allows are taken
    as shares of all values; a bound that the draws are too few for is 0 or 1.
    """
    tail = (1 - confidence) / 2
    # No more ranks than can matter: 12 standard deviations, and some for small numbers.
    ranks = min(draws, math.ceil(draws * level + 12 * math.sqrt(draws * level) + 12))
    k = torch.arange(ranks + 1, dtype=torch.float64)
    size = torch.tensor(float(draws), dtype=torch.float64)
    log_choices_k = torch.lgamma(size + 1) - torch.lgamma(k + 1) - torch.lgamma(size - k + 1)
    cumulative_k = (log_choices_k + k * math.log(level) + (size - k) * math.log1p(-level)).exp().cumsum(0)
    low = int(torch.searchsorted(cumulative_k, tail, right=True)) - 1  # P(at most `low` below) <= tail
    high = int(torch.searchsorted(cumulative_k, 1 - tail))  # P(more than `high` below) <= tail
    return (
        quantile(values, low / max(draws - 1, 1)) if low >= 0 else 0.0,
        quantile(values, high / max(draws - 1, 1)) if high < draws else 1.0,
    )


def _bounded(grid: list[int], least: int | None, most: int | None) -> list[int]:
    for pages in grid:
        check_whole("grid", pages, "TailController")
    for entry, (before, pages) in enumerate(pairwise(grid), start=1):
        if pages <= before:
            raise UserError(f"TailController: grid[{entry}] is {pages}, not above the {before} before it")
    for key, bound in (("least", least), ("most", most)):
        if bound is not None:
            check_whole(key, bound, "TailController")
    bounded = [p for p in grid if (least is None or p >= least) and (most is None or p <= most)]
    if not bounded:
        raise UserError(f"TailController: no budget of the grid {grid} lies within least {least} and most {most}")
    return bounded
