"""Selection of the largest inside one program, against a stable sort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

import triton
import triton.language as tl

from sparrow.kernels.ordering import LOWEST, kth_largest, largest, sortable

pytestmark = pytest.mark.gpu

P = 64
# Ties, both zeros, the ends of fp32's range and its smallest numbers; anything finite between them.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 3.4028234663852886e38, -3.4028234663852886e38, 2.0**-126, -(2.0**-149)]
NUMBERS = st.sampled_from(SPECIAL) | st.floats(width=32, allow_nan=False, allow_infinity=False)


@triton.jit
def _largest_kernel(x, kept, threshold, reached, k, count, P: tl.constexpr):
    index = tl.arange(0, P)
    keys = tl.where(index < count, sortable(tl.load(x + index)), LOWEST)
    tl.store(kept + index, largest(keys, k, count).to(tl.int32))
    key, number = kth_largest(keys, k, count)
    tl.store(threshold, key)
    tl.store(reached, number)


def check(device: torch.device, values: list[float], k: int) -> None:
    x = torch.zeros(P)
    x[: len(values)] = torch.tensor(values)
    kept, number = torch.zeros(P, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    _largest_kernel[(1,)](x.to(device), kept, number, number[1:], k, len(values), P)
    order = sorted(range(len(values)), key=lambda i: (-x[i].item(), i))
    assert kept.nonzero()[:, 0].tolist() == sorted(order[:k])
    assert int(number[1]) == sum(x[i] >= x[order[k - 1]] for i in range(len(values)))


@given(st.data())
def test_the_first_of_the_largest_are_kept(device, data):
    values = data.draw(st.lists(NUMBERS, min_size=1, max_size=P))
    check(device, values, data.draw(st.integers(1, len(values))))


@given(st.lists(st.sampled_from([1.5, -2.0, 0.0]), min_size=1, max_size=P), st.integers(1, P))
@example([7.0] * P, 1)
@example([7.0] * P, P - 1)
@example([-7.0] * P, P)
@example([0.0, -0.0] * (P // 2), 5)
def test_of_equal_ones_the_first_are_kept(device, values, k):
    check(device, values, min(k, len(values)))


def test_keys_are_ordered_as_the_numbers_are(device, randn):
    """A threshold anywhere in a long vector, where most rounds are interpolations."""
    x = torch.cat((randn(P - 8), torch.tensor(SPECIAL, device=device)))
    for k in range(1, P + 1):
        check(device, x.tolist(), k)
