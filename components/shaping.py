"""Rewards that say nothing of an answer's truth: its form, its length, its repetitions. They shape beside a verifier.

Each is small against the verifier's reward by its `weight`. Axes: S sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sparrow.errors import UserError

_OPEN, _CLOSE = "<think>", "</think>"


class ThinkFormat:
    """1.0 where the response is one closed thought and an answer after it, else 0.0.

    `<think>` may be missing, as some chat templates end the prompt with it; `</think>` must stand there once.

    Args:
        boxed: whether the answer must contain a non-empty `\\boxed{...}`.
        weight: factor in the sum of rewards.
    """

    name = "think_format"

    def __init__(self, boxed: bool = False, weight: float = 1.0) -> None:
        self.boxed = boxed
        self.weight = weight

    def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        return [float(self._fits(text)) for text in completions]

    def _fits(self, text: str) -> bool:
        thought, closed, answer = text.partition(_CLOSE)
        thought = thought.strip().removeprefix(_OPEN)
        if not closed or not answer.strip() or _OPEN in thought or _OPEN in answer or _CLOSE in answer:
            return False
        return not self.boxed or _has_box(answer)


def _has_box(answer: str) -> bool:
    _, box, rest = answer.rpartition("\\boxed{")
    content, closed, _ = rest.partition("}")
    return bool(box and closed and content.strip())


class SoftOverlong:
    """0 up to `max_tokens - buffer_tokens`, from there linearly to -1 at `max_tokens` (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        max_tokens: the longest response; the engine's max_new_tokens, by an interpolation in YAML.
        buffer_tokens: how far before it the penalty begins.
        weight: factor in the sum of rewards.

    Raises:
        UserError: a buffer that is not within 1 and max_tokens.
    """

    name = "soft_overlong"

    def __init__(self, max_tokens: int, buffer_tokens: int, weight: float = 1.0) -> None:
        if not 1 <= buffer_tokens <= max_tokens:
            raise UserError(f"SoftOverlong: buffer_tokens {buffer_tokens} must be from 1 to max_tokens {max_tokens}")
        self.max_tokens = max_tokens
        self.buffer_tokens = buffer_tokens
        self.weight = weight

    def __call__(self, completions: list[str], completion_lengths: list[int], **_: Any) -> list[float | None]:
        begin = self.max_tokens - self.buffer_tokens
        return [-min(max((length - begin) / self.buffer_tokens, 0.0), 1.0) for length in completion_lengths]


class LengthReward:
    """1.0 up to `short_tokens`, falling linearly to 0.0 at `long_tokens`; a truncated response has 0.0.

    Brevity alone rewards an empty response most, so a response of no words has 0.0, and the weight should be small.

    Raises:
        UserError: unless 0 <= short_tokens < long_tokens.
    """

    name = "length"

    def __init__(self, short_tokens: int, long_tokens: int, weight: float = 1.0) -> None:
        if not 0 <= short_tokens < long_tokens:
            raise UserError(f"LengthReward: short_tokens {short_tokens} must be from 0 and below {long_tokens}")
        self.short_tokens = short_tokens
        self.long_tokens = long_tokens
        self.weight = weight

    def __call__(
        self, completions: list[str], completion_lengths: list[int], truncated: list[bool], **_: Any
    ) -> list[float | None]:
        rows = zip(completions, completion_lengths, truncated, strict=True)
        return [0.0 if cut or not text.strip() else self._of(length) for text, length, cut in rows]

    def _of(self, length: int) -> float:
        share = (self.long_tokens - length) / (self.long_tokens - self.short_tokens)
        return min(max(share, 0.0), 1.0)


class RepetitionPenalty:
    """Minus the share of the response's n-grams of words that occurred before in it, from 0 (none) to -1.

    Loops are what a rollout with too small a budget ends in.

    Args:
        n: words of an n-gram.
        weight: factor in the sum of rewards.

    Raises:
        UserError: n below 1.
    """

    name = "repetition"

    def __init__(self, n: int = 20, weight: float = 1.0) -> None:
        if n < 1:
            raise UserError(f"RepetitionPenalty: n {n} must be at least 1")
        self.n = n
        self.weight = weight

    def __call__(self, completions: list[str], **_: Any) -> list[float | None]:
        return [self._of(text.split()) for text in completions]

    def _of(self, words: list[str]) -> float:
        total = len(words) - self.n + 1
        if total < 1:
            return 0.0
        return len(set(_ngrams(words, self.n))) / total - 1.0


def _ngrams(words: list[str], n: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[start:] for start in range(n)), strict=False)
