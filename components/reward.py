"""Rewards: calling the reward functions of a run, checking what they return, and adding it up.

A reward function is any callable `f(completions, **columns) -> list[float | None]`: S decoded responses and, by name,
the S values of each column of the data set and of the columns of the rollout (`reward_columns`). None means "does not
apply to this row" (TRL's convention). A component may do more: CountsOutcomes, ChecksGold, GivesAnswers, Closes.
Axes: S sequences.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.instantiate import locate
from sparrow.rollout import RolloutBatch

RewardCallable = Callable[..., Sequence[float | None]]
NamedReward = tuple[str, float, Any]  # name, weight, and the function, which may have more to it than a call


@runtime_checkable
class CountsOutcomes(Protocol):
    """A reward that says how its verdicts came about.

    Attributes:
        counts: of the last call, completions by outcome (`correct`, `no_answer`, `timeout`, ...); always the same keys.
    """

    counts: dict[str, int]


@runtime_checkable
class ChecksGold(Protocol):
    """A reward that can tell, before training, which examples it will never be able to score."""

    def problems(self, columns: dict[str, list[Any]]) -> list[str | None]:
        """Per example why its gold answer cannot be used, else None."""
        ...


@runtime_checkable
class GivesAnswers(Protocol):
    """A reward that finds an answer in a response, which a majority vote needs."""

    def answers(self, completions: list[str], **columns: Any) -> list[str | None]:
        """Per response its answer, in a form that is equal for equal answers; None where there is none."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A reward with processes of its own to end."""

    def close(self) -> None: ...


class DottedReward:
    """A plain Python function as a reward, by its dotted path.

    Args:
        function: e.g. "my_package.rewards.short_answer"; its last part is the reward's name in the metrics.
        weight: factor in the sum of rewards.

    Raises:
        UserError: no such module or function.
    """

    def __init__(self, function: str, weight: float = 1.0) -> None:
        self.name = function.rpartition(".")[2]
        self.weight = weight
        self._function: RewardCallable = locate(function)

    def __call__(self, completions: list[str], /, **columns: list[Any]) -> Sequence[float | None]:
        return self._function(completions, **columns)


def named_rewards(components: Sequence[Any]) -> list[NamedReward]:
    """The reward components of a config.

    Raises:
        UserError: two have the same name, or a weight is not finite.
    """
    names = [component.name for component in components]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two reward functions are called {sorted(twice)[0]!r}; names must differ")
    for component in components:
        if not math.isfinite(component.weight):
            raise UserError(f"reward {component.name}: weight must be finite, got {component.weight}")
    return [(component.name, component.weight, component) for component in components]


def combine_rewards(
    functions: Sequence[NamedReward],
    completions: list[str],
    columns: Mapping[str, list[Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the reward functions over S completions.

    Args:
        functions: as `named_rewards` gives them.
        completions: S decoded responses.
        columns: per column of the data set its S values.

    Returns:
        rewards_S: fp32; the sum over the functions that apply to a row, nan where none does.
        parts: per function its unweighted rewards [S], fp32, nan where it returned None.

    Raises:
        UserError: naming function, index and value: wrong type or length, not a number, not finite (trl#6533: a short
            list that broadcasts trains on the wrong rewards).
    """
    assert len({name for name, _, _ in functions}) == len(functions), "two reward functions have one name"
    assert all(len(values) == len(completions) for values in columns.values()), "a column is not S long"
    parts: dict[str, Tensor] = {}
    total_S = torch.zeros(len(completions))
    applies_S = torch.zeros(len(completions), dtype=torch.bool)
    for index, (name, weight, function) in enumerate(functions):
        part_S = _call(f"reward function {index} ({name!r})", function, completions, columns)
        total_S = torch.where(part_S.isnan(), total_S, total_S + weight * part_S)
        applies_S |= ~part_S.isnan()
        parts[name] = part_S
    return torch.where(applies_S, total_S, math.nan), parts


def reward_columns(batch: RolloutBatch) -> dict[str, list[Any]]:
    """What the reward functions get beside the S responses, by name S values each.

    The data's columns, `prompts` (text or messages) among them; of each response `completion_lengths` (tokens) and
    `truncated` (cut by the limit of tokens).
    """
    return columns_per_sequence(batch.columns, batch.groups_S) | {
        "completion_lengths": batch.lengths_S.tolist(),
        "truncated": (~batch.terminated_S).tolist(),
    }


def outcome_counts(functions: Sequence[NamedReward]) -> dict[str, float]:
    """`rewards/<function>/<outcome>` of the last call, for the functions that count them."""
    return {
        f"rewards/{name}/{outcome}": float(count)
        for name, _, function in functions
        if isinstance(function, CountsOutcomes)
        for outcome, count in function.counts.items()
    }


def parts_per_sequence(parts: Mapping[str, Tensor]) -> list[dict[str, float]]:
    """Of `combine_rewards`' parts, per sequence those that apply to it (`RolloutBatch.reward_parts`)."""
    rows = zip(*(part_S.tolist() for part_S in parts.values()), strict=True)
    return [{name: v for name, v in zip(parts, values, strict=True) if not math.isnan(v)} for values in rows]


def columns_per_sequence(columns: Sequence[Mapping[str, Any]], groups_S: Tensor) -> dict[str, list[Any]]:
    """The columns of each group (`RolloutBatch.columns`) repeated for its sequences: per name a list of S values."""
    names = dict.fromkeys(name for row in columns for name in row)
    return {name: [columns[group].get(name) for group in groups_S.tolist()] for name in names}


def _call(who: str, function: RewardCallable, completions: list[str], columns: Mapping[str, list[Any]]) -> Tensor:
    try:
        values = function(completions, **columns)
    except Exception as error:
        error.add_note(f"raised by {who}")
        raise
    if not isinstance(values, list | tuple):
        raise UserError(f"{who} returned a {type(values).__name__}, not a list of {len(completions)} floats or None")
    if len(values) != len(completions):
        raise UserError(f"{who} returned {len(values)} values for {len(completions)} completions")
    return torch.tensor([_number(value, row, who) for row, value in enumerate(values)], dtype=torch.float32)


def _number(value: Any, row: int, who: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, numbers.Real):
        raise UserError(f"{who} returned {value!r:.60} at index {row}; expected a float or None")
    # The comparison is False for nan, and holds for integers too large for a float.
    magnitude: Any = abs(value)
    if not magnitude <= torch.finfo(torch.float32).max:
        shown = "too large an integer" if isinstance(value, int) else repr(value)
        raise UserError(f"{who} returned {shown} at index {row}, not a finite 32-bit float; None skips a row")
    return float(value)
