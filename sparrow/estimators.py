"""What n samples of a problem say of a model, and how sure a mean over problems is.

    mean@n    mean reward
    pass@k    expected best reward of k samples drawn without replacement from the n, k <= n. With rewards of 0 and 1
              this is the unbiased estimate of Chen et al. (arXiv 2107.03374, section 2.1): 1 - C(n - c, k) / C(n, k)
    maj@k     reward of the answer that most of k samples give, mean over the blocks of k that n samples hold

An interval says how far the figure would move with other problems of the same kind. It is wide where they are few: of
the 30 problems of AIME with half of them solved, 95 % are .5 +- .18. It has no width where all problems have one value,
which then says nothing of how sure it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 2000
CONFIDENCE = 0.95
_NUMBERS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its interval, whose bounds are None of a single problem."""

    value: float
    low: float | None
    high: float | None


def mean_reward(rewards: Sequence[float]) -> float:
    """mean@n."""
    return sum(rewards) / len(rewards)


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """pass@k of n >= k samples.

    The j-th best of n is the best of k with probability C(n - 1 - j, k - 1) / C(n, k). The first is k / n, each next
    one follows by a factor below 1: no large number is ever formed.
    """
    n = len(rewards)
    assert 1 <= k <= n, (k, n)
    share, total = k / n, 0.0
    for j, reward in enumerate(sorted(rewards, reverse=True)[: n - k + 1]):
        total += share * reward
        if j < n - k:
            share *= (n - k - j) / (n - 1 - j)
    return total


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Mean reward of the samples that give the most frequent answer.

    Of answers that are equally frequent each wins as often: the result is the mean over them. A sample without an
    answer has no vote. Where none has one, it is the mean reward.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return mean_reward(rewards)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    of_winners = [
        mean_reward([reward for given, reward in zip(answers, rewards, strict=True) if given == answer])
        for answer in winners
    ]
    return mean_reward(of_winners)


def maj_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """maj@k of n >= k samples: mean over consecutive blocks of k; samples that do not fill one are left out."""
    assert 1 <= k <= len(rewards), (k, len(rewards))
    starts = range(0, len(rewards) - k + 1, k)
    return mean_reward([majority(answers[start : start + k], rewards[start : start + k]) for start in starts])


def powers_of_two(n: int) -> list[int]:
    """2, 4, 8, ... up to n: the k of pass@k; pass@1 is the mean."""
    return [2**exponent for exponent in range(1, n.bit_length()) if 2**exponent <= n]


def over_problems(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean over problems with the 95 % percentile interval of a bootstrap that draws problems with replacement.

    Args:
        values: one number per problem: a mean@n, or the difference of two for the same problem.
        seed: the same seed and values give the same interval.
    """
    value = mean_reward(values)
    if len(values) == 1:
        return Estimate(value, None, None)
    generator = torch.Generator().manual_seed(seed)
    values_N = torch.tensor(values, dtype=torch.float64)
    rows = max(1, _NUMBERS_AT_ONCE // len(values))
    means = []
    for start in range(0, RESAMPLES, rows):
        shape = (min(rows, RESAMPLES - start), len(values))
        means.append(values_N[torch.randint(len(values), shape, generator=generator)].mean(1))
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.cat(means).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(value, low, high)
