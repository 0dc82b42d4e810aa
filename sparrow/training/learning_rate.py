"""The learning rate of each step: linear warm-up, times a linear way down."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Protocol


class HasGroups(Protocol):
    """What is asked of an optimizer: groups whose `lr` may be written."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LearningRate:
    """Scales the rates that the optimizer was built with, so make it before an optimizer state is loaded.

    Args:
        optimizer: as built from the config.
        warmup_steps: step k (from 0) of the run has (k + 1) / (warmup_steps + 1) of the rate, at most all of it.
        final: share of the rate that the last step of the decay has; 1 is constant.
    """

    def __init__(self, optimizer: HasGroups, warmup_steps: int, final: float) -> None:
        self.optimizer, self.warmup_steps, self.final = optimizer, warmup_steps, final
        # Copies: torchao's rates are tensors, into which a save is read.
        self.base = [deepcopy(group["lr"]) for group in optimizer.param_groups]

    def set(self, step: int, position: int, length: int) -> None:
        """Writes the rates of one step into the optimizer.

        Args:
            step: number of the step in the run, from 0; for the warm-up.
            position, length: where it stands in the decay: position 0 has the whole rate, length - 1 exactly `final`
                of it. A decay of length 1 has the whole rate.
        """
        progress = position / max(length - 1, 1)
        # In this form both ends are exact, and a constant rate is constant to the last bit.
        decay = (1 - progress) + progress * self.final
        share = min((step + 1) / (self.warmup_steps + 1), 1.0) * decay
        for group, base in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = base * share
