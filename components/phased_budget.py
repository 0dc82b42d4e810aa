"""A schedule for the first phase and a cheaper one for the second, changed by the measured tail (paper, DistillSparse).

The paper distils under its .86 schedule for 20,000 examples and then takes the .80 one, by hand. Here the cheaper one
is taken when the tail has had room for some steps, and left as soon as the tail falls below tau under it. What the
change costs is not known before it was tried: after a failure the loss 1 - P5 of the two phases is compared, and the
next try waits until the first phase's tail, so scaled, would hold. A tail that stands still is tried once.

Axes: T tokens of this rank, N bins, H cells of the histogram of alpha.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparrow.components.acceptance import TAIL
from sparrow.components.budget import StepSchedule, StepTable
from sparrow.components.schedule_file import check_whole
from sparrow.components.tail_controller import LEAST_LOSS, STEEPEST, quantile_interval
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
        patience: steps that it is measured over; a step that is itself below begins them anew.
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
        for key, value in counts.items():
            check_whole(key, value, "PhasedBudget")
        if not 0 <= margin < 1 or not 0 < confidence < 1:
            raise UserError(f"PhasedBudget: margin {margin} and confidence {confidence} must be between 0 and 1")
        self.schedules = (first, cheaper)
        self.margin, self.patience, self.min_tokens = margin, patience, min_tokens
        self.confidence, self.correlated_tokens = confidence, correlated_tokens
        self.entries, bin_width = _common_bins(first, cheaper)
        _check_cheaper(*self.entries, bin_width)
        self.table = StepTable(self.entries[0], bin_width)
        self.phase = 0
        self.left_with = math.nan  # P5 of the first phase when it was left last
        self.loss_ratio = math.nan  # loss of the cheaper phase over that of the first, once it has failed
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
        self.window_NH += step_NH
        self.steps += 1
        if judged := self._judged(self.window_NH):
            worst = self._worst(judged)
            metrics["budget/phase_p5"] = worst
            self._decide(judged, min([worst, self._worst(self._judged(step_NH))]), tau)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The phase, the window begun, and what was learnt."""
        return {
            "entries": [list(entries) for entries in self.entries],
            "bin_width": self.table.bin_width,
            "phase": self.phase,
            "window": self.window_NH.clone(),
            "steps": self.steps,
            "left_with": self.left_with,
            "loss_ratio": self.loss_ratio,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """UserError where the schedules are not those of the save."""
        ours = (self.table.bin_width, [list(entries) for entries in self.entries])
        if state.get("entries") is None or (state["bin_width"], state["entries"]) != ours:
            raise UserError("resume: the save was made with other schedules than this run's PhasedBudget")
        self.phase, self.steps = state["phase"], state["steps"]
        self.left_with, self.loss_ratio = state["left_with"], state["loss_ratio"]
        self.window_NH = state["window"].clone()
        self.table.replace(self.entries[self.phase])

    def _decide(self, judged: list[Histogram], worst: float, tau: float) -> None:
        """By the window's bins, and the worst P5 of window and step: a jump must not hide behind good steps."""
        if self.phase == 1:
            if worst < tau:
                self._learn(worst)
                self._change(0)
            elif self.steps >= self.patience:
                self._begin_window()
        elif worst < tau + self.margin:
            self._begin_window()
        elif self.steps >= self.patience:
            low, p5 = min(self._low(values) for values in judged), self._worst(judged)
            self._begin_window()
            if self._holds(low, tau):
                self.left_with = p5
                self._change(1)

    def _holds(self, low: float, tau: float) -> bool:
        """Whether P5 may be expected to hold under the cheaper schedule, from its lower bound under the first."""
        return low >= tau + self.margin and (math.isnan(self.loss_ratio) or 1 - self.loss_ratio * (1 - low) >= tau)

    def _learn(self, p5: float) -> None:
        """What the cheaper schedule costs, from the P5 that it was left with and that before it."""
        ratio = (1 - p5) / max(1 - self.left_with, LEAST_LOSS)
        # Between the two measurements the tail itself may have moved; that must not bar the phase for good.
        most = max(first / cheaper for first, cheaper in zip(*self.entries, strict=True)) ** STEEPEST
        self.loss_ratio = min(max(ratio, 1.0), most)

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
