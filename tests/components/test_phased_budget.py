from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sparrow.components.budget import StepSchedule
from sparrow.components.phased_budget import PhasedBudget
from sparrow.errors import UserError
from sparrow.protocols import AdaptiveBudget, RunSettings

TAU = 0.86
RUN = RunSettings("m", 16, "CentroidSelector", 1, 2, 2, 1.0, "exact", TAU)


def phased(**arguments) -> PhasedBudget:
    first, cheaper = StepSchedule(pages=[32, 64], bin_width=100), StepSchedule(pages=[32, 48], bin_width=100)
    return PhasedBudget(first, cheaper, **{"patience": 4, "min_tokens": 500, "correlated_tokens": 1, **arguments})


def draws(p5: float, seed: int, tokens: int = 2000) -> torch.Tensor:
    """Acceptance rates in [0, 1] whose 5th percentile is about `p5`: 1 - (1 - p5) * e / ln 20 with e exponential."""
    generator = torch.Generator().manual_seed(seed)
    e = torch.empty(tokens).exponential_(generator=generator)
    return (1 - (1 - p5) * e / torch.log(torch.tensor(20.0))).clamp(0, 1)


def simulate(budget: PhasedBudget, p5_of, steps: int, start: int = 0) -> list[int]:
    """Phases that the steps were made with; `p5_of(step, phase)` is the true P5 of the later bin, the other's .99."""
    phases = []
    for step in range(start, start + steps):
        alpha_T = torch.cat((draws(0.99, 10_000 + step), draws(p5_of(step, budget.phase), step)))
        length_T = torch.cat((torch.full((2000,), 50), torch.full((2000,), 150)))
        metrics = budget.observe(alpha_T, length_T, TAU)
        phases.append(int(metrics["budget/phase"]))
    return phases


def changes(phases: list[int]) -> int:
    return sum(one != other for one, other in pairwise(phases))


def test_it_follows_the_protocol_and_begins_with_the_first_schedule():
    budget = phased()
    assert isinstance(budget, AdaptiveBudget)
    assert budget.pages(torch.tensor([0, 100, 5000])).tolist() == [32, 64, 64]
    assert budget.max_pages == budget.max_pages_until(150) == 64 and budget.max_pages_until(99) == 32
    assert budget.check(RUN) == []


def test_it_logs_the_worst_bin():
    alpha_T = torch.cat((draws(0.99, 0), draws(0.80, 1)))
    metrics = phased().observe(alpha_T, torch.tensor([50, 150]).repeat_interleave(2000), TAU)
    assert metrics["budget/phase_p5"] == pytest.approx(0.80, abs=0.02)


def test_a_tail_with_room_takes_the_cheaper_schedule_after_patience_and_stays():
    budget = phased()
    phases = simulate(budget, lambda step, phase: (0.93, 0.90)[phase], 40)
    assert phases == [0] * 4 + [1] * 36
    assert budget.pages(torch.tensor([50, 150])).tolist() == [32, 48]


def test_margin_is_held_by_the_lower_bound_of_the_worst_bin():
    assert simulate(phased(margin=0.05), lambda step, phase: 0.90, 30) == [0] * 30, "the other bin has .99"
    # Enough by the point estimate, not by the bound: 500 draws a window do not tell .87 from .86.
    narrow = phased(correlated_tokens=16)
    assert sum(simulate(narrow, lambda step, phase: 0.87, 30)) == 0


def test_it_goes_back_at_once_and_does_not_flap():
    """The cheaper schedule does not hold, and nothing improves: few tries, each of one step, ever further apart."""
    phases = simulate(phased(), lambda step, phase: (0.93, 0.80)[phase], 400)
    assert phases[:6] == [0, 0, 0, 0, 1, 0], phases
    tries = [step for step, phase in enumerate(phases) if phase]
    assert tries == [4, 13, 30, 63, 128, 257], "4 steps of patience and 1 of the try, after 4, 12, 28, 60, 124 others"


def test_a_tail_that_distilling_lifts_is_tried_again():
    """The cheaper schedule holds from step 100 on, and is found 28 steps later."""
    phases = simulate(phased(), lambda step, phase: (((0.90, 0.80), (0.96, 0.92))[step >= 100])[phase], 200)
    assert [step for step, phase in enumerate(phases) if phase] == [4, 13, 30, 63, *range(128, 200)]


@pytest.mark.parametrize("cheap", [0.85, 0.855, 0.86, 0.865, 0.87])
def test_about_tau_it_changes_seldom(cheap):
    """Where the measurement cannot tell, tries in 400 steps are as few as where it fails for certain."""
    assert changes(simulate(phased(), lambda step, phase: (0.92, cheap)[phase], 400)) <= 12


def test_a_jump_does_not_hide_behind_the_good_steps_before_it():
    budget = phased(patience=20)
    phases = simulate(budget, lambda step, phase: 0.95 if step < 35 else 0.80, 40)
    assert phases == [0] * 20 + [1] * 16 + [0] * 4


def test_bins_without_enough_tokens_have_no_voice_until_they_have():
    budget = phased(min_tokens=3000)
    alpha_T, length_T = draws(0.5, 0, 100), torch.full((100,), 150)
    for step in range(40):
        good_T = draws(0.99, step, 1000)
        budget.observe(torch.cat((good_T, alpha_T)), torch.cat((torch.full((1000,), 50), length_T)), TAU)
        if budget.phase == 1:
            break
    assert step == 3
    assert budget.observe(torch.empty(0), torch.empty(0, dtype=torch.int64), TAU) == {"budget/phase": 1.0}


def test_state_goes_on_bit_for_bit_and_is_refused_for_other_schedules():
    whole, part, rest = phased(), phased(), phased()
    p5_of = lambda step, phase: (0.93, 0.80)[phase]  # noqa: E731
    phases = simulate(whole, p5_of, 30)
    first = simulate(part, p5_of, 5)
    rest.load_state_dict(part.state_dict())
    assert rest.pages(torch.tensor([150])).tolist() == part.pages(torch.tensor([150])).tolist()
    assert phases == first + simulate(rest, p5_of, 25, start=5)
    other = PhasedBudget(StepSchedule(pages=[32], bin_width=100), StepSchedule(pages=[16], bin_width=100))
    with pytest.raises(UserError, match="other schedules"):
        other.load_state_dict(part.state_dict())


def test_bins_of_different_widths_are_joined():
    budget = PhasedBudget(StepSchedule(pages=[40, 60, 80], bin_width=100), StepSchedule(pages=[30, 50], bin_width=150))
    length_L = torch.arange(500)
    for phase in (0, 1):
        budget._change(phase)
        assert torch.equal(budget.pages(length_L), budget.schedules[phase].pages(length_L))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"patience": 0}, "patience"), ({"margin": 1.0}, "margin"), ({"confidence": 1.0}, "confidence")],
)
def test_bad_numbers_are_named(arguments, words):
    with pytest.raises(UserError, match=words):
        phased(**arguments)


def test_a_second_schedule_that_is_not_cheaper_is_refused():
    one, other = StepSchedule(pages=[32, 64], bin_width=100), StepSchedule(pages=[48, 48], bin_width=100)
    with pytest.raises(UserError, match="length 0 on, cheaper has 48 pages and first 32"):
        PhasedBudget(one, other)
    with pytest.raises(UserError, match="the same"):
        PhasedBudget(one, one)
