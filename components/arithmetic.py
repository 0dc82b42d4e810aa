"""Sums for instruction-tuned checkpoints: endless data and its reward, to see a real model learn without a data set."""

from __future__ import annotations

import random
import re
from typing import Any

from sparrow.components.data import Example
from sparrow.errors import UserError

# A sign counts only where no digit precedes it: "10-3" ends with 3. ASCII digits, thousands grouped or not.
_NUMBER = re.compile(r"(?:(?<![0-9])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


class ArithmeticProblems:
    """Chat prompts that ask for a sum; column `answer` holds it.

    Args:
        terms: numbers to add, at least 2.
        max_value: each is drawn uniformly from 1 to this.
        seed: another seed is another stream; small ranges repeat themselves, so validation on another seed overlaps.
    """

    size = None

    def __init__(self, terms: int = 2, max_value: int = 99, seed: int = 0) -> None:
        if terms < 2 or max_value < 1:
            raise UserError(f"ArithmeticProblems needs terms >= 2 and max_value >= 1, got {terms} and {max_value}")
        self.terms = terms
        self.max_value = max_value
        self.seed = seed

    def example(self, index: int) -> Example:
        generator = random.Random(f"{self.seed}/{index}")
        numbers = [generator.randint(1, self.max_value) for _ in range(self.terms)]
        question = f"What is {' + '.join(map(str, numbers))}?"
        content = f"{question} Think step by step, then give the final number in \\boxed{{}}."
        return Example([{"role": "user", "content": content}], {"answer": sum(numbers)})


def boxed_integer_reward(completions: list[str], answer: list[Any], **_: Any) -> list[float | None]:
    """1.0 where the response's number is `answer` (an integer or its text), else 0.0.

    The number is the content of the last `\\boxed{...}`, which must be one integer; without any box, the last number of
    the text. Digits are compared as text: model output is hostile, and Python refuses to parse 5,000 digits.
    Raises UserError for an `answer` that is no integer.
    """
    expected = [_canonical(str(gold)) for gold in answer]
    if None in expected:
        index = expected.index(None)
        raise UserError(f"boxed_integer_reward: answer {answer[index]!r} at index {index} is not an integer")
    return [float(_final_integer(text) == gold) for text, gold in zip(completions, expected, strict=True)]


def _final_integer(text: str) -> str | None:
    """The response's integer in canonical digits, if it has one."""
    _, box, rest = text.rpartition("\\boxed{")
    if box:
        content, closed, _ = rest.partition("}")
        number = _NUMBER.fullmatch(content.strip()) if closed else None
        return _canonical(number[0]) if number else None
    numbers = _NUMBER.findall(text)
    return _canonical(numbers[-1]) if numbers else None


def _canonical(number: str) -> str | None:
    """Without spaces, separators, plus sign and leading zeros; None for what is no integer."""
    match = re.fullmatch(r"([+-]?)0*([0-9]+)", number.strip().replace(",", ""))
    if match is None:
        return None
    return match[2] if match[1] != "-" or match[2] == "0" else f"-{match[2]}"
