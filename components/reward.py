"""Rewards: calling the reward functions of a run, checking what they return, and adding it up.

A reward function is any callable `f(completions, **columns) -> list[float | None]`: S decoded responses and, by name,
the S values of each column of the data set. None means "does not apply to this row" (TRL's convention).
Axes: S sequences.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.instantiate import locate

RewardCallable = Callable[..., Sequence[float | None]]


class DottedReward:
    """A plain Python function as a reward, by its dotted path.

    Args:
        function: e.g. "my_package.rewards.short_answer"; its last part is the reward's name in the metrics.
        weight: factor in the sum of rewards.

    Raises:
        UserError: no such module or function; a weight that is not finite.
    """

    def __init__(self, function: str, weight: float = 1.0) -> None:
        if not math.isfinite(weight):
            raise UserError(f"reward {function}: weight must be finite, got {weight}")
        self.name = function.rpartition(".")[2]
        self.weight = weight
        self._function: RewardCallable = locate(function)

    def __call__(self, completions: list[str], /, **columns: list[Any]) -> Sequence[float | None]:
        return self._function(completions, **columns)


def combine_rewards(
    functions: Sequence[tuple[str, float, RewardCallable]],
    completions: list[str],
    columns: Mapping[str, list[Any]],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the reward functions over S completions.

    Args:
        functions: (name, weight, function) of each; names differ.
        completions: S decoded responses.
        columns: per column of the data set its S values.

    Returns:
        rewards_S: fp32; the sum over the functions that apply to a row, nan where none does.
        parts: per function its unweighted rewards [S], fp32, nan where it returned None.

    Raises:
        UserError: naming function, index and value: wrong type or length, not a number, not finite (trl#6533: a short
            list that broadcasts trains on the wrong rewards).
    """
    names = [name for name, _, _ in functions]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"two reward functions are called {sorted(twice)[0]!r}; names must differ")
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
