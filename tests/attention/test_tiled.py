"""Sparse training attention by page lists against the masked form, which is the specification, and against decode.

Axes: T packed tokens, H query heads, K KV heads, G = H / K, D head dim, X tiles.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention import tile_lists
from sparrow.attention.masked import MaskedSparse
from sparrow.attention.packed import PackedCausal
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.reference import select_reference
from sparrow.attention.sparse import SparseAttention
from sparrow.attention.tile_lists import PageLists, Tiles, make_tiles, page_lists, queries_per_tile
from sparrow.attention.tiled import TiledSparse
from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.selector import (
    CentroidSelector,
    HeadMaxSelector,
    HeadSoftmaxSelector,
    QuestSelector,
    SegmentSoftmaxSelector,
    WindowSelector,
)
from sparrow.kernels.page_select import PER_HEAD, score_pages, select_pages
from sparrow.kernels.tile_gradients import page_readers

pytestmark = pytest.mark.gpu

D = 16
# Shorter than its budget, a prompt longer than its own, odd ends, a prompt without response.
LENGTHS, PROMPTS = [7, 172, 18, 20], [3, 156, 1, 20]
SELECTORS = [CentroidSelector(), HeadSoftmaxSelector(), HeadMaxSelector(), QuestSelector(), SegmentSoftmaxSelector(4)]
EAGER = [WindowSelector(), SegmentSoftmaxSelector(3)]  # no kernel knows them


def pattern(selector, page: int = 16, dense_layers: int = 0) -> SparsePattern:
    return SparsePattern(StepSchedule(pages=[3, 4], bin_width=100), selector, page, 1, 2, dense_layers)


def qkv(total: int, heads: tuple[int, int], device, dtype=torch.float32, head_dim: int = D) -> list[Tensor]:
    generator = torch.Generator().manual_seed(total + heads[0])
    shapes = (heads[0], heads[1], heads[1])
    return [torch.randn(total, h, head_dim, generator=generator).to(device, dtype) for h in shapes]


def results(attention, inputs: list[Tensor], layer: int = 0) -> list[Tensor]:
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = attention(layer, *inputs)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("heads", "page", "selector"),
    [
        ((2, 2), 16, CentroidSelector()),
        ((4, 2), 32, HeadSoftmaxSelector()),
        ((8, 2), 16, SegmentSoftmaxSelector(4)),
        ((7, 1), 16, QuestSelector()),
        ((9, 3), 16, HeadSoftmaxSelector()),
        ((4, 2), 64, WindowSelector()),
    ],
    ids=lambda x: type(x).__name__ if hasattr(x, "kernel") else str(x),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_output_and_gradients_are_the_masked_ones(device, heads, page, selector, dtype):
    inputs = qkv(sum(LENGTHS), heads, device, dtype)
    rule = pattern(selector, page)
    ours = results(TiledSparse(LENGTHS, PROMPTS, rule, device), inputs)
    expected = results(MaskedSparse(LENGTHS, PROMPTS, rule), inputs)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == dtype
        if dtype == torch.float32:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        else:
            assert (a.float() - b.float()).norm() < 1.5e-2 * b.float().norm()


def kept(lists: PageLists, tiles: Tiles, heads: int) -> dict[tuple[int, int], list[int]]:
    """Pages by packed position and KV head, from the entries' bits."""
    pages: dict[tuple[int, int], list[int]] = {}
    bounds, entries = lists.bounds.tolist(), lists.entries_N.tolist()
    for number, (begin, end) in enumerate(pairwise(bounds)):
        first, stop = tiles.tiles_X4[number // heads, :2].tolist()
        for entry in entries[begin:end]:
            for query in range(stop - first):
                if entry >> 16 + query & 1:
                    pages.setdefault((first + query, number % heads), []).append(entry & 0xFFFF)
            assert entry >> 16 & 0xFFFF < 1 << stop - first, "a query that is not there"
    return pages


@pytest.mark.parametrize("selector", [*SELECTORS, *EAGER], ids=lambda s: f"{type(s).__name__}{s.landmarks_per_page}")
def test_lists_hold_the_pages_of_the_decode_reference(device, selector):
    page = 6 if selector.landmarks_per_page == 3 else 16
    q, k, _ = qkv(sum(LENGTHS), (4, 2), device)
    rule = pattern(selector, page)
    tiles = make_tiles(LENGTHS, PROMPTS, 16, page, device)
    ours = kept(page_lists(rule, tiles, q, k), tiles, 2)
    start = 0
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        for t in range(prompt, length):
            budget = int(rule.budget.pages(torch.tensor(t + 1)))
            expected = select_reference(q[start + t], k[start : start + t + 1], budget, selector, page, 1, 2)
            assert [ours[start + t, head] for head in range(2)] == expected, t
        start += length
    assert len(ours) == 2 * (sum(LENGTHS) - sum(PROMPTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_lists_are_those_of_the_decode_kernels(device, selector, dtype):
    """In bf16 up to pages that all but tie: the sums of their scores have another order."""
    length, prompt = 172, 140
    rule = pattern(selector)
    q, k, _ = qkv(length, (4, 2), device, dtype)
    tiles = make_tiles([length], [prompt], 16, 16, device)
    ours = kept(page_lists(rule, tiles, q, k), tiles, 2)
    lengths_B = torch.arange(prompt, length, device=device) + 1
    marks_KPMD = tile_lists.page_landmarks(rule, k).contiguous()
    P = marks_KPMD.shape[1]
    table_BP = torch.arange(P, device=device).repeat(len(lengths_B), 1)
    budget_B = rule.budget.pages(lengths_B)
    scores = torch.empty(len(lengths_B), 2, 2 if selector.kernel in PER_HEAD else 1, P, device=device)
    lists = torch.empty(len(lengths_B), 2, 4, dtype=torch.int32, device=device)
    counts = torch.empty(len(lengths_B), 2, dtype=torch.int32, device=device)
    rows = q[prompt:].unflatten(1, (2, 2)).contiguous()
    score_pages(rows, marks_KPMD, table_BP, lengths_B, budget_B, scores, selector.kernel, 16, 1, D**-0.5)
    select_pages(scores, table_BP, lengths_B, budget_B, lists, counts, selector.kernel, P, 16, 1, 1, 2)
    agreed = []
    for row in range(len(lengths_B)):
        for head in range(2):
            decoded = (lists[row, head, : counts[row, head]] - head * P).tolist()
            assert len(ours[prompt + row, head]) == len(decoded)
            agreed += [page in decoded for page in ours[prompt + row, head]]
    assert all(agreed) if dtype == torch.float32 else sum(agreed) >= 0.995 * len(agreed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("selector", [CentroidSelector(), HeadMaxSelector(), WindowSelector()])
def test_chunks_of_queries_change_no_list(device, monkeypatch, selector, dtype):
    q, k, _ = qkv(sum(LENGTHS), (4, 2), device, dtype)
    tiles = make_tiles(LENGTHS, PROMPTS, 8, 16, device)
    whole = page_lists(pattern(selector), tiles, q, k)
    monkeypatch.setattr(tile_lists, "CHUNK_SCORES", 1)
    parts = page_lists(pattern(selector), tiles, q, k)
    assert torch.equal(whole.entries_N, parts.entries_N) and torch.equal(whole.bounds, parts.bounds)


def test_readers_are_the_inverse_of_the_lists(device):
    q, k, _ = qkv(sum(LENGTHS), (4, 2), device)
    tiles = make_tiles(LENGTHS, PROMPTS, 16, 16, device)
    lists = page_lists(pattern(HeadSoftmaxSelector()), tiles, q, k)
    expected: dict[tuple[int, int], list[int]] = {}
    firsts = {document.start: int(number) for document, number in zip(tiles.documents, (0, 1, 12, 14), strict=True)}
    for (token, head), pages in kept(lists, tiles, 2).items():
        start = next(d.start for d in tiles.documents if d.start <= token < d.end)
        for page in pages:
            expected.setdefault((head, firsts[start] + page), []).append(token)
    count = len(tiles.pages_P2)
    readers_R, ends = page_readers(lists.entries_N, lists.bounds, tiles.tiles_X4, 2, count, 16)
    for head in range(2):
        for page in range(count):
            begin, end = ends[head * count + page], ends[head * count + page + 1]
            assert readers_R[begin:end].tolist() == sorted(expected.get((head, page), []))
    assert ends[-1] == len(readers_R)


def test_dense_layers_and_prompts_alone_are_dense(device):
    inputs = qkv(sum(LENGTHS), (4, 2), device)
    dense = results(PackedCausal(LENGTHS, device), inputs)
    first = results(TiledSparse(LENGTHS, PROMPTS, pattern(CentroidSelector(), dense_layers=1), device), inputs)
    unanswered = results(TiledSparse(LENGTHS, LENGTHS, pattern(CentroidSelector()), device), inputs)
    for a, b, c in zip(dense, first, unanswered, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(c, a, atol=1e-5, rtol=1e-5)


def test_a_budget_that_covers_the_documents_is_dense(device):
    lengths, prompts = [40, 9], [0, 2]
    inputs = qkv(sum(lengths), (4, 2), device)
    rule = SparsePattern(FixedBudget(3), HeadSoftmaxSelector(), 16, 1, 2, 0)
    ours = results(TiledSparse(lengths, prompts, rule, device), inputs)
    for a, b in zip(ours, results(PackedCausal(lengths, device), inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_repeat_bit_for_bit_and_under_a_checkpoint(device):
    inputs = qkv(sum(LENGTHS), (4, 2), device)
    attention = TiledSparse(LENGTHS, PROMPTS, pattern(WindowSelector()), device)

    def recomputed(layer: int, *tensors: Tensor) -> Tensor:
        return checkpoint(attention, layer, *tensors, use_reentrant=False)

    once = results(attention, inputs)
    for other in (results(attention, inputs), results(recomputed, inputs)):
        assert all(torch.equal(a, b) for a, b in zip(once, other, strict=True))


def test_what_is_kept_grows_with_the_length_alone(device):
    def kept_bytes(length: int) -> int:
        saved: dict[int, int] = {}

        def count(x: Tensor) -> Tensor:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q, k, v = (x.requires_grad_() for x in qkv(length, (2, 2), device))
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            TiledSparse([length], [1], pattern(WindowSelector()), device)(0, q, k, v)
        return sum(saved.values())

    assert kept_bytes(1024) < 2.1 * kept_bytes(512)


@pytest.mark.parametrize(("group", "half", "full"), [(1, 16, 16), (4, 16, 4), (7, 8, 2), (16, 4, 1), (128, 1, 1)])
def test_tiles_fill_their_rows(group, half, full):
    assert queries_per_tile(group, torch.float16) == half
    assert queries_per_tile(group, torch.float32) == full


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "heads"), [(64, (14, 2)), (128, (32, 8)), (256, (4, 1))])
def test_four_thousand_tokens_on_cuda(device, head_dim, heads):
    lengths, prompts = [2900, 1196], [700, 31]
    budget = StepSchedule(pages=[16, 24, 40], bin_width=1000)
    rule = SparsePattern(budget, HeadSoftmaxSelector(), 16, 1, 2, 2)
    inputs = qkv(sum(lengths), heads, device, torch.bfloat16, head_dim)
    attention = SparseAttention(lengths, prompts, rule, device)
    ours = results(attention, inputs, layer=2)
    assert isinstance(attention.chosen, TiledSparse)
    for a, b in zip(ours, results(MaskedSparse(lengths, prompts, rule), inputs, layer=2), strict=True):
        assert (a.float() - b.float()).norm() < 2e-2 * b.float().norm()
    for a, b in zip(ours, results(attention, inputs, layer=2), strict=True):
        assert torch.equal(a, b), "the backward has no order of its own"
