from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sparrow.attention.masked import MaskedSparse
from sparrow.attention.packed import PackedCausal
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.reference import attend_reference, select_reference
from sparrow.components.budget import StepSchedule
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector
from sparrow.errors import UserError

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


@pytest.mark.parametrize("selector", [CentroidSelector(), HeadSoftmaxSelector()], ids=lambda s: type(s).__name__)
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


def test_masked_form_carries_gradient_and_refuses_what_it_cannot_hold():
    pattern = SparsePattern(StepSchedule(pages=[3]), CentroidSelector(), 2, 1, 2, 0)
    q, k, v = qkv(sum(LENGTHS), seed=2)
    MaskedSparse(LENGTHS, [1, 1, 1], pattern)(0, q, k, v).square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in (q, k, v))
    with pytest.raises(UserError, match=r"9000.*8192"):
        MaskedSparse([9000], [1], pattern)
