"""The engine on a GPU: packed weights, fused kernels and CUDA graphs, against gather + SDPA and against the trainer.

Sequences are compared up to rounding: where a batch is padded or split otherwise, a random number on the edge of a
token's interval may take its neighbour, and after that a sequence is another one.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from triton.runtime.jit import JITFunction

from sparrow.attention.packed import PackedCausal
from sparrow.attention.tiled import TiledSparse
from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.prefill import prefill
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Prompt
from sparrow.errors import UserError
from sparrow.kernels import add_norm, append, draw, linear, page_attend, page_select, page_write
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.rollout_decoder import RolloutDecoder
from sparrow.training.packing import pack, response_hidden

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(
    vocab_size=101, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=32,
    max_position_embeddings=1024,
)  # fmt: skip
LENGTHS = [20, 57, 128, 131, 205]
PROMPTS = [[(7 * row + 3 * at) % 100 + 1 for at in range(length)] for row, length in enumerate(LENGTHS)]
T1 = SamplingParams()
KERNELS = (add_norm, append, draw, linear, page_attend, page_select, page_write)


def trained(seed: int, device: torch.device) -> Decoder:
    model = Decoder(CONFIG)
    model.init_weights(seed, InitOptions(std=0.1, embedding_std=0.1))
    return model.to(device)


@pytest.fixture
def model(device: torch.device) -> Decoder:
    return trained(0, device)


@pytest.fixture(autouse=True)
def no_options_of_this_user(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path))


def kv_cache(kind: str, backend: str = "triton") -> DenseKVCache | SparseKVCache:
    if kind == "dense":
        return DenseKVCache(backend=backend)
    budget = StepSchedule(pages=[4, 5, 7], bin_width=100)
    return SparseKVCache(budget, HeadSoftmaxSelector(), dense_layers=1, backend=backend)


def make(model, cache, rows=7, kv_tokens=8192, limit=60, eos=(0,), **options) -> Engine:
    config = EngineConfig(max_rows=rows, kv_tokens=kv_tokens, max_new_tokens=limit, tune=False, **options)
    return Engine(model, cache, eos, config, seed=1, top_k=5)


def assert_close(one, other, at_least: int, atol: float = 1e-3) -> None:
    """Most sequences are equal, and of these the log-probs and hidden states are close."""
    equal = 0
    for s in range(one.num_sequences):
        a, b = one.slice_of(s), other.slice_of(s)
        if torch.equal(one.tokens_T[a], other.tokens_T[b]):
            equal += 1
            torch.testing.assert_close(one.logprobs_T[a], other.logprobs_T[b], atol=atol, rtol=0)
            torch.testing.assert_close(one.top_logprobs_TK[a], other.top_logprobs_TK[b], atol=atol, rtol=0)
            torch.testing.assert_close(one.hidden_TE[a], other.hidden_TE[b], atol=atol, rtol=0)
            assert one.terminated_S[s] == other.terminated_S[s]
    assert equal >= at_least, f"{equal} of {one.num_sequences} sequences are equal"


@pytest.mark.parametrize(("kind", "backend"), [("dense", "triton"), ("sparse", "triton"), ("sparse", "flex")])
def test_compiled_backends_generate_what_gather_does(model, kind, backend):
    """Two rows: FlexAttention compiles once for each bucket of the batch."""
    gather, compiled = (
        make(model, kv_cache(kind, name), rows=2).generate(PROMPTS, 2, T1, keep_hidden=True)
        for name in ("gather", backend)
    )
    assert len(set(gather.lengths_S.tolist())) > 2, "rows end at different times"
    assert_close(compiled, gather, at_least=9)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_alone_as_in_a_crowd(model, kind):
    crowd = make(model, kv_cache(kind)).generate(PROMPTS, 4, T1)
    equal = 0
    for number in (1, 4):
        alone = make(model, kv_cache(kind), rows=1).generate([PROMPTS[number]], 4, T1, prompt_numbers=[number])
        for sample in range(4):
            a, b = alone.slice_of(sample), crowd.slice_of(4 * number + sample)
            if torch.equal(alone.tokens_T[a], crowd.tokens_T[b]):
                equal += 1
                torch.testing.assert_close(alone.logprobs_T[a], crowd.logprobs_T[b], atol=1e-3, rtol=0)
    assert equal >= 7


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_preempted_as_not_preempted(model, kind):
    tight, roomy = make(model, kv_cache(kind), 8, 1024, 200, ()), make(model, kv_cache(kind), 8, 8192, 200, ())
    batches = [engine.generate(PROMPTS, 2, T1, keep_hidden=True) for engine in (tight, roomy)]
    assert tight.stats.preemptions > 0 and roomy.stats.preemptions == 0
    assert_close(*batches, at_least=9)


@pytest.mark.parametrize("selector", [CentroidSelector(), HeadSoftmaxSelector()], ids=lambda s: type(s).__name__)
def test_a_budget_that_covers_the_sequence_is_dense(model, selector):
    covered = SparseKVCache(FixedBudget(pages=17), selector, dense_layers=0, backend="triton")
    dense, sparse = (
        make(model, cache).generate(PROMPTS, 2, T1, keep_hidden=True) for cache in (kv_cache("dense"), covered)
    )
    assert_close(sparse, dense, at_least=9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_tokens", [128, 100, 33])
@torch.no_grad()
def test_chunked_prefill_as_whole(device, model, dtype, max_tokens):
    """With grouped heads, which the GPU's kernels of SDPA treat in their own ways."""
    copy = RolloutDecoder(CONFIG, device, dtype)
    copy.load(model)
    prompts = [Prompt(0, PROMPTS[4], 1, [3, 1]), Prompt(1, PROMPTS[2], 1, [4]), Prompt(2, PROMPTS[0], 1, [2])]
    hidden, pools = [], []
    for tokens in (1000, max_tokens):
        cache = kv_cache("sparse")
        cache.allocate(CONFIG, 4, device, dtype)
        found = prefill(copy, cache, prompts, tokens, device)
        hidden.append(torch.stack([found[index] for index in range(3)]))
        pools.append(cache.swap_out([1, 2, 3, 4]))
    atol = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(*hidden, atol=atol, rtol=0)
    for chunked, whole in zip(*pools, strict=True):
        torch.testing.assert_close(chunked, whole, atol=atol, rtol=0)


def test_after_a_sync_nothing_of_the_old_weights_is_left(device, model):
    engine = make(model, kv_cache("sparse"))
    engine.generate(PROMPTS, 2, T1)
    model.load_state_dict(trained(1, device).state_dict())
    engine.sync()
    after = engine.generate(PROMPTS, 2, T1, keep_hidden=True)
    fresh = make(trained(1, device), kv_cache("sparse")).generate(PROMPTS, 2, T1, keep_hidden=True)
    assert after.versions_S.tolist() == [1] * 10
    assert_close(after, fresh, at_least=10)


@pytest.mark.parametrize("dtype", [None, "bfloat16"], ids=["fp32", "bf16"])
@pytest.mark.parametrize("params", [T1, SamplingParams(temperature=0.6)], ids=["T1", "T.6"])
def test_log_probs_are_the_trainers(device, model, params, dtype):
    batch = make(model, kv_cache("dense"), dtype=dtype).generate(PROMPTS, 2, params)
    sequences = [prompt + batch.tokens_T[batch.slice_of(s)].tolist() for s, prompt in enumerate(batch.prompts)]
    attention = PackedCausal([len(sequence) for sequence in sequences], device)
    with torch.no_grad():
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        hidden_TE = model(tokens_T, attention.positions_T.to(device), attention)
        logprobs_TV = (model.logits(hidden_TE) / params.temperature).log_softmax(-1).cpu()
    difference, start = [], 0
    for s, sequence in enumerate(sequences):
        at = torch.arange(len(batch.prompts[s]), len(sequence))
        theirs = logprobs_TV[start + at - 1, torch.tensor(sequence)[at]]
        difference.append((theirs - batch.logprobs_T[batch.slice_of(s)]).abs())
        start += len(sequence)
    if dtype is None:
        assert torch.cat(difference).max() < 1e-3
    else:  # rounding, not another distribution: a temperature forgotten would show as .4 and more
        assert 1e-4 < torch.cat(difference).mean() < 0.05


@torch.no_grad()
def test_sparse_log_probs_are_those_of_the_training_form(device, model):
    """The pages that a rollout's kernels chose are those of the page lists, over whole sequences."""
    cache = kv_cache("sparse")
    batch = make(model, cache).generate(PROMPTS, 2, T1)
    assert (batch.pages_T < -(-batch.cached_length_T // 16)).float().mean() > 0.3, "the schedule drops pages"
    micro = pack(batch, range(batch.num_sequences), device)
    attention = cache.training(micro.lengths, micro.prompt_lengths, device)
    logprobs_NV = model.logits(response_hidden(model, micro, attention)).log_softmax(-1)
    assert isinstance(attention.chosen, TiledSparse)
    logprobs_N = logprobs_NV.gather(1, micro.targets_N[:, None])[:, 0].cpu()
    torch.testing.assert_close(logprobs_N, batch.logprobs_T[micro.index_N], atol=1e-3, rtol=0)


class Sharpened(Decoder):
    """Says something else than its weights."""

    def logits(self, hidden_NE):
        return 3 * super().logits(hidden_NE)


def test_a_copy_that_is_another_model_is_refused(device):
    model = Sharpened(CONFIG)
    model.init_weights(0, InitOptions(std=0.1, embedding_std=0.1))
    with pytest.raises(RuntimeError, match=r"differ from the trainer's by .* nats"):
        make(model.to(device), kv_cache("dense")).generate(PROMPTS, 1, T1)


def test_sleep_gives_the_memory_back(device, model):
    engine = make(model, kv_cache("sparse"), kv_tokens=2**18)
    pool = 2**18 * engine.cache.bytes_per_token(CONFIG, torch.float32)
    make(model, kv_cache("sparse")).generate(PROMPTS, 1, T1)  # what the libraries keep for good
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    first = engine.generate(PROMPTS, 2, T1, keep_hidden=True)
    assert torch.cuda.memory_allocated(device) > before + pool
    engine.sleep()
    assert torch.cuda.memory_allocated(device) < before + pool / 2
    assert_close(engine.generate(PROMPTS, 2, T1, keep_hidden=True), first, at_least=10)


def test_a_pool_beyond_the_device_is_refused_with_what_would_fit(model):
    with pytest.raises(UserError, match=r"engine\.kv_tokens: 1000000000 tokens of .* GiB are free.*; at most \d+ "):
        make(model, kv_cache("dense"), kv_tokens=10**9).generate(PROMPTS, 1, T1)


def compilations() -> tuple[int, int]:
    """Variants of our kernels that Triton holds, and graphs that torch.compile made."""
    functions = [f for module in KERNELS for f in vars(module).values() if isinstance(f, JITFunction)]
    assert len(functions) > 8
    held = sum(len(caches[0]) for function in functions for caches in function.device_caches.values())
    return held, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_nothing_is_compiled_after_the_warm_up(model, backend):
    """Within one context bucket, here of three blocks.

    Triton tells numbers that 16 divides from others: a packed prefill of each kind is part of the warm-up.
    """
    engine = make(model, kv_cache("sparse", backend), rows=2)
    for lengths in ([208, 64], [205, 40]):
        engine.generate([[5] * length for length in lengths], 1, T1)
    warm = compilations()
    assert warm[0] > 0
    for lengths in ([1, 210], [197, 128, 64], [250, 3]):
        engine.generate([[length % 100 + 1] * length for length in lengths], 2, SamplingParams(temperature=0.6))
    assert compilations() == warm
