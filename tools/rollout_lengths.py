"""Response lengths of a benchmark's queue, drawn from a stated distribution; weights are random, so they are forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from sparrow.errors import UserError

SIGMA = 0.75  # of the logarithm: the 95th percentile is 3.4 medians
KINDS = ("thinking", "uniform", "longest")


@dataclass(frozen=True)
class LengthDistribution:
    """`thinking`: log-normal, clipped; `uniform`: between the bounds; `longest`: all at the upper bound.

    Attributes:
        median: of `thinking`, before it is clipped.
        shortest, longest: bounds, both included.
    """

    kind: Literal["thinking", "uniform", "longest"] = "thinking"
    median: int = 9000
    shortest: int = 500
    longest: int = 32000

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.median <= self.longest:
            raise UserError(
                f"--shortest {self.shortest}, --median {self.median} and --longest {self.longest} must ascend from 1"
            )

    def draw(self, count: int, seed: int) -> list[int]:
        """Lengths of `count` responses."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "longest":
            return [self.longest] * count
        if self.kind == "uniform":
            return torch.randint(self.shortest, self.longest + 1, (count,), generator=generator).tolist()
        drawn = self.median * (SIGMA * torch.randn(count, generator=generator, dtype=torch.float64)).exp()
        return drawn.round().long().clamp(self.shortest, self.longest).tolist()


@dataclass(frozen=True)
class LengthSummary:
    """What was drawn."""

    mean: float
    p50: float
    p95: float
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthSummary:
        lengths_S = torch.tensor(lengths, dtype=torch.float64)
        p50, p95 = lengths_S.quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
        return cls(float(lengths_S.mean()), p50, p95, int(lengths_S.max()))

    def __str__(self) -> str:
        return "mean {mean:.0f}, median {p50:.0f}, 95 % {p95:.0f}, longest {longest}".format(**asdict(self))
