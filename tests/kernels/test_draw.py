"""Sampling by two kernels against `sparrow.engine.sampler.sample` with the same random numbers.

Axes: B rows, V vocabulary, K top-k set.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.engine.sampler import SamplingParams, sample
from sparrow.kernels.draw import draw

pytestmark = pytest.mark.gpu


def uniforms(count: int, device) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(device)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 0.0])
@pytest.mark.parametrize(("vocab", "top_k"), [(37, 5), (37, 37), (128, 1), (300, 20), (4999, 20)])
def test_draws_what_the_sampler_draws(device, randn, vocab, top_k, temperature):
    logits, u = randn(8, vocab) * 3, uniforms(8, device)
    tokens, logprobs, top_ids, top_logprobs = draw(logits, u, temperature, top_k)
    expected = sample(logits, u, SamplingParams(temperature=temperature), top_k)
    assert torch.equal(tokens, expected.tokens_B)
    assert torch.equal(top_ids.long(), expected.top_ids_BK)
    torch.testing.assert_close(logprobs, expected.logprobs_B, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(top_logprobs, expected.top_logprobs_BK, atol=1e-5, rtol=1e-5)


def test_every_token_of_a_real_vocabulary_has_its_interval(device, randn):
    """In the middle of a token's interval of the CDF, no order of summation can make it another token."""
    vocab = 151_936
    edges = torch.tensor([0, 127, 128, vocab - 1], device=device)
    logits = (randn(1, vocab) * 4).index_fill(1, edges, 10.0).expand(24, -1).contiguous()
    probability_V = logits[0].double().softmax(-1)
    wanted_B = torch.cat((probability_V.argsort(descending=True)[:2500:125], edges))
    assert probability_V[wanted_B].min() > 1e-5, "wide enough for the exponentials of fp32"
    middle_V = probability_V.cumsum(0) - probability_V / 2
    tokens, logprobs, *_ = draw(logits, middle_V[wanted_B], 1.0, 20)
    assert torch.equal(tokens, wanted_B)
    torch.testing.assert_close(logprobs, probability_V[wanted_B].log().float(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53], ids=["first", "last"])
def test_the_ends_of_the_cdf_are_tokens_that_can_be_drawn(device, u):
    """The first and the last token of the vocabulary are impossible, and so is a whole segment, or the first."""
    logits = torch.zeros(3, 300, device=device)
    logits[:, [0, 299]] = -1e4
    logits[1, 128:256] = -1e4
    logits[2, :128] = -1e4
    tokens, logprobs, *_ = draw(logits, torch.full((3,), u, dtype=torch.float64, device=device), 1.0, 4)
    assert tokens.tolist() == ([1, 1, 128] if u == 0 else [298] * 3)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([1 / 298, 1 / 170, 1 / 171], device=device))


def test_of_equal_logits_the_first_tokens_lead(device):
    logits = torch.zeros(1, 700, device=device)
    logits[0, 600] = 1.0
    tokens, _, top_ids, top_logprobs = draw(logits, torch.zeros(1, dtype=torch.float64, device=device), 0.0, 6)
    assert top_ids.tolist() == [[600, 0, 1, 2, 3, 4]] and tokens.tolist() == [600]
    assert (top_logprobs.diff() <= 0).all()
