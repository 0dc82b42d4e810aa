from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.rollout import RolloutBatch, join
from sparrow.training.balance import plan

from .test_packing import rollouts


def loads(lengths: list[int], owners: list[int], ranks: int) -> list[int]:
    return [sum(n for n, owner in zip(lengths, owners, strict=True) if owner == rank) for rank in range(ranks)]


def test_a_plan_by_hand() -> None:
    # 10 + 8 + 2 against 4: half the gap of 16 is 8, and 12 against 12 cannot be bettered.
    assert plan([10, 8, 2, 4], [0, 0, 0, 1], 2) == [0, 1, 0, 1]
    assert plan([5, 5], [0, 1], 2) == [0, 1]
    assert plan([7], [1], 3) == [1], "a rank keeps its only sequence"


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=30))
def test_no_single_move_would_help_any_more(sequences: list[tuple[int, int]]) -> None:
    lengths, owners = [n for n, _ in sequences], [owner for _, owner in sequences]
    after = plan(lengths, owners, 4)
    totals = loads(lengths, after, 4)
    rich = totals.index(max(totals))
    gap = max(totals) - min(totals)
    assert max(totals) <= max(loads(lengths, owners, 4))
    assert not any(n < gap for n, owner in zip(lengths, after, strict=True) if owner == rich)


def equal(one: RolloutBatch, other: RolloutBatch) -> bool:
    values = [(vars(one)[name], vars(other)[name]) for name in vars(one)]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in values)


def test_selected_and_joined_again_a_batch_is_what_it_was() -> None:
    batch = rollouts()
    batch.columns, batch.texts = [{"gold": 1}, {"gold": 2}], ["a", "b", "c"]
    first, second = batch.select([0]), batch.select([1, 2])
    assert second.tokens_T.tolist() == [9, 10, 11] and second.texts == ["b", "c"]
    assert second.groups_S.tolist() == [0, 1] and second.columns == batch.columns
    assert first.columns == [{"gold": 1}]
    assert equal(join([first, second]), batch)
    nothing = batch.select([])
    assert nothing.num_sequences == nothing.num_tokens == 0 and equal(join([batch, nothing]), batch)
