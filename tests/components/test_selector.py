"""Selectors beside the attention that they stand in for.

Axes: B rows, K KV heads, G query heads per KV head, P pages, M landmarks per page, D head dim.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparrow.components.selector import (
    CentroidSelector,
    HeadMaxSelector,
    HeadSoftmaxSelector,
    QuestSelector,
    SegmentSoftmaxSelector,
    WindowSelector,
)
from sparrow.errors import UserError

B, K, G, P, PAGE, D = 2, 3, 4, 6, 8, 16


def sample(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, K, G, D], keys [B, K, P, page, D] and candidates [B, P]."""
    generator = torch.Generator().manual_seed(seed)
    q_BKGD = torch.randn(B, K, G, D, generator=generator)
    keys = torch.randn(B, K, P, PAGE, D, generator=generator)
    candidates_BP = torch.tensor([[False, True, True, True, True, False], [False, True, True, False, False, False]])
    return q_BKGD, keys, candidates_BP


def attention_mass(q_BKGD: Tensor, keys: Tensor, candidates_BP: Tensor) -> Tensor:
    """What softmax attention over the candidates' tokens gives each page, [B, K, G, P]."""
    logits = torch.einsum("bkgd,bkptd->bkgpt", q_BKGD, keys) / math.sqrt(D)
    logits = logits.masked_fill(~candidates_BP[:, None, None, :, None], -math.inf)
    return logits.flatten(-2).softmax(-1).unflatten(-1, (P, PAGE)).sum(-1)


def test_one_segment_a_token_is_the_oracle():
    q, keys, candidates = sample()
    selector = SegmentSoftmaxSelector(PAGE)
    score = selector.score(q, selector.landmarks(keys), candidates)
    torch.testing.assert_close(score, attention_mass(q, keys, candidates).sum(2))


def test_one_segment_a_page_is_the_head_softmax():
    q, keys, candidates = sample()
    segment, softmax = SegmentSoftmaxSelector(1), HeadSoftmaxSelector()
    assert torch.equal(segment.landmarks(keys), softmax.landmarks(keys))
    landmarks = softmax.landmarks(keys)
    assert torch.equal(segment.score(q, landmarks, candidates), softmax.score(q, landmarks, candidates))


def test_more_segments_come_closer_to_the_oracle():
    errors = []
    for segments in (1, 2, 4, 8):
        selector = SegmentSoftmaxSelector(segments)
        error = 0.0
        for seed in range(20):
            q, keys, candidates = sample(seed)
            score = selector.score(3 * q, selector.landmarks(keys), candidates)
            error += float((score - attention_mass(3 * q, keys, candidates).sum(2)).abs().mean())
        errors.append(error)
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 < errors[0]


def test_head_max_keeps_what_one_head_needs():
    # Head 0 looks at page 1 alone, the three others at page 2; page 3 has a little of everyone.
    keys = torch.zeros(1, 1, 4, PAGE, D)
    keys[0, 0, 1, :, 0], keys[0, 0, 2, :, 1] = 20.0, 20.0
    keys[0, 0, 3, :, :2] = 12.0
    q = torch.zeros(1, 1, G, D)
    q[0, 0, 0, 0], q[0, 0, 1:, 1] = 4.0, 4.0
    candidates = torch.tensor([[False, True, True, True]])
    landmarks = CentroidSelector().landmarks(keys)
    by_max = HeadMaxSelector().score(q, landmarks, candidates)[0, 0]
    assert by_max[1] > 0.99 and by_max[2] > 0.99
    by_mean = CentroidSelector().score(q, landmarks, candidates)[0, 0]
    assert by_mean[1] < by_mean[3] < by_mean[2], "the mean query prefers the page that nobody needs"


def test_the_window_is_the_newest_pages():
    q, keys, candidates = sample()
    selector = WindowSelector()
    landmarks = selector.landmarks(keys)
    assert landmarks.shape == (B, K, P, 0, D)
    assert torch.equal(selector.score(q, landmarks, candidates), torch.arange(6.0).expand(B, K, P))


def test_eight_bits_round_once_and_never_overflow():
    keys = torch.tensor([1.0, 1.0625, 500.0, -1e6])[:, None].expand(4, 2).contiguous()  # a page of 4, two equal entries
    made = SegmentSoftmaxSelector(4, fp8=True).landmarks(keys)
    assert made.dtype == torch.float8_e4m3fn
    assert made.float()[:, 0].tolist() == [1.0, 1.0, 448.0, -448.0]  # 1.0625 lies half way, ties go to the even one
    halves = SegmentSoftmaxSelector(2, fp8=True).landmarks(torch.tensor([[1.0], [1.25], [3.0], [5.0]]).bfloat16())
    assert halves.float()[:, 0].tolist() == [1.125, 4.0]


def test_eight_bits_rank_nearly_as_sixteen():
    q, keys, candidates = sample()
    fine, coarse = SegmentSoftmaxSelector(2), SegmentSoftmaxSelector(2, fp8=True)
    a, b = (s.score(q, s.landmarks(keys), candidates) for s in (fine, coarse))
    assert 0 < (a - b).abs().max() < 0.1 * a.max()


SELECTORS = [
    CentroidSelector(),
    HeadSoftmaxSelector(),
    HeadMaxSelector(),
    QuestSelector(),
    SegmentSoftmaxSelector(2),
    SegmentSoftmaxSelector(2, fp8=True),
]


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_row_without_candidates_gives_numbers(selector):
    q, keys, candidates = sample()
    score = selector.score(q, selector.landmarks(keys), torch.zeros_like(candidates))
    assert score.shape == (B, K, P) and score.isfinite().all()


def test_segments_must_divide_the_page():
    with pytest.raises(UserError, match=r"segments: 3 does not divide kv_cache\.page_size 8"):
        SegmentSoftmaxSelector(3).landmarks(torch.zeros(1, 8, D))
    with pytest.raises(UserError, match="segments: 0"):
        SegmentSoftmaxSelector(0)
