"""The engine against a plain loop over the whole sequence, without a cache."""

from __future__ import annotations

import pytest
import torch

from sparrow.attention.packed import PackedCausal
from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.philox import uniforms
from sparrow.engine.sampler import SamplingParams, sample
from sparrow.errors import Interrupted, UserError
from sparrow.models.decoder import Decoder, InitOptions

PROMPTS = [[1, 2, 3], [4] * 16, [5, 6, 7, 8, 9] * 5, [2]]
EOS = (0, 22)


def make(model: Decoder, cache=None, rows: int = 5, limit: int = 40, kv_tokens: int = 1024, eos=EOS, seed: int = 3):
    config = EngineConfig(max_rows=rows, kv_tokens=kv_tokens, max_new_tokens=limit)
    return Engine(model, cache or DenseKVCache(4, 16), eos, config, seed, top_k=5)


def sparse(budget=None, selector=None, dense_layers: int = 1) -> SparseKVCache:
    budget = budget or StepSchedule(pages=[3, 4, 5], bin_width=12)
    return SparseKVCache(budget, selector or HeadSoftmaxSelector(), 4, 16, dense_layers=dense_layers)


@torch.no_grad()
def plain_loop(
    model, prompt: list[int], number: int, sample_number: int, params: SamplingParams, limit: int, attention
):
    """One token at a time, everything recomputed; the specification of `Engine.generate`."""
    tokens, logprobs = list(prompt), []
    u = uniforms(3, number, sample_number, limit)
    for t in range(limit):
        hidden = model(torch.tensor(tokens), torch.arange(len(tokens)), attention(len(tokens)))
        drawn = sample(model.logits(hidden[-1:]), u[t : t + 1], params, 5)
        tokens.append(int(drawn.tokens_B))
        logprobs.append(float(drawn.logprobs_B))
        if tokens[-1] in EOS:
            break
    return tokens[len(prompt) :], logprobs


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.6, top_p=0.9)], ids=["T1", "T.6"])
def test_generate_equals_the_plain_loop(model, kind, params):
    cache = sparse() if kind == "sparse" else DenseKVCache(4, 16)
    batch = make(model, cache).generate(PROMPTS, 3, params, prompt_numbers=[9, 8, 7, 6], keep_hidden=True)
    assert batch.num_sequences == 12 and batch.groups_S.tolist() == [g for g in range(4) for _ in range(3)]
    assert len(set(batch.lengths_S.tolist())) > 3, "rows end at different times"
    for s in range(12):
        prompt, at = batch.prompts[s], batch.slice_of(s)

        def attention(n: int, length: int = len(prompt)):
            return cache.training([n], [length], torch.device("cpu"))

        number = [9, 8, 7, 6][int(batch.groups_S[s])]
        tokens, logprobs = plain_loop(model, prompt, number, int(batch.samples_S[s]), params, 40, attention)
        assert batch.tokens_T[at].tolist() == tokens
        torch.testing.assert_close(batch.logprobs_T[at], torch.tensor(logprobs), atol=2e-5, rtol=0)
        assert bool(batch.terminated_S[s]) == (tokens[-1] in EOS)
    if kind == "sparse":
        pages = -(-batch.cached_length_T // 4)
        assert (batch.pages_T < pages).float().mean() > 0.3, "the schedule drops pages"


def test_a_sequence_does_not_depend_on_rows_neighbours_or_pool(model):
    reference = make(model, sparse(), rows=12).generate(PROMPTS, 3, SamplingParams())
    for rows, kv_tokens in ((1, 1024), (2, 256), (7, 512)):
        other = make(model, sparse(), rows=rows, kv_tokens=kv_tokens).generate(PROMPTS, 3, SamplingParams())
        assert torch.equal(reference.tokens_T, other.tokens_T)
        torch.testing.assert_close(reference.logprobs_T, other.logprobs_T, atol=1e-5, rtol=0)
    alone = make(model, sparse()).generate(PROMPTS[2:3], 3, SamplingParams(), prompt_numbers=[2])
    assert torch.equal(alone.tokens_T, torch.cat([reference.tokens_T[reference.slice_of(s)] for s in (6, 7, 8)]))


@pytest.mark.parametrize("selector", [CentroidSelector(), HeadSoftmaxSelector()], ids=lambda s: type(s).__name__)
def test_sparse_with_budget_above_length_is_dense_bit_for_bit(model, selector):
    dense = make(model).generate(PROMPTS, 3, SamplingParams(), keep_hidden=True)
    cache = sparse(FixedBudget(pages=100), selector, 0)
    covered = make(model, cache).generate(PROMPTS, 3, SamplingParams(), keep_hidden=True)
    for name in ("tokens_T", "logprobs_T", "top_ids_TK", "top_logprobs_TK", "hidden_TE", "pages_T"):
        assert torch.equal(getattr(dense, name), getattr(covered, name)), name


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_dense_engine_and_trainer_agree(model, temperature):
    """Complaint of trl#4159: log-probs that are not of the sampling distribution make the ratio 2 at T = .6."""
    batch = make(model).generate(PROMPTS, 4, SamplingParams(temperature=temperature), keep_hidden=True)
    sequences = [p + batch.tokens_T[batch.slice_of(s)].tolist() for s, p in enumerate(batch.prompts)]
    attention = PackedCausal([len(s) for s in sequences])
    with torch.no_grad():
        hidden = model(
            torch.tensor([token for sequence in sequences for token in sequence]), attention.positions_T, attention
        )
        logprobs = (model.logits(hidden) / temperature).log_softmax(-1)
    start, ratios = 0, []
    for s, prompt in enumerate(batch.prompts):
        rows = torch.arange(start + len(prompt) - 1, start + len(sequences[s]) - 1)
        chosen = logprobs[rows, batch.tokens_T[batch.slice_of(s)]]
        ratios.append((chosen - batch.logprobs_T[batch.slice_of(s)]).exp())
        start += len(sequences[s])
    assert torch.cat(ratios).sub(1).abs().max() < 1e-3


def test_new_weights_meet_no_old_cache(model):
    """Complaints of NeMo-RL#4018 and prime-rl#1651: prefix KV of old weights reused."""
    engine = make(model, sparse())
    engine.generate(PROMPTS, 2, SamplingParams())
    changed = Decoder(model.config)
    changed.init_weights(1, InitOptions(std=0.2, embedding_std=0.1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(changed.state_dict())
    try:
        engine.sync()
        after = engine.generate(PROMPTS, 2, SamplingParams())
    finally:
        model.load_state_dict(before)
    fresh = make(changed, sparse()).generate(PROMPTS, 2, SamplingParams())
    assert after.versions_S.tolist() == [1] * 8
    assert torch.equal(after.tokens_T, fresh.tokens_T) and torch.equal(after.logprobs_T, fresh.logprobs_T)


def test_stops_on_every_eos_id_and_at_the_limit(model):
    batch = make(model, limit=60, eos=(0, 22)).generate(PROMPTS, 8, SamplingParams())
    last = batch.tokens_T[batch.offsets_S + batch.lengths_S - 1]
    assert {0, 22} <= set(last[batch.terminated_S].tolist()), "both ids end responses"
    assert (batch.lengths_S[~batch.terminated_S] == 60).all()
    inside = torch.ones_like(batch.tokens_T, dtype=torch.bool)
    inside[batch.offsets_S + batch.lengths_S - 1] = False
    assert not torch.isin(batch.tokens_T[inside], torch.tensor(EOS)).any()


def test_interrupting_leaves_the_engine_usable(model):
    engine = make(model)

    def stop(tokens: int, finished: int) -> None:
        if tokens > 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        engine.generate(PROMPTS, 3, SamplingParams(), on_step=stop)
    again = engine.generate(PROMPTS, 3, SamplingParams())
    assert torch.equal(again.tokens_T, make(model).generate(PROMPTS, 3, SamplingParams()).tokens_T)


def test_bad_input_is_named(model):
    with pytest.raises(UserError, match="prompt 1 is empty"):
        make(model).generate([[1], []], 1, SamplingParams())
    with pytest.raises(UserError, match="0 prompts with 1 samples"):
        make(model).generate([], 1, SamplingParams())
    with pytest.raises(UserError, match="1 prompts with 0 samples"):
        make(model).generate([[1]], 0, SamplingParams())
    with pytest.raises(UserError, match="prompt 0 has token ids from -1 to 1; the vocabulary"):
        make(model).generate([[1, -1]], 1, SamplingParams())
    with pytest.raises(UserError, match="room for 472"):
        make(model).generate([[1] * 473], 1, SamplingParams())
    with pytest.raises(UserError, match=r"engine.max_rows: 0"):
        make(model, rows=0)
