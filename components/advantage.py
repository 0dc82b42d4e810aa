"""Rewards to advantages, relative to the other samples of the same prompt.

Axes: S sequences of the step, G groups (prompts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.errors import UserError


@dataclass
class Advantages:
    """What a step learns from.

    Attributes:
        advantages_S: fp32.
        keep_S: bool; False where the sequence leaves the loss and its denominators (`zero_variance="drop"`).
        metrics: reward, reward_std, frac_reward_zero_std (TRL's names), rewards/not_applicable (count).
    """

    advantages_S: Tensor
    keep_S: Tensor
    metrics: dict[str, float]


class GroupAdvantage:
    """Reward minus the group's mean, over the group's standard deviation (GRPO, arXiv 2402.03300, 4.1.2).

    The deviation is the unbiased one (n - 1), as in TRL and verl. A NaN reward means "not applicable" (no reward
    function had an opinion): it is left out of mean and deviation, its advantage is 0 and it is counted.

    A group whose rewards are all equal teaches nothing, and a loss of exactly 0 over such a batch is no error. With
    "keep" its tokens still count in the loss denominators, so a step with many such groups is a smaller step (TRL,
    verl). With "drop" they leave the denominators, as in DAPO's dynamic sampling without the refill (arXiv
    2503.14476, 3.2), and the other groups' gradient does not depend on them.

    Args:
        normalize_std: divide by the deviation; False for Dr. GRPO (arXiv 2503.20783, 3.2).
        eps: added to the deviation (verl's value).
        zero_variance: "keep" or "drop".

    Raises:
        UserError: unknown `zero_variance`, or eps not positive.
    """

    def __init__(self, normalize_std: bool = True, eps: float = 1e-6, zero_variance: str = "keep") -> None:
        if zero_variance not in ("keep", "drop"):
            raise UserError(f"zero_variance {zero_variance!r} is neither 'keep' nor 'drop'")
        if eps <= 0:
            raise UserError(f"eps {eps} must be positive: it guards the division by a group's deviation")
        self.normalize_std = normalize_std
        self.eps = eps
        self.zero_variance = zero_variance

    @torch.no_grad()
    def __call__(self, rewards_S: Tensor, groups_S: Tensor) -> Advantages:
        """Advantages of whole groups: all samples of a prompt must be in the call, in any order.

        Args:
            rewards_S: float; NaN for "not applicable".
            groups_S: id of the prompt each sequence answers, int64.

        Raises:
            UserError: an infinite reward, or a group of one sample.
        """
        if rewards_S.isinf().any():
            raise UserError(f"reward {float(rewards_S[rewards_S.isinf()][0])} is not finite: see the reward functions")
        applicable_S = ~rewards_S.isnan()
        mean_G, std_G, varies_G, index_S = _group_statistics(rewards_S, applicable_S, groups_S)
        centered_S = rewards_S.double() - mean_G[index_S]
        scaled_S = centered_S / (std_G[index_S] + self.eps) if self.normalize_std else centered_S
        # Zero by decision, not by arithmetic: equal rewards differ from their rounded mean by an ulp, which a
        # deviation just as small would blow up.
        informative_S = applicable_S & varies_G[index_S]
        return Advantages(
            advantages_S=torch.where(informative_S, scaled_S, 0.0).float(),
            keep_S=informative_S if self.zero_variance == "drop" else torch.ones_like(informative_S),
            metrics={
                "reward": float(rewards_S[applicable_S].double().mean()),
                "reward_std": float(std_G.mean()),
                "frac_reward_zero_std": float((~varies_G).double().mean()),
                "rewards/not_applicable": float((~applicable_S).sum()),
            },
        )


def _group_statistics(
    rewards_S: Tensor, applicable_S: Tensor, groups_S: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A group's mean, unbiased deviation and whether its applicable rewards differ; the group of each sequence."""
    _, index_S, samples_G = torch.unique(groups_S, return_inverse=True, return_counts=True)
    if samples_G.numel() and samples_G.min() < 2:
        raise UserError("num_samples 1 gives no group to compare a reward with: at least 2 samples per prompt")
    zeros_G = torch.zeros(samples_G.numel(), dtype=torch.float64, device=rewards_S.device)
    values_S = torch.where(applicable_S, rewards_S.double(), 0.0)
    count_G = zeros_G.index_add(0, index_S, applicable_S.double())
    mean_G = zeros_G.index_add(0, index_S, values_S) / count_G.clamp(min=1)
    square_S = torch.where(applicable_S, (values_S - mean_G[index_S]).square(), 0.0)
    std_G = (zeros_G.index_add(0, index_S, square_S) / (count_G - 1).clamp(min=1)).sqrt()
    inf = float("inf")
    low_G = (zeros_G + inf).scatter_reduce(0, index_S, torch.where(applicable_S, values_S, inf), "amin")
    high_G = (zeros_G - inf).scatter_reduce(0, index_S, torch.where(applicable_S, values_S, -inf), "amax")
    varies_G = high_G > low_G
    return mean_G, torch.where(varies_G, std_G, 0.0), varies_G, index_S
