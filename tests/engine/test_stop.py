"""Stop strings, alone and in the engine."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.engine.sampler import SamplingParams
from sparrow.engine.stop import StopStrings
from sparrow.errors import UserError

PIECES = ["a", "b", "ab", "ba", "é", " ", "aab"]


def text(ids: list[int]) -> str:
    return "".join(PIECES[i % len(PIECES)] for i in ids)


def letters(ids: list[int]) -> str:
    """Of the model's vocabulary, a letter a token."""
    return "".join(chr(ord("a") + i) for i in ids)


@given(
    stop=st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3),
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
)
def test_the_first_token_that_completes_one(stop, tokens, cuts):
    """Whatever the windows are."""
    ends = (n for n in range(1, len(tokens) + 1) if any(s in text(tokens[:n]) for s in stop))
    expected = next(ends, None)
    checker, found = StopStrings(stop, text), None
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for start, end in pairwise(edges):
        kept = checker.kept(7, tokens[start:end])
        if kept is not None:
            found = start + kept
            break
    assert found == expected


def test_a_stop_string_over_as_many_windows_as_it_has_letters():
    checker = StopStrings(["abaab", "bbb"], text)
    assert [checker.kept(0, [token]) for token in (1, 1, 0, 1, 0, 0, 1)] == [None] * 6 + [1]


def test_sequences_do_not_mix():
    checker = StopStrings(["ab"], text)
    assert checker.kept(0, [0]) is None and checker.kept(1, [1]) is None
    assert checker.kept(0, [1, 0]) == 1


@pytest.mark.parametrize("steps", [1, 7])
def test_responses_are_trimmed_behind_a_stop_string(exact_model, cache, make, steps):
    """Against the same run without: cut behind the first place where two tokens spell one of the strings."""
    prompts, params = [[1, 2, 3] * 7, [4] * 16], SamplingParams()
    full = make(exact_model, cache("sparse"), prefill=30).generate(prompts, 8, params, keep_hidden=True)
    pairs = [letters(full.tokens_T[full.slice_of(s)].tolist())[1:3] for s in range(16)]
    stop = sorted({pair for pair in pairs if len(pair) == 2})[:3]
    engine = make(exact_model, cache("sparse"), prefill=30, steps=steps, decode=letters)
    batch = engine.generate(prompts, 8, SamplingParams(stop=stop), keep_hidden=True)
    trimmed = 0
    for s in range(16):
        response = letters(full.tokens_T[full.slice_of(s)].tolist())
        ends = [response.index(string) + 2 for string in stop if string in response]
        length = min(ends, default=len(response))
        trimmed += length < len(response)
        assert batch.lengths_S[s] == length
        for name in ("tokens_T", "logprobs_T", "top_ids_TK", "top_logprobs_TK", "hidden_TE"):
            ours, theirs = getattr(batch, name), getattr(full, name)
            assert torch.equal(ours[batch.slice_of(s)], theirs[full.slice_of(s)][:length]), name
        assert bool(batch.terminated_S[s]) == (bool(ends) or bool(full.terminated_S[s]))
    assert trimmed >= 3


def test_the_prompt_does_not_count(model, cache, make):
    """A stop string of the prompt, and one that the last token of the prompt would begin."""
    prompt, params = [1, 2], SamplingParams(temperature=0.0)
    first = make(model, cache("dense"), (), limit=1).generate([prompt], 1, params).tokens_T.tolist()
    stop = [letters(prompt), letters([2, *first])]
    engine = make(model, cache("dense"), (), limit=1, decode=letters)
    batch = engine.generate([prompt], 1, SamplingParams(temperature=0.0, stop=stop))
    assert batch.tokens_T.tolist() == first and not batch.terminated_S.any()


def test_stop_strings_need_text(model, cache, make):
    with pytest.raises(UserError, match=r"sampling\.stop: \['a'\] needs text"):
        make(model, cache("dense")).generate([[1]], 1, SamplingParams(stop=["a"]))
    with pytest.raises(UserError, match=r"sampling\.stop: .* empty string"):
        SamplingParams(stop=["a", ""])
