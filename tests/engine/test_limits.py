"""A longest response for each sequence: it cuts there, and nowhere else does it show."""

from __future__ import annotations

import pytest
import torch

from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Scheduler
from sparrow.errors import UserError

PROMPTS = [[1, 2, 3] * 7, [4] * 16, [5, 6, 7, 8, 9] * 5, [2] * 17]
LIMITS = [1, 90, 77, 2, 83, 16, 90, 5, 71, 88, 12, 90]
T1 = SamplingParams()


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("kv_tokens", [2048, 10 * 16], ids=["roomy", "tight"])
def test_each_response_is_the_beginning_of_the_unlimited_one(exact_model, cache, make, kind, steps, kv_tokens):
    common = {"eos": (), "steps": steps, "prefill": 30, "limit": 90}
    whole = make(exact_model, cache(kind), **common).generate(PROMPTS, 3, T1)
    engine = make(exact_model, cache(kind), kv_tokens=kv_tokens, **common)
    cut = engine.generate(PROMPTS, 3, T1, limits=LIMITS)
    assert (engine.stats.preemptions > 0) == (kv_tokens == 10 * 16)
    assert cut.lengths_S.tolist() == LIMITS and not cut.terminated_S.any()
    for s, limit in enumerate(LIMITS):
        assert torch.equal(cut.tokens_T[cut.slice_of(s)], whole.tokens_T[whole.slice_of(s)][:limit])
        assert torch.equal(cut.logprobs_T[cut.slice_of(s)], whole.logprobs_T[whole.slice_of(s)][:limit])


def test_an_eos_token_still_ends_a_response_before_its_limit(exact_model, cache, make):
    free, cut = (
        make(exact_model, cache("dense"), prefill=30, limit=90).generate(PROMPTS, 3, T1, limits=limits)
        for limits in (None, LIMITS)
    )
    expected = [min(length, limit) for length, limit in zip(free.lengths_S.tolist(), LIMITS, strict=True)]
    assert cut.lengths_S.tolist() == expected and expected != LIMITS


def test_a_request_gets_no_block_past_its_limit():
    # Of 4 prompt tokens and 100, 6 and 5 of the response all but the newest are cached: with 50 steps to come 53, 9, 8.
    scheduler = Scheduler([[0] * 4], 3, 3, 100, BlockAllocator(60), 4, limits=[100, 6, 5])
    admitted = scheduler.admit(50)
    assert [len(a.request.blocks) for a in admitted] == [14, 3, 2]
    for a in admitted:
        a.request.response_length = 1
    scheduler.grow(99)
    assert [len(a.request.blocks) for a in admitted] == [26, 3, 2]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ([40] * 11, "11 limits for 12 sequences"),
        ([40] * 5 + [0] + [40] * 6, r"limit 5 is 0; it must be from 1 to engine\.max_new_tokens 40"),
        ([40] * 11 + [41], r"limit 11 is 41; it must be from 1 to engine\.max_new_tokens 40"),
    ],
)
def test_impossible_limits_are_refused_before_any_work(model, cache, make, limits, words):
    paged = cache("dense")
    with pytest.raises(UserError, match=words):
        make(model, paged).generate(PROMPTS, 3, T1, limits=limits)
    assert not hasattr(paged, "pool")


@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 1, 2, 3, 4]])
def test_a_number_for_each_prompt_or_none(model, cache, make, numbers):
    paged = cache("dense")
    with pytest.raises(UserError, match=f"{len(numbers)} prompt_numbers for 4 prompts"):
        make(model, paged).generate(PROMPTS, 3, T1, prompt_numbers=numbers)
    assert not hasattr(paged, "pool")
