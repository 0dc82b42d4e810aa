"""How the gold answer of a published data set is got from a row: a column, the text after ####, a box, an integer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sparrow.components.row_fields import lookup

_INTEGER = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")
_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


class UnusableGold(Exception):
    """This row has no gold answer that a reward could use; the message says why."""


class OutsideDates(UnusableGold):
    """Nothing is wrong with this row: it is of a day that was not asked for."""


@dataclass(frozen=True)
class Gold:
    """What a row gives a reward.

    Attributes:
        columns: `answer`, or `tests` and perhaps `starter_code`.
        fields: what templates may name besides the row's columns.
        solutions: programs that the data set says are right.
    """

    columns: dict[str, Any]
    fields: dict[str, str] = field(default_factory=dict)
    solutions: tuple[str, ...] = ()


class GoldExtractor(Protocol):
    """What the preparation asks of a `gold` component."""

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        """The gold answer of a row; UnusableGold where it has none, UserError where the column is missing."""
        ...


class ColumnAnswer:
    """The answer as it stands in a column, without the whitespace around it; a number that is whole as an integer."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        return Gold({"answer": _text(lookup(row, self._column, where))})


class HashAnswer:
    """The number after the last `####` of a worked solution (GSM8K), without thousands separators and dollar sign."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        _, mark, answer = _text(lookup(row, self._column, where)).rpartition("####")
        if not mark:
            raise UnusableGold("no #### in the solution")
        number = answer.strip().replace(",", "").removeprefix("$")
        if not _NUMBER.fullmatch(number):
            raise UnusableGold(f"no number after ####: {answer.strip()[:40]!r}")
        return Gold({"answer": number})


class BoxedAnswer:
    """The content of the last `\\boxed{}` of a worked solution (MATH), whatever braces are in it."""

    def __init__(self, column: str) -> None:
        self._column = column

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        answer = last_boxed(_text(lookup(row, self._column, where)))
        if not answer:
            raise UnusableGold("no closed and filled \\boxed{} in the solution")
        return Gold({"answer": answer})


class IntegerAnswer:
    """An integer within bounds, as text or number: `025`, 25 and 25.0 are all `25`; `unit` at its end is taken off."""

    def __init__(self, column: str, low: int | None = None, high: int | None = None, unit: str = "") -> None:
        self._column, self._low, self._high, self._unit = column, low, high, unit

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        text = _text(lookup(row, self._column, where))
        match = _INTEGER.fullmatch(text.removesuffix(self._unit).rstrip())
        if match is None or len(match[2]) > 100:
            raise UnusableGold(f"not an integer: {text[:40]!r}")
        value = int(match[1] + match[2])
        if (self._low is not None and value < self._low) or (self._high is not None and value > self._high):
            raise UnusableGold(f"{value} is not within {self._low} and {self._high}")
        return Gold({"answer": str(value)})


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}` or `\\fbox{...}`; of `\\boxed 2` the word. None where it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = re.sub(r"^\\[a-z]+\s*", "", text[start:])
    if not rest.startswith("{"):
        word = re.match(r"[^\s$]+", rest)
        return word[0] if word else None
    depth = 0
    # An escaped brace is a character, not a group.
    for match in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0 and match[0] == "}":
            return rest[1 : match.start()].strip()
    return None


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise UnusableGold(f"no text or number but {value!r:.40}")
