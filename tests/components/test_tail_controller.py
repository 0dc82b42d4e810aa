"""The closed loop against a synthetic tail: alpha = 1 - loss, the loss exponential with a scale that falls with budget.

P5 is then 1 - scale * ln 20. Axes: T tokens, N bins.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.components.budget import StepSchedule
from sparrow.components.tail_controller import GRID, TailController, quantile_interval
from sparrow.errors import UserError
from sparrow.protocols import AdaptiveBudget, BudgetSchedule, RunSettings
from sparrow.training.quantiles import SortedValues

TAU, WIDTH = 0.91, 100


def p5(budget: int, need: float) -> float:
    """Exactly tau where the budget is what the tail needs; a step of a third of the budget is .02 there."""
    return 1 - (1 - TAU) * (need / budget) ** 0.7


class Run:
    """A controller in a world whose bins need budgets that change with time."""

    def __init__(self, start: list[int], tokens: int = 6000, **options: Any) -> None:
        self.controller = TailController(
            StepSchedule(pages=start, bin_width=WIDTH, allow_dips=True),
            correlated_tokens=1,
            **{"min_tokens": 2000} | options,
        )
        self.generator = torch.Generator().manual_seed(0)
        self.tokens, self.history = tokens, [self.controller.table.entries]

    def step(self, needs: list[float]) -> dict[str, float]:
        alphas, lengths = [], []
        for n, (need, budget) in enumerate(zip(needs, self.controller.table.entries, strict=True)):
            scale = (1 - p5(budget, need)) / math.log(20)
            loss_T = torch.empty(self.tokens).exponential_(generator=self.generator)
            alphas.append((1 - scale * loss_T).clamp(min=0))
            lengths.append(torch.randint(n * WIDTH, (n + 1) * WIDTH, (self.tokens,), generator=self.generator))
        metrics = self.controller.observe(torch.cat(alphas), torch.cat(lengths), TAU)
        self.history.append(self.controller.table.entries)
        return metrics

    def turns(self, n: int) -> int:
        """How often the budget of a bin changed its direction."""
        signs = [math.copysign(1, d) for d in np.diff([pages[n] for pages in self.history]) if d]
        return sum(a != b for a, b in pairwise(signs))


def sufficient(need: float) -> int:
    """The smallest budget of the grid with a P5 of tau."""
    return next(pages for pages in GRID if pages >= need)


NEEDS = [40.0, 110.0, 280.0]  # in the middle between two grid steps, so that noise does not decide


@pytest.mark.parametrize("start", [[32, 32, 32], [48, 128, 320], [1024, 1024, 1024]], ids=["below", "right", "above"])
def test_a_tail_that_stands_still_is_found_and_left_alone(start: list[int]) -> None:
    run = Run(start)
    for _ in range(200):
        run.step(NEEDS)
    assert run.history[-1] == [sufficient(need) for need in NEEDS] == [48, 128, 320]
    assert all(run.turns(n) <= 2 for n in range(3)), "one look below at most"
    assert run.history[-60:] == [run.history[-1]] * 60


@settings(max_examples=15, deadline=None)
@given(st.floats(33, 900), st.sampled_from(GRID), st.integers(0, 1000))
def test_any_need_is_met_to_an_interval_and_without_oscillation(need: float, start: int, seed: int) -> None:
    run = Run([start], tokens=4000)
    run.generator.manual_seed(seed)
    for _ in range(150):
        run.step([need])
    last = run.history[-1][0]
    # An interval of .005, and the margin as much again.
    assert p5(last, need) > TAU - 0.005
    assert last <= next(pages for pages in GRID if p5(pages, need) > TAU + 0.01 or pages == GRID[-1])
    assert run.turns(0) <= 2
    assert len({pages[0] for pages in run.history[-60:]}) <= 2


@pytest.mark.parametrize("tokens", [6000, 1000], ids=["a step decides", "steps add up"])
def test_a_jump_is_answered_at_once(tokens: int) -> None:
    run = Run([48, 128, 320], tokens=tokens)
    for _ in range(20):
        run.step(NEEDS)
    before = len(run.history)
    worse = [75.0, 212.0, 600.0]  # 2, 3 and 4 grid steps more
    for _ in range(4 if tokens == 6000 else 20):
        run.step(worse)
    assert run.history[-1] == [80, 224, 640]
    assert all(p5(pages, need) >= TAU for pages, need in zip(run.history[-1], worse, strict=True))
    if tokens == 6000:
        assert run.history[before] == [64, 160, 384], "up with the first bad step"
    for _ in range(120):
        run.step(NEEDS)
    assert run.history[-1] == [48, 128, 320], "and down again, slowly, when the need is gone"


def test_a_drift_is_followed_in_both_directions() -> None:
    run = Run([48, 128, 320])
    for t in range(400):
        growth = 1.6 ** math.sin(2 * math.pi * t / 200)  # up by 1.6, back, down by 1.6, and back
        needs = [need * growth for need in NEEDS]
        used = run.history[-1]
        run.step(needs)
        assert all(p5(pages, need) > TAU - 0.03 for pages, need in zip(used, needs, strict=True)), (t, used, needs)
    highest, lowest = ([f(pages[n] for pages in run.history) for n in range(3)] for f in (max, min))
    assert [high >= 1.6 * need for high, need in zip(highest, NEEDS, strict=True)] == [True] * 3
    assert [low <= 2 * need / 1.6 for low, need in zip(lowest, NEEDS, strict=True)] == [True] * 3
    assert all(run.turns(n) <= 12 for n in range(3))


def test_what_every_step_keeps() -> None:
    run = Run([96, 64, 100], least=48, most=256)
    generator = torch.Generator().manual_seed(1)
    assert run.history == [[96, 96, 128]], "rounded up to the grid, and never falling"
    for _ in range(150):
        needs = (40 + 400 * torch.rand(3, generator=generator)).tolist()
        used = run.history[-1]
        metrics = run.step(needs)
        pages = run.history[-1]
        assert pages == sorted(pages) and {48, 64, 80, 96, 128, 160, 192, 224, 256} >= set(pages)
        assert [metrics[f"budget/pages_bin/{n * WIDTH}"] for n in range(3)] == used
        assert metrics["budget/moves"] == sum(a != b for a, b in zip(used, pages, strict=True))


def test_a_bin_without_enough_tokens_does_not_move_and_takes_its_time_to_collect_them() -> None:
    run = Run([32, 32], tokens=500, min_tokens=2000)
    for _ in range(3):
        assert run.step([900.0, 900.0])["budget/moves"] == 0
    assert run.step([900.0, 900.0])["budget/moves"] == 2
    empty = run.controller.observe(torch.zeros(0), torch.zeros(0, dtype=torch.int64), TAU)
    assert empty["budget/moves"] == 0
    nan_T = torch.full((9000,), math.nan)
    assert run.controller.observe(nan_T, torch.zeros(9000, dtype=torch.int64), TAU)["budget/moves"] == 0
    assert run.controller.window_NH.sum() == 0


def test_a_captured_table_sees_the_move() -> None:
    run = Run([32, 32])
    lengths = torch.tensor([[0, WIDTH - 1], [WIDTH, 10**6]])
    run.controller.pages(lengths)
    (held_N,) = run.controller.table._tables_N.values()
    run.step([20.0, 900.0])
    assert held_N.tolist() == [32, 48] and run.controller.pages(lengths).tolist() == [[32, 32], [48, 48]]
    assert run.controller.max_pages == run.controller.max_pages_until(0) == 1024, "the lists hold what may come"


def test_half_a_run_and_the_other_half_are_a_whole_one() -> None:
    whole, first = Run([32, 64], tokens=1500), Run([32, 64], tokens=1500)
    needs = [[40.0 + t, 200.0 - 2 * t] for t in range(60)]
    for need in needs:
        whole.step(need)
    for need in needs[:31]:
        first.step(need)
    second = Run([512, 512], tokens=1500)
    second.controller.load_state_dict(first.controller.state_dict())
    second.generator.set_state(first.generator.get_state())
    for need in needs[31:]:
        second.step(need)
    assert second.history[1:] == whole.history[-29:]
    ours, theirs = second.controller.state_dict(), whole.controller.state_dict()
    assert torch.equal(ours.pop("window"), theirs.pop("window"))
    assert str(ours) == str(theirs)  # as text, where NaN equals NaN


@pytest.mark.parametrize("change", [{"most": 512}, {"bin_width": 50}, {"pages": [32, 32, 32]}])
def test_another_grid_or_other_bins_are_not_resumed(change: dict[str, Any]) -> None:
    def make(most: int = 1024, bin_width: int = WIDTH, pages: list[int] = [32, 64]) -> TailController:  # noqa: B006
        return TailController(StepSchedule(pages=pages, bin_width=bin_width), most=most)

    with pytest.raises(UserError, match="resume: the saved TailController"):
        make(**change).load_state_dict(make().state_dict())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"patience": 0}, "patience must be a whole number of at least 1, got 0"),
        ({"min_tokens": 0}, "min_tokens must be"),
        ({"correlated_tokens": 0}, "correlated_tokens must be"),
        ({"margin": -0.1}, "margin -0.1 and confidence 0.99 must be between 0 and 1"),
        ({"confidence": 1.0}, "margin 0.005 and confidence 1.0 must be between 0 and 1"),
        ({"grid": [4, 0]}, "grid must be a whole number of at least 1, got 0"),
        ({"least": 70, "most": 75}, "no budget of the grid .* within least 70 and most 75"),
        ({"most": 48}, r"start.pages\[1\] is 64, outside the budgets 32 to 48 of the grid"),
        ({"least": 48}, r"start.pages\[0\] is 32, outside the budgets 48 to 1024 of the grid \(grid, least, most\)"),
        ({"grid": [48, 64]}, r"start.pages\[0\] is 32, outside the budgets 48 to 64"),
        ({"grid": [32, 128, 64]}, r"grid\[2\] is 64, not above the 128 before it"),
        ({"grid": [32, 64, 64]}, r"grid\[2\] is 64, not above the 64 before it"),
        ({"grid": []}, r"no budget of the grid \[\] lies within"),
        ({"least": 0}, "least must be a whole number of at least 1, got 0"),
    ],
)
def test_arguments_that_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"TailController: {message}"):
        TailController(StepSchedule(pages=[32, 64]), **kwargs)


def test_it_is_checked_as_the_schedule_it_starts_from() -> None:
    run = RunSettings("qwen3-4b", 16, "centroid", 1, 2, 2, 1.0, "top_20")
    controller: BudgetSchedule = TailController(StepSchedule("qwen3-4b-0.86"))
    assert isinstance(controller, AdaptiveBudget) and controller.check(run) == []
    assert not isinstance(StepSchedule(pages=[4]), AdaptiveBudget)
    with pytest.raises(UserError, match="model is 'qwen3-8b'"):
        TailController(StepSchedule("qwen3-8b-0.86")).check(run)
    with pytest.raises(UserError, match=r"grid: pages\[0\] is 2, fewer than the 3"):
        TailController(StepSchedule(pages=[4]), grid=[2, 4]).check(run)


@pytest.mark.parametrize("draws", [1, 20, 100, 1000, 40_000])
def test_the_interval_is_that_of_the_binomial_distribution(draws: int) -> None:
    low, high = quantile_interval(SortedValues(torch.arange(draws).double() / max(draws - 1, 1)), 0.05, 0.95, draws)
    generator = np.random.default_rng(0)
    below = np.sort(generator.binomial(draws, 0.05, 200_000))
    # Order statistics are at k / (draws - 1); the true quantile lies above the k-th (from 0) if more than k are below.
    for bound, ranks in ((low, below[4500:5500]), (high, below[194_500:195_500])):
        k = round(bound * max(draws - 1, 1))
        assert ranks[0] - 1 <= k <= ranks[-1] + 1, (bound, k, ranks[[0, -1]])


@pytest.mark.parametrize("make", [lambda g, n: g.random(n), lambda g, n: 1 - g.exponential(0.03, n).clip(max=1)])
def test_the_interval_covers_the_quantile_as_often_as_it_says(make: Callable[..., Any]) -> None:
    generator = np.random.default_rng(0)
    truth = np.quantile(make(generator, 2_000_000), 0.05)
    samples = (SortedValues(torch.tensor(make(generator, 400))) for _ in range(1000))
    intervals = [quantile_interval(sample, 0.05, 0.9, 400) for sample in samples]
    covered = np.mean([low <= truth <= high for low, high in intervals])
    assert 0.87 < covered < 0.96
