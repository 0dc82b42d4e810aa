"""What must change nothing in a sequence, to the last bit: neighbours, windows, preemption, sleep."""

from __future__ import annotations

import pytest
import torch

from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError

PROMPTS = [[1, 2, 3] * 7, [4] * 16, [5, 6, 7, 8, 9] * 5, [2] * 17]
ALONE = 30  # tokens of a prefill pass: no two of the prompts fit
T1 = SamplingParams()
KINDS = pytest.mark.parametrize("kind", ["dense", "sparse"])


@KINDS
def test_alone_is_in_a_crowd(exact_model, cache, make, kind):
    crowd = make(exact_model, cache(kind), prefill=ALONE, limit=90).generate(PROMPTS, 3, T1)
    for prompt in range(4):
        engine = make(exact_model, cache(kind), prefill=ALONE, limit=90, rows=1)
        alone = engine.generate([PROMPTS[prompt]], 3, T1, prompt_numbers=[prompt])
        at = torch.isin(crowd.sequence_T, torch.arange(3 * prompt, 3 * prompt + 3))
        assert torch.equal(crowd.tokens_T[at], alone.tokens_T)
        assert torch.equal(crowd.logprobs_T[at], alone.logprobs_T)
        assert torch.equal(crowd.top_logprobs_TK[at], alone.top_logprobs_TK)


@KINDS
@pytest.mark.parametrize("steps", [2, 7, 100])
def test_how_often_the_host_looks_changes_nothing(exact_model, cache, make, assert_equal, kind, steps):
    batches = [
        make(exact_model, cache(kind), prefill=ALONE, rows=5, steps=n).generate(PROMPTS, 3, T1, keep_hidden=True)
        for n in (1, steps)
    ]
    assert len(set(batches[0].lengths_S.tolist())) > 3, "rows end within windows"
    assert_equal(*batches)


@KINDS
@pytest.mark.parametrize("steps", [1, 5])
def test_preempted_is_not_preempted(exact_model, cache, make, assert_equal, kind, steps):
    """The pool holds one sequence and a prompt more: 25 + 90 tokens are 8 blocks, and 2."""
    common = {"prefill": ALONE, "limit": 90, "eos": (), "steps": steps}
    roomy = make(exact_model, cache(kind), **common)
    tight = make(exact_model, cache(kind), kv_tokens=10 * 16, **common)
    batches = [engine.generate(PROMPTS, 3, T1, keep_hidden=True) for engine in (roomy, tight)]
    assert roomy.stats.preemptions == 0 and tight.stats.preemptions > 2
    assert tight.stats.swapped_tokens > 16 * tight.stats.preemptions
    assert tight.stats.peak_blocks <= 10 < roomy.stats.peak_blocks
    assert_equal(*batches)


def test_all_finish_at_once(model, cache, make):
    everything = tuple(range(23))
    for limit, eos in ((1, (0,)), (1, everything), (9, everything), (9, ())):
        batch = make(model, cache("sparse"), eos, rows=5, limit=limit, steps=4).generate(PROMPTS, 3, T1)
        length = limit if not eos else 1
        assert batch.lengths_S.tolist() == [length] * 12
        last = batch.tokens_T[batch.offsets_S + batch.lengths_S - 1]
        assert torch.equal(batch.terminated_S, torch.isin(last, torch.tensor(eos)))


@pytest.mark.parametrize("length", [15, 16, 17, 127, 128, 129])
@KINDS
def test_prompts_at_the_edges_of_pages_and_blocks(exact_model, make, kind, length, cache, assert_equal):
    """The same tokens whether blocks are of one page, so that each edge is a block's, or of more than the sequence."""
    prompt = [(7 * i) % 22 + 1 for i in range(length)]
    batches = []
    for block_size in (16, 256):
        paged = cache(kind)
        paged.block_size = block_size
        batches.append(make(exact_model, paged, (), limit=20).generate([prompt], 2, T1, keep_hidden=True))
    assert_equal(*batches)


def test_sleep_and_wake(exact_model, cache, make, assert_equal):
    paged = cache("sparse")
    engine = make(exact_model, paged, prefill=ALONE)
    first = engine.generate(PROMPTS, 2, T1, keep_hidden=True)
    pool = paged.pool
    assert_equal(first, engine.generate(PROMPTS, 2, T1, keep_hidden=True))
    assert paged.pool is pool, "kept between calls"
    engine.sleep()
    engine.sleep()
    assert not hasattr(paged, "pool")
    assert_equal(first, engine.generate(PROMPTS, 2, T1, keep_hidden=True))
    engine.sync()
    assert not hasattr(paged, "pool"), "no key of old weights outlives them"
    again = engine.generate(PROMPTS, 2, T1)
    assert first.versions_S.tolist() == [0] * 8 and again.versions_S.tolist() == [1] * 8


def test_an_error_releases_the_pool(model, cache, make):
    paged = cache("dense")

    def fail(tokens: int, finished: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(model, paged).generate(PROMPTS, 2, T1, on_step=fail)
    assert not hasattr(paged, "pool")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"eos": (0, 23)}, "EOS id 23 is not in the model's vocabulary of 23"),
        ({"eos": (-1,)}, "EOS id -1"),
        ({"steps": 0}, r"engine\.steps_per_look: 0"),
        ({"prefill": 0}, r"engine\.prefill_tokens: 0"),
    ],
)
def test_impossible_settings_are_named(model, cache, make, arguments, words):
    with pytest.raises(UserError, match=words):
        make(model, cache("dense"), **arguments)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1] * 100, r"engine\.kv_tokens: the pool has 64 tokens; a prompt of 100 with max_new_tokens 40 needs 256"),
        ([1] * 473, "prompt 1 has 473 tokens; .* leaves room for 472"),
        ([], "prompt 1 is empty"),
    ],
)
def test_impossible_prompts_are_refused_before_any_work(model, cache, make, prompt, words):
    paged = cache("dense")
    with pytest.raises(UserError, match=words):
        make(model, paged, kv_tokens=64).generate([[1], prompt], 1, T1)
    assert not hasattr(paged, "pool")
