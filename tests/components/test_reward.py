"""Combining rewards: sums, rows that do not apply, and every wrong return named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sparrow.components.reward import (
    DottedReward,
    RewardCallable,
    columns_per_sequence,
    combine_rewards,
    named_rewards,
    outcome_counts,
    reward_columns,
)
from sparrow.errors import UserError
from sparrow.rollout import RolloutBatch

NAN = math.nan


def returns(values: Any) -> RewardCallable:
    return lambda completions, **columns: values


def length_of(completions: list[str], bonus: list[float], **_: Any) -> list[float]:
    return [len(text) + extra for text, extra in zip(completions, bonus, strict=True)]


def test_weighted_sum_over_the_functions_that_apply() -> None:
    rewards_S, parts = combine_rewards(
        [("a", 1.0, returns([1, None, 0.5, None])), ("b", -2.0, returns([0.25, 3.0, None, None]))], [""] * 4, {}
    )
    torch.testing.assert_close(rewards_S, torch.tensor([0.5, -6.0, 0.5, NAN]), equal_nan=True)
    torch.testing.assert_close(parts["b"], torch.tensor([0.25, 3.0, NAN, NAN]), equal_nan=True)
    assert rewards_S.dtype == parts["a"].dtype == torch.float32


def test_columns_reach_the_function_by_name() -> None:
    columns = columns_per_sequence([{"bonus": 10.0, "task": "x"}, {"bonus": 20.0}], torch.tensor([1, 0, 0]))
    assert columns == {"bonus": [20.0, 10.0, 10.0], "task": [None, "x", "x"]}
    rewards_S, _ = combine_rewards([("length", 1.0, length_of)], ["a", "bb", ""], columns)
    assert rewards_S.tolist() == [21.0, 12.0, 10.0]


def test_booleans_and_no_functions() -> None:
    rewards_S, _ = combine_rewards([("a", 1.0, returns((True, False)))], ["", ""], {})
    assert rewards_S.tolist() == [1.0, 0.0]
    assert combine_rewards([], ["", ""], {})[0].isnan().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "returned 1 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (None, "returned a NoneType, not a list"),
        (1.0, "returned a float, not a list"),
        (torch.ones(2), "returned a Tensor, not a list"),
        ([1.0, "1"], "returned '1' at index 1"),
        ([[1.0], 0.0], r"returned \[1.0\] at index 0"),
        ([1.0, NAN], "returned nan at index 1"),
        ([-math.inf, 1.0], "returned -inf at index 0"),
        ([1.0, 1e39], "at index 1, not a finite 32-bit float"),
        ([1.0, 10**5000], "too large an integer at index 1"),
    ],
)
def test_wrong_returns_name_function_and_index(values: Any, message: str) -> None:
    functions = [("fine", 1.0, returns([0.0, 0.0])), ("faulty", 1.0, returns(values))]
    with pytest.raises(UserError, match=r"reward function 1 \('faulty'\).*" + message):
        combine_rewards(functions, ["", ""], {})


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two reward functions are called 'sin'"):
        named_rewards([DottedReward("math.sin"), DottedReward("math.cos"), DottedReward("cmath.sin")])


def test_an_error_in_the_function_keeps_its_traceback_and_says_whose_it_is() -> None:
    with pytest.raises(TypeError) as error:
        combine_rewards([("length", 1.0, length_of)], ["a"], {})
    assert error.value.__notes__ == ["raised by reward function 0 ('length')"]


def test_dotted_reward_calls_the_function() -> None:
    reward = DottedReward("sparrow.components.arithmetic.boxed_integer_reward", weight=0.5)
    assert (reward.name, reward.weight) == ("boxed_integer_reward", 0.5)
    assert reward(["\\boxed{4}", "5"], answer=[4, 4]) == [1.0, 0.0]


def test_a_path_that_leads_nowhere_is_named() -> None:
    with pytest.raises(UserError, match="did you mean 'boxed_integer_reward'"):
        DottedReward("sparrow.components.arithmetic.boxed_intger_reward")


def test_weight_must_be_finite() -> None:
    with pytest.raises(UserError, match="weight must be finite, got nan"):
        named_rewards([DottedReward("math.sqrt", weight=NAN)])


class Judge:
    """A reward that counts."""

    name, weight = "judge", 2.0

    def __init__(self) -> None:
        self.counts = {"correct": 0, "timeout": 0}

    def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        self.counts = {"correct": completions.count("yes"), "timeout": completions.count("")}
        return [float(text == "yes") for text in completions]


def test_outcomes_are_those_of_the_last_call_and_only_of_who_counts() -> None:
    functions = named_rewards([Judge(), DottedReward("sparrow.components.arithmetic.boxed_integer_reward")])
    for completions, counted in ((["yes", "", "yes"], {"correct": 2.0, "timeout": 1.0}), (["no"], {"correct": 0.0})):
        combine_rewards(functions, completions, {"answer": [1] * len(completions)})
        outcomes = outcome_counts(functions)
        assert set(outcomes) == {"rewards/judge/correct", "rewards/judge/timeout"}
        assert all(outcomes[f"rewards/judge/{name}"] == value for name, value in counted.items())


def test_reward_functions_get_what_the_rollout_says_of_each_response() -> None:
    none, zeros = torch.zeros(6), torch.zeros(3, dtype=torch.int64)
    batch = RolloutBatch(
        prompts=[[1], [1], [2]], groups_S=torch.tensor([0, 0, 1]), samples_S=torch.tensor([0, 1, 0]),
        lengths_S=torch.tensor([3, 1, 2]), tokens_T=none.long(), logprobs_T=none, top_ids_TK=none[:, None].long(),
        top_logprobs_TK=none[:, None], pages_T=none.long(), terminated_S=torch.tensor([True, False, True]),
        versions_S=zeros, numbers_S=zeros, columns=[{"answer": "a", "prompts": "p"}, {"answer": "b", "prompts": "q"}],
    )  # fmt: skip
    assert reward_columns(batch) == {
        "answer": ["a", "a", "b"],
        "prompts": ["p", "p", "q"],
        "completion_lengths": [3, 1, 2],
        "truncated": [False, True, False],
    }
