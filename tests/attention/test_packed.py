from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparrow.attention import masked
from sparrow.attention.masked import MaskedSparse
from sparrow.attention.packed import PackedCausal
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.reference import attend_reference, select_reference
from sparrow.components.budget import StepSchedule
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector, QuestSelector, SegmentSoftmaxSelector

LENGTHS = [7, 1, 30]


def qkv(total: int, seed: int):
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(total, heads, 8, generator=rng, requires_grad=True) for heads in (4, 2, 2))


@pytest.mark.parametrize("lengths", [LENGTHS, [9, 9, 9]])
def test_documents_attend_to_themselves_only(lengths):
    q, k, v = qkv(sum(lengths), seed=0)
    out = PackedCausal(lengths)(0, q, k, v)
    for a, b, c, o in zip(*(x.split(lengths) for x in (q, k, v, out)), strict=True):
        alone = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (a, b, c)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        torch.testing.assert_close(o, alone)


SELECTORS = [CentroidSelector(), HeadSoftmaxSelector(), QuestSelector(), SegmentSoftmaxSelector(2, fp8=True)]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda s: type(s).__name__)
def test_masked_training_form_sees_what_decode_sees(selector):
    budget = StepSchedule(pages=[3, 4, 6], bin_width=10)
    prompts = [3, 1, 12]
    pattern = SparsePattern(budget, selector, page_size=2, sink_pages=1, recent_pages=2, dense_layers=1)
    q, k, v = qkv(sum(LENGTHS), seed=1)
    attention = MaskedSparse(LENGTHS, prompts, pattern)
    torch.testing.assert_close(attention(0, q, k, v), PackedCausal(LENGTHS)(0, q, k, v))
    out = attention(1, q, k, v)
    start = 0
    for length, prompt in zip(LENGTHS, prompts, strict=True):
        for t in range(length):
            seen_k, seen_v = k[start : start + t + 1], v[start : start + t + 1]
            pages = 1000 if t < prompt else int(budget.pages(torch.tensor(t + 1)))
            kept = select_reference(q[start + t], seen_k, pages, selector, 2, 1, 2)
            torch.testing.assert_close(out[start + t], attend_reference(q[start + t], seen_k, seen_v, kept, 2))
        start += length


def gradients(lengths, prompts, pattern, seed):
    q, k, v = qkv(sum(lengths), seed)
    out = MaskedSparse(lengths, prompts, pattern)(0, q, k, v)
    out.square().sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


def test_chunks_of_queries_change_neither_output_nor_gradient(monkeypatch):
    pattern = SparsePattern(StepSchedule(pages=[3]), CentroidSelector(), 2, 1, 2, 0)
    whole = gradients(LENGTHS, [3, 1, 12], pattern, seed=2)
    assert all(x.isfinite().all() and x.abs().sum() > 0 for x in whole)
    monkeypatch.setattr(masked, "CHUNK_CELLS", 4 * max(LENGTHS))
    for chunked, expected in zip(gradients(LENGTHS, [3, 1, 12], pattern, seed=2), whole, strict=True):
        torch.testing.assert_close(chunked, expected)


def test_no_mask_is_held_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(masked, "CHUNK_CELLS", 2048)
    pattern = SparsePattern(StepSchedule(pages=[8]), CentroidSelector(), 4, 1, 2, 0)
    length = 1024
    q, k, v = qkv(length, seed=3)
    saved: dict[int, int] = {}

    def count(x):
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        MaskedSparse([length], [1], pattern)(0, q, k, v)
    assert sum(saved.values()) < length * length, "one mask of one KV head has length x length bytes"
