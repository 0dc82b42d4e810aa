from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.training.learning_rate import LearningRate


def optimizer(*rates: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in rates])


def rates(warmup_steps: int, final: float, steps: int, base: float = 1.0) -> list[float]:
    sgd = optimizer(base)
    rate, seen = LearningRate(sgd, warmup_steps, final), []
    for step in range(steps):
        rate.set(step, step, steps)
        seen.append(sgd.param_groups[0]["lr"])
    return seen


def test_by_hand() -> None:
    assert rates(0, 0.2, steps=5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates(3, 1.0, steps=5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(1, 0.0, steps=3) == [0.5, 0.5, 0.0]
    assert rates(0, 0.2, steps=1) == [1.0]


@given(st.integers(2, 500), st.floats(0, 1), st.floats(1e-8, 1))
def test_both_ends_are_exact_and_a_constant_rate_is_constant(steps: int, final: float, base: float) -> None:
    decayed = rates(0, final, steps, base)
    assert (decayed[0], decayed[-1]) == (base, base * final)
    assert set(rates(0, 1.0, steps, base)) == {base}


def test_every_group_keeps_its_own_rate_through_a_resume() -> None:
    sgd = optimizer(1.0, 0.1)
    rate = LearningRate(sgd, 0, 0.5)
    rate.set(1, 1, 2)
    sgd.load_state_dict(sgd.state_dict())
    rate.set(0, 0, 2)
    assert [group["lr"] for group in sgd.param_groups] == [1.0, 0.1]
