from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.engine.sampler import LOWEST_TEMPERATURE, SamplingParams, sample
from sparrow.errors import UserError

NEUTRAL = SamplingParams()


def test_inverse_cdf_by_hand():
    # Probabilities .5, 0, .25, .25: the cdf is .5, .5, .75, 1.
    logits = torch.tensor([0.5, 0.0, 0.25, 0.25]).log().expand(5, 4)
    u = torch.tensor([0.0, 0.4999, 0.5001, 0.7501, 0.999999], dtype=torch.float64)
    out = sample(logits, u, NEUTRAL, 2)
    assert out.tokens_B.tolist() == [0, 0, 2, 3, 3]
    torch.testing.assert_close(out.logprobs_B.exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25]))
    assert out.top_ids_BK[0, 0] == 0 and out.top_logprobs_BK.shape == (5, 2)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_frequencies_and_log_probs_follow_the_temperature(temperature):
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    n = 40_000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    out = sample(logits.expand(n, 4), u, SamplingParams(temperature=temperature), 4)
    probs = (logits / temperature).softmax(-1)
    frequency = torch.bincount(out.tokens_B, minlength=4) / n
    torch.testing.assert_close(frequency, probs, atol=1e-4, rtol=0)
    torch.testing.assert_close(out.logprobs_B.exp(), probs[out.tokens_B])


def kept(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    n = 4000
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    out = sample(logits.expand(n, -1), u, params, 1)
    return dict(sorted((int(t), float(p)) for t, p in zip(out.tokens_B, out.logprobs_B.exp(), strict=True)))


def test_truncation_by_hand():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    cases = {
        SamplingParams(top_k=2): [4 / 7, 3 / 7],
        SamplingParams(top_p=0.65): [4 / 7, 3 / 7],  # .4 is below .65, .7 crosses it and is kept
        SamplingParams(top_p=0.4): [1.0],
        SamplingParams(min_p=0.6): [4 / 7, 3 / 7],  # .3 >= .6 * .4 > .2
        SamplingParams(top_k=3, top_p=0.5): [4 / 7, 3 / 7],  # of .444 .333 .222
    }
    for params, probabilities in cases.items():
        found = kept(logits, params)
        assert list(found) == list(range(len(probabilities))), params
        assert list(found.values()) == pytest.approx(probabilities), params


def test_greedy_takes_the_best_and_is_certain():
    u = torch.tensor([0.999], dtype=torch.float64)
    out = sample(torch.tensor([[0.0, 3.0, 1.0]]), u, SamplingParams(temperature=0.0), 3)
    assert out.tokens_B.item() == 1 and out.logprobs_B.item() == 0.0
    torch.testing.assert_close(out.top_logprobs_BK.exp().sum(), torch.tensor(1.0))


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_an_impossible_token_is_never_drawn(seed, u):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed))
    logits[0, ::2] = -math.inf
    out = sample(logits, torch.tensor([u], dtype=torch.float64), NEUTRAL, 3)
    assert out.tokens_B.item() % 2 == 1 and out.logprobs_B.isfinite().all()


def test_the_lowest_temperature_gives_numbers():
    logits = torch.tensor([[3.0e4, -3.0e4, 3.0e4 - 1.0]])
    out = sample(logits, torch.tensor([0.5], dtype=torch.float64), SamplingParams(temperature=LOWEST_TEMPERATURE), 3)
    assert out.tokens_B.item() == 0 and out.logprobs_B.item() == 0.0
    assert out.top_logprobs_BK.isfinite().all()


@pytest.mark.parametrize("temperature", [-1.0, 1e-39, 9e-6, math.nan, math.inf])
def test_a_temperature_that_fp32_cannot_divide_by_is_refused(temperature):
    with pytest.raises(UserError, match=rf"sampling\.temperature: {temperature} is neither 0 .* at least 1e-05"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("bad", [{"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 1.0}])
def test_bad_parameters_are_named(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        SamplingParams(**bad)
