"""Samples of held-out prompts, their rewards and answers, and the figures made of them.

sparrow_eval and the validation of sparrow_grpo both are these functions, so that their figures are the same ones.

Axes: S sequences of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sparrow.components.data import Example, PromptData
from sparrow.components.reward import GivesAnswers, NamedReward, combine_rewards, reward_columns
from sparrow.engine.engine import Engine
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import Interrupted, UserError
from sparrow.estimators import maj_at_k, mean_reward, pass_at_k, powers_of_two
from sparrow.launch import stop_requested
from sparrow.models.tokenizer import Tokenizer
from sparrow.rollout import RolloutBatch
from sparrow.rollout_dump import Replay
from sparrow.training import distributed


@dataclass(frozen=True)
class Judged:
    """One sample of a prompt.

    Attributes:
        number, sample: of the prompt in the data, and of the sample in its group.
        reward: None where no reward function had an opinion; it counts as 0.
        answer: in canonical form, None where there is none.
        terminated: False where it was cut.
    """

    number: int
    sample: int
    reward: float | None
    answer: str | None
    tokens: int
    terminated: bool

    @property
    def score(self) -> float:
        return 0.0 if self.reward is None else self.reward


def encode_prompt(tokenizer: Tokenizer, prompt: str | list[dict[str, str]], enable_thinking: bool | None) -> list[int]:
    """Text as it stands, messages through the chat template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt, enable_thinking)


def stop_between_tokens(tokens: int, sequences: int) -> None:
    # Ranks decode at their own pace: with several, only the check between steps is safe.
    if distributed.world_size() == 1 and stop_requested():
        raise Interrupted


def generate(
    engine: Engine | Replay,
    data: PromptData,
    numbers: Sequence[int],
    encode: Callable[[Example], list[int]],
    num_samples: int,
    sampling: SamplingParams,
    keep_hidden: bool = False,
    on_step: Callable[[int, int], None] = stop_between_tokens,
) -> RolloutBatch:
    """Responses to the prompts of these numbers that this rank takes from the queue of all ranks; collective."""
    examples = {number: data.example(number) for number in numbers}
    encoded = {number: encode(example) for number, example in examples.items()}
    # Longest first: dealt out in turn they are about equal shares, and none that takes long comes last.
    order = numbers if distributed.world_size() == 1 else sorted(numbers, key=lambda number: -len(encoded[number]))
    batch = engine.generate(
        [encoded[number] for number in order],
        num_samples,
        sampling,
        prompt_numbers=order,
        keep_hidden=keep_hidden,
        on_step=on_step,
        queue=distributed.SharedQueue(len(order)),
    )
    answered = [examples[number] for number in batch.numbers_S[::num_samples].tolist()]
    batch.columns = [example.columns | {"prompts": example.prompt} for example in answered]
    return batch


def judge(batch: RolloutBatch, rewards: Sequence[NamedReward]) -> list[Judged]:
    """The S samples of a batch whose responses are in `texts`, in its order.

    Raises:
        UserError: what a reward function returns is not what was asked for.
    """
    columns = reward_columns(batch)
    rewards_S, _ = combine_rewards(rewards, batch.texts, columns)
    answers = _answers(batch.texts, columns, rewards)
    of_sequences = (batch.numbers_S, batch.samples_S, rewards_S, batch.lengths_S, batch.terminated_S)
    rows = zip(answers, *(values_S.tolist() for values_S in of_sequences), strict=True)
    return [
        Judged(number, sample, None if math.isnan(reward) else reward, answer, tokens, terminated)
        for answer, number, sample, reward, tokens, terminated in rows
    ]


def gives_answers(rewards: Sequence[NamedReward]) -> bool:
    """Whether there is a maj@k."""
    return any(isinstance(function, GivesAnswers) for _, _, function in rewards)


def _answers(texts: list[str], columns: dict[str, list[Any]], rewards: Sequence[NamedReward]) -> list[str | None]:
    """Those of the first reward that finds any."""
    for name, _, function in rewards:
        if isinstance(function, GivesAnswers):
            answers = function.answers(texts, **columns)
            if len(answers) != len(texts) or not all(isinstance(answer, str | None) for answer in answers):
                raise UserError(f"reward {name!r}: answers() must give {len(texts)} texts or None, got {answers!r:.80}")
            return list(answers)
    return [None] * len(texts)


def in_order(judged: Sequence[Judged]) -> list[Judged]:
    """Of all ranks, by prompt and sample; collective."""
    everywhere = [one for part in distributed.gather_objects(judged) for one in part]
    return sorted(everywhere, key=lambda one: (one.number, one.sample))


def per_problem(judged: Sequence[Judged], num_samples: int, with_answers: bool) -> dict[str, list[float]]:
    """`mean@N`, `maj@k` and `pass@k` of each problem; k as `sample_sizes` has them, for maj without 2, which N may be.

    Args:
        judged: in order, all samples of each problem.
    """
    groups = [list(group) for _, group in groupby(judged, key=lambda one: one.number)]
    assert all(len(group) == num_samples for group in groups)
    rewards = [[one.score for one in group] for group in groups]
    answers = [[one.answer for one in group] for group in groups]
    figures = {f"mean@{num_samples}": [mean_reward(group) for group in rewards]}
    sizes = sample_sizes(num_samples)
    if with_answers:
        for k in (k for k in sizes if k > 2 or k == num_samples):
            figures[f"maj@{k}"] = [maj_at_k(a, r, k) for a, r in zip(answers, rewards, strict=True)]
    for k in sizes:
        figures[f"pass@{k}"] = [pass_at_k(group, k) for group in rewards]
    return figures


def sample_sizes(num_samples: int) -> list[int]:
    """The k above 1 that figures of N samples are given for: powers of two, and N itself."""
    return sorted({*powers_of_two(num_samples), num_samples} - {1})


def figure_names(num_samples: int) -> list[str]:
    """Those that `per_problem` and `of_samples` can give, mean@N first; maj@k only where a reward gives answers."""
    one = Judged(0, 0, 0.0, None, 1, True)
    return [*per_problem([one] * num_samples, num_samples, True), *of_samples([one])]


def of_samples(judged: Sequence[Judged]) -> dict[str, float]:
    """`mean_length` in tokens, `clipped_ratio` (share that was cut), and `unscored` samples, which count as 0."""
    return {
        "mean_length": mean_reward([one.tokens for one in judged]),
        "clipped_ratio": mean_reward([not one.terminated for one in judged]),
        "unscored": float(sum(one.reward is None for one in judged)),
    }
