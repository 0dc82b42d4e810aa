"""Where the time of a rollout goes: wrappers around what the engine's loop calls, which it does not notice.

Axes: B rows of a run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparrow.engine.decode import RolloutModel, Stepper
from sparrow.engine.rows import Rows
from sparrow.protocols import Attention, KVCache


class Clock:
    """Seconds by phase; the device is waited for at both ends of one, so that none pays for another's work.

    What the measuring itself takes is the phase `meter`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds what happens inside to `name`."""
        started = self.now()
        yield
        self.seconds[name] += self.now() - started

    def now(self) -> float:
        """Seconds, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class MeteredModel:
    """A model for all but the decode steps: what it does is prefill, and the first token after it."""

    def __init__(self, model: RolloutModel, clock: Clock) -> None:
        self.model, self.clock = model, clock

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, /) -> Tensor:
        with self.clock.phase("prefill"):
            return self.model(tokens_T, positions_T, attention)

    def logits(self, hidden_NE: Tensor, /) -> Tensor:
        with self.clock.phase("prefill"):
            return self.model.logits(hidden_NE)


class MeteredCache:
    """A cache whose copies from and to the host are timed; in everything else it is the one it wraps."""

    def __init__(self, cache: KVCache, clock: Clock) -> None:
        self.cache, self.clock = cache, clock

    def swap_out(self, blocks: list[int]) -> Any:
        with self.clock.phase("swap"):
            return self.cache.swap_out(blocks)

    def swap_in(self, saved: Any, blocks: list[int]) -> None:
        with self.clock.phase("swap"):
            self.cache.swap_in(saved, blocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


class MeteredStarts:
    """The random numbers of a sequence, timed: made once as it starts, not at every look. Keeps the order of starts."""

    def __init__(self, uniforms: Callable[[int, int], Tensor], clock: Clock) -> None:
        self.uniforms, self.clock = uniforms, clock
        self.order: list[tuple[int, int]] = []

    def __call__(self, prompt: int, sample: int) -> Tensor:
        if (prompt, sample) not in self.order:
            self.order.append((prompt, sample))
        with self.clock.phase("start"):
            return self.uniforms(prompt, sample)


@dataclass(frozen=True)
class DecodeRun:
    """One call of a stepper: steps asked for and taken, and cached tokens of each row half-way."""

    steps: int = 0
    executed: int = 0
    lengths: list[int] = field(default_factory=list)


class MeteredStepper:
    """Times decode steps.

    Args:
        sampled: take one step for all those of a run, the middle one, and move the lengths on by the others. What the
            scheduler sees is a run of all steps, token by token; keys, values and tokens that were skipped are noise.

    Attributes:
        last: run; reset by whoever reads it.
    """

    def __init__(self, stepper: Stepper, rows: Rows, clock: Clock, sampled: bool) -> None:
        self.stepper, self.rows, self.clock, self.sampled = stepper, rows, clock, sampled
        self.last = DecodeRun()

    def run(self, rows: list[int], longest: int, steps: int) -> None:
        """See `Stepper`."""
        executed = 1 if self.sampled else steps
        skipped = steps - executed
        with self.clock.phase("meter"):
            rows_B = torch.tensor(rows, device=self.rows.device)
            self._skip(rows_B, skipped // 2)
            self.last = DecodeRun(steps, executed, self._lengths_after(rows_B, executed // 2))
        with self.clock.phase("decode"):
            self.stepper.run(rows, longest, executed)
        with self.clock.phase("meter"):
            self._skip(rows_B, skipped - skipped // 2)

    def _skip(self, rows_B: Tensor, count: int) -> None:
        """Makes the rows that are not done `count` tokens longer, at most to their limits."""
        rows = self.rows
        done_B, length_B, limit_B = rows.done_R[rows_B], rows.response_length_R[rows_B], rows.limit_R[rows_B]
        length_B = torch.where(done_B, length_B, torch.minimum(length_B + count, limit_B))
        rows.response_length_R[rows_B] = length_B
        rows.done_R[rows_B] = done_B | (length_B == limit_B)

    def _lengths_after(self, rows_B: Tensor, count: int) -> list[int]:
        """Cached tokens of each row in `count` steps."""
        rows = self.rows
        response_B = torch.minimum(rows.response_length_R[rows_B] + count, rows.limit_R[rows_B])
        return (rows.prompt_length_R[rows_B] + response_B).tolist()
