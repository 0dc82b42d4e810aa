"""Chunked prefill against the whole prompt at once."""

from __future__ import annotations

import pytest
import torch

from sparrow.components.budget import FixedBudget
from sparrow.components.kv_cache import SparseKVCache
from sparrow.components.selector import CentroidSelector, QuestSelector
from sparrow.engine.prefill import _packs, prefill
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Prompt

LENGTH = 70  # four pages of 16 and six tokens


def prefilled(model, cache, max_tokens: int, prompts: list[Prompt]) -> dict[int, torch.Tensor]:
    cache.allocate(model.config, 12, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        return prefill(model, cache, prompts, max_tokens, torch.device("cpu"))


def prompts() -> list[Prompt]:
    """A long one in blocks out of order, and a short one."""
    long = Prompt(0, [(5 * i) % 22 + 1 for i in range(LENGTH)], 1, [4, 2, 9, 7, 1])
    return [long, Prompt(1, [3] * 9, 1, [5])]


@pytest.mark.parametrize("max_tokens", [LENGTH - 1, 64, 33, 16, 10, 1], ids=lambda n: f"chunks of {n}")
@pytest.mark.parametrize("selector", [CentroidSelector(), QuestSelector()], ids=lambda s: type(s).__name__)
def test_chunks_equal_the_whole(model, max_tokens, selector):
    """Most of these lengths split pages between two chunks."""
    whole, chunked = (SparseKVCache(FixedBudget(pages=3), selector, 16, 16, dense_layers=1) for _ in range(2))
    expected, hidden = prefilled(model, whole, 1000, prompts()), prefilled(model, chunked, max_tokens, prompts())
    for prompt in (0, 1):
        torch.testing.assert_close(hidden[prompt], expected[prompt], atol=1e-5, rtol=1e-5)
    blocks = [4, 2, 9, 7, 1, 5]
    for ours, theirs in zip(chunked.swap_out(blocks), whole.swap_out(blocks), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    complete = whole.pool.landmarks_KPMD[2][:, [4, 2, 9, 7]]
    assert complete.abs().amin((0, 2, 3)).min() > 0, "all of them have landmarks"


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_generation_from_chunks(model, cache, make, kind):
    long = [[(5 * i) % 22 + 1 for i in range(LENGTH)], [1, 2], [7] * 40]
    one, other = (
        make(model, cache(kind), prefill=n).generate(long, 2, SamplingParams(), keep_hidden=True) for n in (1000, 24)
    )
    assert torch.equal(one.tokens_T, other.tokens_T)
    torch.testing.assert_close(one.logprobs_T, other.logprobs_T, atol=1e-5, rtol=0)


def test_a_pass_holds_its_tokens_with_their_padding():
    lengths = [9, 1, 1, 3, 4, 4, 2, 2, 2, 2, 2, 10]
    packs = list(_packs([Prompt(i, [0] * n, 1) for i, n in enumerate(lengths)], 10))
    assert [[len(prompt.tokens) for prompt in pack] for pack in packs] == [
        [9], [1, 1, 3], [4, 4], [2, 2, 2, 2, 2], [10]
    ]  # fmt: skip
