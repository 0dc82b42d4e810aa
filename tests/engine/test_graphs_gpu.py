"""Decode steps replayed as CUDA graphs, against the same steps run eagerly.

Axes: T tokens, N selection of them, E hidden size.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector
from sparrow.engine.decode import Drawing, EagerStepper
from sparrow.engine.graphs import GraphStepper
from sparrow.engine.philox import uniforms
from sparrow.engine.prefill import prefill
from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Prompt
from sparrow.engine.window import Look, Window
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.rollout_decoder import RolloutDecoder

pytestmark = pytest.mark.gpu

CONFIG = DecoderConfig(
    vocab_size=101, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=32,
    max_position_embeddings=512,
)  # fmt: skip
LENGTHS = [5, 100, 127, 128, 200, 250]
BLOCKS, LIMIT, TOP_K = 3, 30, 5
BUCKETS = [(rows, blocks) for rows in (1, 2, 4, 8) for blocks in (1, 2, BLOCKS)]
# Rows, and steps to take with them: batches grow and shrink, contexts go over block edges, and back.
PLAN = [([0, 1, 2, 3, 4, 5], 4), ([0, 2, 5], 5), ([0], 3), ([1, 0], 9), ([5, 4, 3, 2, 1], 2), ([1], 20), ([2, 3], 1)]
COOL = SamplingParams(temperature=0.8)
GIB = 2**30


def kv_cache(kind: str, backend: str = "triton") -> DenseKVCache | SparseKVCache:
    if kind == "dense":
        return DenseKVCache(backend=backend)
    selector = HeadSoftmaxSelector()
    if kind == "eager selection":
        selector = CentroidSelector()
        selector.kernel = None
    return SparseKVCache(StepSchedule(pages=[4, 5, 7], bin_width=100), selector, dense_layers=1, backend=backend)


def trained(seed: int, device: torch.device) -> Decoder:
    model = Decoder(CONFIG)
    model.init_weights(seed, InitOptions(std=0.1, embedding_std=0.1))
    return model.to(device)


@pytest.fixture
def copy(device, tmp_path, monkeypatch) -> RolloutDecoder:
    """Weights of the rollout in fp32, with the library's matrix products."""
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path))
    decoder = RolloutDecoder(CONFIG, device, torch.float32)
    decoder.load(trained(0, device))
    return decoder


def empty_rows(device: torch.device) -> Rows:
    window = Window(LIMIT, len(LENGTHS) + 1, TOP_K, CONFIG.hidden_size, device, torch.float32)
    return Rows(len(LENGTHS), BLOCKS, LIMIT, window, device)


def drawing(device: torch.device, params: SamplingParams = COOL) -> Drawing:
    eos_V = torch.zeros(CONFIG.vocab_size, dtype=torch.bool, device=device)
    eos_V[7] = True
    return Drawing(params, eos_V, TOP_K)


@torch.no_grad()
def start(rows: Rows, model, cache) -> None:
    """Prefills every row's prompt, into blocks out of order; each has drawn its first token."""
    count = len(LENGTHS) * BLOCKS
    table = (torch.randperm(count, generator=torch.Generator().manual_seed(0)) + 1).view(-1, BLOCKS).tolist()
    prompts = [
        Prompt(row, [(7 * row + 3 * at) % 100 + 1 for at in range(length)], 1, table[row])
        for row, length in enumerate(LENGTHS)
    ]
    prefill(model, cache, prompts, 4096, rows.device)
    for row, length in enumerate(LENGTHS):
        rows.start(row, table[row], length, uniforms(0, row, 0, LIMIT), length=1, last_token=row + 20)


@torch.no_grad()
def follow(plan, stepper, rows: Rows) -> Look:
    for which, steps in plan:
        longest = int(rows.cached_lengths(torch.tensor(which, device=rows.device)).max()) + steps - 1
        stepper.run(which, min(longest, BLOCKS * 128), steps)
    return rows.look(list(range(len(LENGTHS))))


def assert_same(one: Look, other: Look) -> None:
    """The same tokens, and log-probs and hidden states up to what a padded batch rounds otherwise."""
    for name in ("length_B", "done_B", "terminated_B"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    kept = torch.arange(one.outputs["tokens"].shape[1]) < one.new_B[:, None]
    for name in ("tokens", "top_ids"):
        assert torch.equal(one.outputs[name][kept], other.outputs[name][kept]), name
    for name in ("logprobs", "top_logprobs", "hidden"):
        torch.testing.assert_close(one.outputs[name][kept], other.outputs[name][kept], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dense", "sparse", "eager selection"])
def test_graphs_do_what_eager_steps_do(device, copy, kind):
    cache, rows = kv_cache(kind), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    start(rows, copy, cache)
    eager = follow(PLAN, EagerStepper(copy, cache, rows, drawing(device)), rows)
    assert eager.new_B.tolist()[1:3] != [0, 0] and eager.new_B.max() >= 12
    with torch.no_grad():
        stepper = GraphStepper(copy, cache, rows, drawing(device), BUCKETS)
    assert sorted(stepper.graphs) == sorted(BUCKETS)
    start(rows, copy, cache)
    assert_same(follow(PLAN, stepper, rows), eager)


def test_flex_is_captured_too(device, copy):
    plan = [([0, 2, 5], 5), ([1, 5], 9)]
    cache, rows = kv_cache("sparse", "flex"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    with torch.no_grad():
        stepper = GraphStepper(copy, cache, rows, drawing(device), [(2, BLOCKS), (4, BLOCKS)])
    start(rows, copy, cache)
    captured = follow(plan, stepper, rows)
    by_triton = kv_cache("sparse")
    by_triton.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    start(rows, copy, by_triton)
    assert_same(captured, follow(plan, EagerStepper(copy, by_triton, rows, drawing(device)), rows))


def test_truncated_sampling_is_captured_too(device, copy):
    """It goes through sorts and scans of the library."""
    params = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02)
    cache, rows = kv_cache("dense"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    with torch.no_grad():
        stepper = GraphStepper(copy, cache, rows, drawing(device, params), [(8, BLOCKS)])
    start(rows, copy, cache)
    captured = follow(PLAN, stepper, rows)
    start(rows, copy, cache)
    assert_same(captured, follow(PLAN, EagerStepper(copy, cache, rows, drawing(device, params)), rows))


def test_graphs_follow_weights_that_are_loaded_in_place(device, copy):
    cache, rows = kv_cache("sparse"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    with torch.no_grad():
        stepper = GraphStepper(copy, cache, rows, drawing(device), BUCKETS)
    start(rows, copy, cache)
    before = follow(PLAN, stepper, rows)
    copy.load(trained(1, device))
    start(rows, copy, cache)
    after = follow(PLAN, stepper, rows)
    assert not torch.equal(before.outputs["tokens"], after.outputs["tokens"])
    start(rows, copy, cache)
    assert_same(after, follow(PLAN, EagerStepper(copy, cache, rows, drawing(device)), rows))


def test_a_capture_changes_no_row(device, copy):
    cache, rows = kv_cache("sparse"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    start(rows, copy, cache)
    state = {name: value for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in state.items()}
    blocks = list(range(1, len(LENGTHS) * BLOCKS + 1))
    pool = cache.swap_out(blocks)
    with torch.no_grad():
        GraphStepper(copy, cache, rows, drawing(device), BUCKETS)
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    assert all(torch.equal(a, b) for a, b in zip(pool, cache.swap_out(blocks), strict=True))


class Hungry:
    """A model that takes a gibibyte of the device at every call, and keeps it."""

    def __init__(self, model: RolloutDecoder) -> None:
        self.model, self.logits = model, model.logits
        self.kept: list[torch.Tensor] = []

    def __call__(self, tokens_T, positions_T, attention):
        self.kept.append(torch.empty(GIB, dtype=torch.uint8, device=tokens_T.device))
        return self.model(tokens_T, positions_T, attention)


@pytest.fixture
def room(device):
    """Leaves this process so many bytes more than it holds, and gives the device back to it at the end."""

    def leave(num_bytes: float) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = (torch.cuda.memory_reserved(device) + num_bytes) / total
        assert fraction < 1, f"these tests need {num_bytes / GIB:.1f} GiB of the device"
        torch.cuda.set_per_process_memory_fraction(fraction, device)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("calls", [4, 5], ids=["in the warm-up", "in the capture"])
def test_where_memory_ends_smaller_batches_take_larger_graphs(device, copy, room, calls):
    """A capture calls the model twice: the third of four graphs finds no memory."""
    cache, rows = kv_cache("sparse"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    start(rows, copy, cache)
    eager = follow(PLAN, EagerStepper(copy, cache, rows, drawing(device)), rows)
    hungry = Hungry(copy)
    room((calls + 0.5) * GIB)
    buckets = [(rows, BLOCKS) for rows in (1, 2, 4, 8)]
    with torch.no_grad(), pytest.warns(UserWarning, match=r"out of memory after 2 of 4 CUDA graphs.*engine\.kv_tokens"):
        stepper = GraphStepper(hungry, cache, rows, drawing(device), buckets)
    assert sorted(stepper.graphs) == [(4, BLOCKS), (8, BLOCKS)]
    start(rows, copy, cache)
    assert_same(follow(PLAN, stepper, rows), eager)


def test_without_memory_for_one_graph_there_is_no_stepper(device, copy, room):
    cache, rows = kv_cache("dense"), empty_rows(device)
    cache.allocate(CONFIG, len(LENGTHS) * BLOCKS, device, torch.float32)
    room(0.5 * GIB)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        GraphStepper(Hungry(copy), cache, rows, drawing(device), [(8, BLOCKS)])
