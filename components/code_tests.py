"""The tests of a programming task: the column's form, and when an output is the expected one.

A column is {"style": "stdin", "inputs": [text, ...], "outputs": [text, ...]} or {"style": "call", "entry_point": name,
"inputs": [[argument, ...], ...], "outputs": [value, ...]}, each with an optional "tolerance". Arguments and values are
JSON, with the forms of `sparrow.sandbox.inside.values` for what JSON lacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparrow.sandbox import Failure, ProgramRun
from sparrow.sandbox.inside.values import decode

# As programs print numbers: float() would read 1_0, other scripts' digits and nan, too.
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_KEYS = ("style", "inputs", "outputs", "entry_point", "tolerance")


@dataclass(frozen=True)
class CodeTests:
    """One example's.

    Attributes:
        inputs: per test the text of the standard input, or the list of arguments.
        outputs: per test the text that is to be printed, or the value to be returned.
        entry_point: the function; None for programs that read and print.
        tolerance: that numbers may differ by, see `passes`; 0 for none.
    """

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    entry_point: str | None
    tolerance: float

    def spread(self, count: int | None) -> CodeTests:
        """At most `count` of them, evenly spaced; the first and the last among them where there are two or more.

        Where all of these expect nothing, one that expects something takes the place of the last.
        """
        if count is None or len(self.inputs) <= count:
            return self
        last = len(self.inputs) - 1
        chosen = [round(index * last / max(count - 1, 1)) for index in range(count)]
        if all(is_empty(self.outputs[index]) for index in chosen):
            chosen[-1] = next(index for index, output in enumerate(self.outputs) if not is_empty(output))
        inputs, outputs = ([values[index] for index in chosen] for values in (self.inputs, self.outputs))
        return CodeTests(inputs, outputs, self.entry_point, self.tolerance)


def read_tests(column: Any) -> CodeTests:
    """Raises: ValueError: says what is wrong with it."""
    if not isinstance(column, dict):
        raise ValueError(f"tests must be an object, not a {type(column).__name__}")
    if unknown := [key for key in column if key not in _KEYS]:
        raise ValueError(f"tests has an unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    style, inputs, outputs = (column.get(key) for key in ("style", "inputs", "outputs"))
    if style not in ("stdin", "call"):
        raise ValueError(f"tests.style must be 'stdin' or 'call', not {style!r:.60}")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not len(inputs) == len(outputs) > 0:
        raise ValueError("tests.inputs and tests.outputs must be lists of the same length, and not empty")
    entry_point, tolerance = column.get("entry_point"), column.get("tolerance") or 0.0
    if not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tests.tolerance must be a number of at least 0, not {tolerance!r:.60}")
    if style == "stdin":
        if entry_point is not None:
            raise ValueError("tests.entry_point is for the style 'call'")
        if not all(isinstance(text, str) for text in (*inputs, *outputs)):
            raise ValueError("tests.inputs and tests.outputs must be text in the style 'stdin'")
    else:
        if not isinstance(entry_point, str) or not all(part.isidentifier() for part in entry_point.split(".")):
            raise ValueError(f"tests.entry_point must name a function, not {entry_point!r:.60}")
        if not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError("tests.inputs must be lists of arguments in the style 'call'")
        inputs, outputs = ([_decoded(value) for value in values] for values in (inputs, outputs))
    if all(is_empty(output) for output in outputs):
        raise ValueError("every expected output is empty, so that a program that does nothing would pass")
    return CodeTests(inputs, outputs, entry_point, float(tolerance))


def is_empty(output: Any) -> bool:
    """Whether a program that does nothing has that output."""
    return output is None or (isinstance(output, str) and not output.strip())


def passes(given: Any, expected: Any, tolerance: float) -> bool:
    """Whether what came out of a run is what was expected.

    Text: its words, split at any whitespace, are the same. Values: equal as Python has it (True == 1 == 1.0), but for
    lists and tuples, which are the same, and nan, which equals itself. With a tolerance numbers are the same where
    they differ by at most tolerance · max(1, |expected|); of words only plain decimal numbers are numbers.
    """
    if isinstance(given, Failure):
        return False
    if isinstance(given, ProgramRun):
        return given.status == "exited" and _same_text(given.stdout, expected, tolerance)
    try:
        return _same(given, expected, tolerance)
    except (RecursionError, OverflowError):
        return False


def _same_text(given: str, expected: str, tolerance: float) -> bool:
    words, wanted = given.split(), expected.split()
    if len(words) != len(wanted):
        return False
    return all(
        word == want or (tolerance > 0 and _close(_number(word), _number(want), tolerance))
        for word, want in zip(words, wanted, strict=True)
    )


def _number(word: str) -> float:
    return float(word) if _NUMBER.fullmatch(word) else math.nan


def _close(given: float, expected: float, tolerance: float) -> bool:
    """False for nan and for infinities."""
    return abs(given - expected) <= tolerance * max(1.0, abs(expected)) < math.inf


def _same(given: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, list | tuple):
        return (
            isinstance(given, list | tuple)
            and len(given) == len(expected)
            and all(_same(one, other, tolerance) for one, other in zip(given, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(given, dict)
            and given.keys() == expected.keys()
            and all(_same(given[key], value, tolerance) for key, value in expected.items())
        )
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(given, float) and math.isnan(given)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (given, expected))
    return bool(given == expected) or (numbers and tolerance > 0 and _close(given, expected, tolerance))


def _decoded(value: Any) -> Any:
    try:
        return decode(value)
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"tests: a value cannot be read: {type(error).__name__}: {error}") from error
