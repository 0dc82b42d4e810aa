"""A schedule for the first phase and a cheaper one for the second, changed by the measured tail (paper, DistillSparse).

The paper distils under its .86 schedule for 20,000 examples and then takes the .80 one, by hand. Here the cheaper one
is taken when the tail has had room for some steps, and left as soon as the tail falls below tau under it. What it
costs is not known before it was tried, so each failure doubles the time to the next try: a tail that stands still is
tried a handful of times in a run, and one that distilling lifts is found before the run is twice as old.

Axes: T tokens of this rank, N bins, H cells of the histogram of alpha.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparrow.components.acceptance import TAIL
from sparrow.components.budget import StepSchedule, StepTable
from sparrow.components.tail_controller import check_evidence, quantile_interval
from sparrow.errors import UserError
from sparrow.protocols import RunSettings
from sparrow.training.quantiles import UNIT_EDGES, Histogram, cell_counts, quantile


class PhasedBudget:
    """One of two schedules at a time; `observe` changes from one to the other after a step.

    P5 is that of the worst bin among those with enough tokens, its bounds as in `TailController`.

    Args:
        first: the schedule to begin with.
        cheaper: the one to save with; nowhere above `first`.
        margin: how far above tau the lower bound of P5 has to be, in the first phase, before the change.
        patience: steps that it is measured over; one that is itself below begins them anew. After the n-th failure of
            the cheaper schedule they begin patience * (2 ** n - 1) steps later.
        min_tokens: tokens of a bin that a decision needs; they add up over the steps.
        confidence, correlated_tokens: of the interval, see `TailController`.

    Raises:
        UserError: a number out of range, or a second schedule that is no cheaper one.
    """

    def __init__(
        self,
        first: StepSchedule,
        cheaper: StepSchedule,
        margin: float = 0.005,
        patience: int = 10,
        min_tokens: int = 4000,
        confidence: float = 0.99,
        correlated_tokens: int = 8,
    ) -> None:
        counts = {"patience": patience, "min_tokens": min_tokens, "correlated_tokens": correlated_tokens}
        check_evidence("PhasedBudget", margin, confidence, counts)
        self.start, self.schedules = first, (first, cheaper)
        self.margin, self.patience, self.min_tokens = margin, patience, min_tokens
        self.confidence, self.correlated_tokens = confidence, correlated_tokens
        self.entries, bin_width = _common_bins(first, cheaper)
        _check_cheaper(*self.entries, bin_width)
        self.table = StepTable(self.entries[0], bin_width)
        self.phase = 0
        self.failures = 0  # of the cheaper schedule
        self.wait = 0  # steps before a window for the next try begins
        self._begin_window()

    @property
    def max_pages(self) -> int:
        """Of the first schedule: page lists in captured graphs have to hold both."""
        return max(self.entries[0])

    def max_pages_until(self, length: int) -> int:
        """The largest budget of either phase at any cached length up to `length`."""
        return self.schedules[0].max_pages_until(length)

    def pages(self, cached_length: Tensor) -> Tensor:
        """The present phase's budget for each cached length (any shape), int64, on its device."""
        return self.table.pages(cached_length)

    def check(self, run: RunSettings) -> list[str]:
        """Differences of both schedules; see `StepSchedule.check`."""
        return [line for schedule in self.schedules for line in schedule.check(run)]

    def observe(self, alpha_T: Tensor, cached_length_T: Tensor, tau: float) -> dict[str, float]:
        """Changes the phase; call it once nothing of the step needs the old budget any more. Collective.

        Args:
            alpha_T: acceptance rates of this rank's tokens, on the CPU; non-finite ones are left out.
            cached_length_T: where they were sampled.
            tau: the P5 to hold, by the estimator that alpha comes from.

        Returns:
            `budget/phase` that the step was made with, 0 or 1; `budget/phase_p5` of its worst bin with enough tokens in
            the window, where there is one.
        """
        finite_T = alpha_T.isfinite()
        bin_T = self.table.bins(cached_length_T[finite_T])
        step_NH = cell_counts(alpha_T[finite_T], bin_T, len(self.table.entries), UNIT_EDGES)
        metrics = {"budget/phase": float(self.phase)}
        if not step_NH.any():
            return metrics
        if self.wait:
            self.wait -= 1
            return metrics
        self.window_NH += step_NH
        self.steps += 1
        if judged := self._judged(self.window_NH):
            worst = self._worst(judged)
            metrics["budget/phase_p5"] = worst
            # The step by itself as well: a jump must not hide behind the good steps before it.
            self._decide(judged, min(worst, self._worst(self._judged(step_NH))), tau)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The phase, the window begun, and what was learnt."""
        return {
            "entries": [list(entries) for entries in self.entries],
            "bin_width": self.table.bin_width,
            "phase": self.phase,
            "window": self.window_NH.clone(),
            "steps": self.steps,
            "failures": self.failures,
            "wait": self.wait,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError where the schedules are not those of the save."""
        ours = (self.table.bin_width, [list(entries) for entries in self.entries])
        if state.get("entries") is None or (state["bin_width"], state["entries"]) != ours:
            raise UserError("resume: the save was made with other schedules than this run's PhasedBudget")
        self.phase, self.steps = state["phase"], state["steps"]
        self.failures, self.wait = state["failures"], state["wait"]
        self.window_NH = state["window"].clone()
        self.table.replace(self.entries[self.phase])

    def _decide(self, judged: list[Histogram], worst: float, tau: float) -> None:
        """By the window's bins, and the worst P5 of window and step."""
        if self.phase == 1 and worst < tau:
            self.failures += 1
            self.wait = self.patience * (2**self.failures - 1)
            self._change(0)
        elif self.phase == 0 and worst < tau + self.margin:
            self._begin_window()
        elif self.steps >= self.patience:
            low = min(self._low(values) for values in judged)
            self._begin_window()
            if self.phase == 0 and low >= tau + self.margin:
                self._change(1)

    def _change(self, phase: int) -> None:
        self.phase = phase
        self.table.replace(self.entries[phase])
        self._begin_window()

    def _begin_window(self) -> None:
        self.window_NH = torch.zeros(len(self.table.entries), len(UNIT_EDGES) - 1, dtype=torch.int64)
        self.steps = 0

    def _judged(self, counts_NH: Tensor) -> list[Histogram]:
        """The bins with enough tokens."""
        enough = counts_NH.sum(1) >= self.min_tokens
        return [Histogram(counts_H, UNIT_EDGES) for counts_H in counts_NH[enough]]

    def _worst(self, bins: list[Histogram]) -> float:
        return min((quantile(values, TAIL) for values in bins), default=1.0)

    def _low(self, values: Histogram) -> float:
        draws = max(values.count // self.correlated_tokens, 1)
        return quantile_interval(values, TAIL, self.confidence, draws)[0]


def _common_bins(first: StepSchedule, cheaper: StepSchedule) -> tuple[tuple[list[int], list[int]], int]:
    """Both as entries of bins that divide those of either, up to where neither changes any more."""
    width = math.gcd(first.bin_width, cheaper.bin_width)
    until = max(len(schedule.entries) * schedule.bin_width for schedule in (first, cheaper))
    length_N = torch.arange(0, until, width)
    return (first.pages(length_N).tolist(), cheaper.pages(length_N).tolist()), width


def _check_cheaper(first: list[int], cheaper: list[int], bin_width: int) -> None:
    for n, (pages, fewer) in enumerate(zip(first, cheaper, strict=True)):
        if fewer > pages:
            raise UserError(
                f"PhasedBudget: from cached length {n * bin_width} on, cheaper has {fewer} pages and first {pages}"
            )
    if first == cheaper:
        raise UserError("PhasedBudget: first and cheaper are the same schedule")
