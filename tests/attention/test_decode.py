"""Decode attention of every backend against the eager reference, which is the specification."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparrow.attention.backend import decode_attention
from sparrow.attention.gather import GatherDecode
from sparrow.attention.reference import attend_reference, select_reference
from sparrow.components.budget import FixedBudget
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector, QuestSelector, SegmentSoftmaxSelector
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig

SELECTORS = [CentroidSelector(), HeadSoftmaxSelector(), QuestSelector(), SegmentSoftmaxSelector(2, fp8=True)]
PAGE, BLOCK = 4, 16
CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16
)


def fill(cache, lengths: list[int], seed: int, device="cpu", dtype=torch.float32, shuffle: bool = True):
    """A pool with random keys and values, all but each row's last token prefilled; returns what the reference needs."""
    rng = torch.Generator().manual_seed(seed)
    block = cache.block_size
    blocks_per_row = max(lengths) // block + 1
    total = blocks_per_row * len(lengths) + 3
    cache.allocate(CONFIG, total, torch.device(device), dtype)
    order = torch.randperm(total, generator=rng) + 1 if shuffle else torch.arange(total) + 1
    table_BN = order[: blocks_per_row * len(lengths)].view(len(lengths), -1).to(device)
    rows = []
    for row, length in enumerate(lengths):
        q = torch.randn(length, 6, 16, generator=rng).to(device, dtype)
        k, v = (torch.randn(length, 2, 16, generator=rng).to(device, dtype) for _ in range(2))
        position = torch.arange(length, device=device)
        slots = table_BN[row, position // block] * block + position % block
        if length > 1:
            prefill = cache.prefill(slots[:-1], [length - 1])
            for layer in range(CONFIG.num_layers):
                prefill(layer, q[:-1], k[:-1], v[:-1])
        rows.append((q[-1], k, v))
    return table_BN, torch.tensor(lengths, device=device), rows


def step(cache, layer: int, table_BN: Tensor, lengths_B: Tensor, rows) -> Tensor:
    q, k, v = (torch.stack(x) for x in zip(*[(q, k[-1], v[-1]) for q, k, v in rows], strict=True))
    return cache.decode(table_BN, lengths_B)(layer, q, k, v)


def expected(cache: SparseKVCache, rows, budget: int) -> Tensor:
    outs = []
    for q, k, v in rows:
        pages = select_reference(q, k, budget, cache.pattern.selector, cache.page_size, 1, 2)
        outs.append(attend_reference(q, k, v, pages, cache.page_size))
    return torch.stack(outs)


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("budget", [3, 5, 8])
def test_sparse_decode_equals_the_reference(selector, budget):
    lengths = [1, 3, 4, 5, 12, 16, 17, 33, 47, 64, 65]  # page and block edges, rows below and above the budget
    cache = SparseKVCache(FixedBudget(pages=budget), selector, PAGE, BLOCK, dense_layers=1, backend="gather")
    table, lengths_B, rows = fill(cache, lengths, seed=budget)
    torch.testing.assert_close(step(cache, 1, table, lengths_B, rows), expected(cache, rows, budget))


def test_dense_layers_and_the_dense_cache_read_everything():
    lengths = [5, 40, 64]
    sparse = SparseKVCache(FixedBudget(pages=3), CentroidSelector(), PAGE, BLOCK, dense_layers=1)
    table, lengths_B, rows = fill(sparse, lengths, seed=1)
    dense = DenseKVCache(PAGE, BLOCK)
    fill(dense, lengths, seed=1)
    whole = expected(sparse, rows, budget=1000)
    torch.testing.assert_close(step(dense, 0, table, lengths_B, rows), whole)
    assert torch.equal(step(sparse, 0, table, lengths_B, rows), step(dense, 0, table, lengths_B, rows))
    assert (step(sparse, 1, table, lengths_B, rows) - whole).abs().max() > 1e-3, "budget 3 must drop pages"


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_budget_that_covers_the_sequence_is_dense_bit_for_bit(selector):
    lengths = [7, 33, 64]
    outputs = []
    for cache in (
        DenseKVCache(PAGE, BLOCK),
        SparseKVCache(FixedBudget(pages=16), selector, PAGE, BLOCK, dense_layers=0),
    ):
        table, lengths_B, rows = fill(cache, lengths, seed=2)
        outputs.append(step(cache, 1, table, lengths_B, rows))
    assert torch.equal(*outputs)


def test_a_covered_row_beside_a_starved_one_is_still_dense():
    cache = SparseKVCache(FixedBudget(pages=8), CentroidSelector(), PAGE, BLOCK, dense_layers=0)
    table, lengths_B, rows = fill(cache, [32, 64], seed=3)
    out = step(cache, 1, table, lengths_B, rows)
    torch.testing.assert_close(out[0], expected(cache, rows[:1], 1000)[0])


def test_where_pages_lie_in_the_pool_changes_nothing():
    outputs = []
    for shuffle in (False, True):
        cache = SparseKVCache(FixedBudget(pages=5), HeadSoftmaxSelector(), PAGE, BLOCK, dense_layers=0)
        table, lengths_B, rows = fill(cache, [33, 50, 64], seed=4, shuffle=shuffle)
        if not shuffle:
            state = rows
        outputs.append(step(cache, 1, table, lengths_B, rows))
    torch.testing.assert_close(outputs[0], expected(cache, state, 5))
    torch.testing.assert_close(outputs[1], expected(cache, rows, 5))


def test_permuting_blocks_of_one_sequence_changes_no_bit():
    outputs = []
    for permute in (False, True):
        cache = SparseKVCache(FixedBudget(pages=5), CentroidSelector(), PAGE, BLOCK, dense_layers=0)
        table, lengths_B, rows = fill(cache, [33, 50, 64], seed=5, shuffle=False)
        if permute:
            target = torch.randperm(int(table.max()), generator=torch.Generator().manual_seed(0)) + 1
            moved = target[table - 1]
            pool = cache.pool
            for tensors, size in ((pool.keys_KSD, BLOCK), (pool.values_KSD, BLOCK)):
                for i, x in enumerate(tensors):
                    tensors[i] = move(x, table, moved, size)
            for i, x in pool.landmarks_KPMD.items():
                pool.landmarks_KPMD[i] = move(x, table, moved, BLOCK // PAGE)
            table = moved
        outputs.append(step(cache, 1, table, lengths_B, rows))
    assert torch.equal(*outputs)


def move(x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
    out = torch.zeros_like(x)
    for a, b in zip(source.flatten().tolist(), target.flatten().tolist(), strict=True):
        out[:, b * size : (b + 1) * size] = x[:, a * size : (a + 1) * size]
    return out


def test_landmarks_written_in_decode_equal_those_of_prefill():
    lengths = [37]
    filled = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), PAGE, BLOCK, dense_layers=0)
    table, _, rows = fill(filled, lengths, seed=6)
    _, k, v = rows[0]
    grown = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), PAGE, BLOCK, dense_layers=0)
    grown.allocate(CONFIG, int(table.max()) + 3, torch.device("cpu"), torch.float32)
    for t in range(36):
        attend = grown.decode(table, torch.tensor([t + 1]))
        attend(0, torch.randn(1, 6, 16), k[None, t], v[None, t])
    complete = 36 // PAGE
    logical, per_block = torch.arange(complete), BLOCK // PAGE
    pages = table[0, logical // per_block] * per_block + logical % per_block
    torch.testing.assert_close(grown.pool.landmarks_KPMD[0][:, pages], filled.pool.landmarks_KPMD[0][:, pages])


# Pages of 16 and blocks of 128: both sides of their edges, within a budget of four pages and beyond it.
EDGES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257]


@pytest.mark.gpu
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_compiled_backends_equal_the_reference(backend, selector, device):
    cache = SparseKVCache(FixedBudget(pages=4), selector, dense_layers=1, backend=backend)
    table, lengths_B, rows = fill(cache, EDGES, seed=7, device=device)
    host = [tuple(x.cpu() for x in row) for row in rows]
    for layer, budget in ((1, 4), (0, 1000)):
        got = step(cache, layer, table, lengths_B, rows).cpu()
        torch.testing.assert_close(got, expected(cache, host, budget), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_budget_that_covers_the_sequence_is_dense_on_a_gpu(selector, device):
    """Close, not equal in every bit: pages of 16 and blocks of 128 are summed in another order."""
    outputs = []
    for cache in (
        DenseKVCache(backend="triton"),
        SparseKVCache(FixedBudget(pages=24), selector, dense_layers=0, backend="triton"),
    ):
        table, lengths_B, rows = fill(cache, EDGES, seed=8, device=device)
        outputs.append(step(cache, 1, table, lengths_B, rows))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_auto_takes_triton_where_it_can(device):
    from sparrow.attention.listed import attend_triton

    assert decode_attention("auto", device, torch.bfloat16, 16, 128).args == (attend_triton,)
    assert decode_attention("auto", device, torch.bfloat16, 8, 128) is GatherDecode


def test_auto_takes_gather_on_the_cpu():
    assert decode_attention("auto", torch.device("cpu"), torch.float32, 16, 64) is GatherDecode


@pytest.mark.parametrize("backend", ["triton", "flex"])
@pytest.mark.parametrize(
    ("device_type", "dtype", "page_size", "head_dim", "words"),
    [
        ("cpu", torch.float32, 16, 64, "a CUDA device, this run is on cpu"),
        ("cuda", torch.float64, 16, 64, "torch.bfloat16, the cache is torch.float64"),
        ("cuda", torch.float32, 8, 64, "page_size 8 to be a power of two and at least 16"),
        ("cuda", torch.float32, 24, 64, "page_size 24 to be a power of two and at least 16"),
        ("cuda", torch.float32, 16, 8, "head_dim 8 to be a power of two and at least 16"),
        ("cuda", torch.float32, 16, 80, "head_dim 80 to be a power of two and at least 16"),
        ("cuda", torch.float32, 16, 256, "head_dim 256 in torch.float32 to have at most 512 bytes"),
    ],
)
def test_what_the_kernels_lack_is_refused_with_value_and_limit(backend, device_type, dtype, page_size, head_dim, words):
    with pytest.raises(UserError, match=rf"kv_cache.backend: {backend} needs .*{words}; use gather or auto"):
        decode_attention(backend, torch.device(device_type), dtype, page_size, head_dim)


def test_the_refusal_comes_before_the_pool():
    cache = DenseKVCache(backend="triton")
    with pytest.raises(UserError, match="triton needs a CUDA device"):
        cache.allocate(CONFIG, 4, torch.device("cpu"), torch.float32)
    assert not hasattr(cache, "pool")
