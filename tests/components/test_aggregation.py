from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.components.aggregation import MODES, Aggregation, BatchTotals
from sparrow.errors import UserError

LENGTHS = [2, 1, 3]
# Losses of three sequences: sums 3, 4, 9; means 3/2, 4, 3.
LOSSES = [1.0, 2.0, 4.0, 2.0, 3.0, 4.0]


def aggregate(mode: str, lengths: list[int], loss_T: Tensor, totals: BatchTotals) -> Tensor:
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_S)
    return (Aggregation(mode, max_length=10).weights(lengths_S, sequence_T, totals) * loss_T).sum()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 16 / 6),
        ("seq-mean-token-sum", 16 / 3),
        ("seq-mean-token-mean", (1.5 + 4 + 3) / 3),
        ("seq-mean-token-sum-norm", 16 / (3 * 10)),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    assert aggregate(mode, LENGTHS, torch.tensor(LOSSES), BatchTotals(6, 3)).item() == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODES), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_loss_and_gradient_do_not_depend_on_the_split(mode: str, lengths: list[int], data: st.DataObject) -> None:
    """Complaint 12: any grouping of the sequences into micro-batches and ranks, in any order."""
    if not sum(lengths):
        return
    totals = BatchTotals(sum(lengths), len(lengths))
    parameter = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    features = [torch.randn(length, 2, dtype=torch.float64, generator=generator) for length in lengths]

    def step(split: list[list[int]]) -> tuple[Tensor, Tensor]:
        parts = []
        for members in split:
            loss_T = torch.cat([(features[member] @ parameter).square() for member in members])
            parts.append(aggregate(mode, [lengths[member] for member in members], loss_T, totals))
        loss = torch.stack(parts).sum()
        return loss.detach(), torch.autograd.grad(loss, parameter)[0]

    order = data.draw(st.permutations(range(len(lengths))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) | {0, len(lengths)})
    split = [list(order[start:end]) for start, end in pairwise(cuts)]
    whole_loss, whole_gradient = step([list(range(len(lengths)))])
    loss, gradient = step(split)
    torch.testing.assert_close(loss, whole_loss, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-9)


def test_weights_sum_to_one_where_the_mode_is_a_mean() -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert aggregate(mode, LENGTHS, torch.ones(6), BatchTotals(6, 3)).item() == pytest.approx(1.0)


def test_an_empty_micro_batch_weighs_nothing() -> None:
    for mode in MODES:
        assert aggregate(mode, [], torch.zeros(0), BatchTotals(6, 3)).item() == 0.0


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match=r"'mean' is not an aggregation.*token-mean"):
        Aggregation("mean")
    with pytest.raises(UserError, match="max_length, which is None"):
        Aggregation("seq-mean-token-sum-norm")
