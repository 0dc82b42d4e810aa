"""The acceptance rate from logits by the kernels, against log-softmax and `alpha_exact`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparrow.training.logprob import alpha_exact
from sparrow.training.segments import alpha_of_logits, score_rows

pytestmark = pytest.mark.gpu

Randn = Callable[..., Tensor]


def alpha(sparse_NV: Tensor, dense_NV: Tensor, temperature: float = 1.0) -> Tensor:
    return alpha_of_logits(sparse_NV, dense_NV, score_rows(dense_NV, temperature), temperature)


def expected(sparse_NV: Tensor, dense_NV: Tensor, temperature: float = 1.0) -> Tensor:
    return alpha_exact(*((x.double() / temperature).log_softmax(-1) for x in (sparse_NV, dense_NV)))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("vocab", [1, 37, 128, 2048, 2049, 5003, 151_936])
def test_alpha_of_any_vocabulary(randn: Randn, vocab: int, temperature: float) -> None:
    dense_NV = 3 * randn(5, vocab)
    sparse_NV = dense_NV + torch.tensor([0.0, 0.01, 0.3, 3.0, 30.0], device=dense_NV.device)[:, None] * randn(5, vocab)
    before = sparse_NV.clone(), dense_NV.clone()
    alpha_N = alpha(sparse_NV, dense_NV, temperature)
    torch.testing.assert_close(alpha_N.double(), expected(sparse_NV, dense_NV, temperature), rtol=0, atol=1e-5)
    assert torch.equal(sparse_NV, before[0]) and torch.equal(dense_NV, before[1])
    assert torch.equal(alpha_N, alpha(sparse_NV, dense_NV, temperature)), "the same bits each time"
    assert torch.equal(alpha_N, alpha(dense_NV, sparse_NV, temperature))
    if vocab > 1:
        assert alpha_N[4] < 0.9, "the case must not be trivial"


def test_equal_logits_are_accepted_exactly(randn: Randn) -> None:
    logits_NV = 5 * randn(7, 5003)
    assert alpha(logits_NV, logits_NV.clone(), 0.6).tolist() == [1.0] * 7


def test_disjoint_and_impossible_tokens(device: torch.device) -> None:
    sparse_NV, dense_NV = torch.full((2, 3, 5003), -math.inf, device=device)
    sparse_NV[0, :4000], dense_NV[0, 4000:] = 1.0, 2.0  # nothing in common
    sparse_NV[1, 2500], dense_NV[1, 2500] = -3.0, 80.0  # one token, the same
    sparse_NV[2, :4], dense_NV[2, 2:6] = 0.0, 0.0  # two of four
    assert alpha(sparse_NV, dense_NV).tolist() == pytest.approx([0.0, 1.0, 0.5], abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(randn: Randn, value: float) -> None:
    sparse_NV, dense_NV = randn(4, 5003), randn(4, 5003)
    sparse_NV[1, 4999] = dense_NV[2, 0] = value
    dense_NV[3] = -math.inf  # no token is possible
    assert alpha(sparse_NV, dense_NV).isnan().tolist() == [False, True, True, True]


def test_no_tokens(device: torch.device) -> None:
    none_NV = torch.zeros(0, 300, device=device)
    assert alpha(none_NV, none_NV).shape == (0,)
