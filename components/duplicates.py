"""Which prompts are the same: for de-duplication, and to keep evaluation sets out of the training data."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparrow.components.data import Example, Message
from sparrow.errors import UserError

GOLD_COLUMNS = ("answer", "tests", "ground_truth")
_NOTHING = re.compile(r"\\!|\$")  # a negative space; the border of a formula
_SPACE = re.compile(r"\\[,;: ]|~")
_LOOSE_SPACE = re.compile(r"(?<![^\W_]) | (?![^\W_])")  # one that does not stand between two letters or digits


def normalised(text: str) -> str:
    """Any space, LaTeX's (`\\,` `\\;` `\\:` `\\ ` `~`) too, is one between letters or digits, and none elsewhere.

    Without `$` and `\\!`; NFC, case folded.
    """
    spaced = " ".join(_SPACE.sub(" ", _NOTHING.sub("", text)).split())
    folded = unicodedata.normalize("NFC", _LOOSE_SPACE.sub("", spaced)).casefold()
    return unicodedata.normalize("NFC", folded)


def fingerprint(text: str) -> str:
    """16 hexadecimal digits of SHA-256 of the normalised text: two texts in 10^5 collide once in 10^9 data sets."""
    return hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """The text of a prompt, of all its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def gold_text(columns: Mapping[str, Any], gold: str | None = None) -> str:
    """The gold answer as text to compare; empty where there is none.

    Args:
        columns: of an example.
        gold: the column that holds it; None: all of `GOLD_COLUMNS` that there are.
    """
    names = GOLD_COLUMNS if gold is None else (gold,)
    values = [_comparable(columns[name]) for name in names if columns.get(name) is not None]
    return json.dumps(values, sort_keys=True, default=str) if values else ""


def _comparable(value: Any) -> Any:
    """Text without the whitespace around it; a number as its text, as other files of the same set have it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip() if isinstance(value, str | int | float) else value


@dataclass(frozen=True)
class Duplicates:
    """Indices to leave out.

    Attributes:
        repeated: a prompt that stood before, with the same gold answer.
        conflicting: prompts that stand with different gold answers, all of them: at least one must be wrong.
    """

    repeated: set[int]
    conflicting: set[int]

    def lines(self, label: str) -> list[str]:
        """For the console."""
        lines = []
        if self.repeated:
            lines.append(f"{label}: {len(self.repeated)} repeated prompts left out")
        if self.conflicting:
            lines.append(f"{label}: {len(self.conflicting)} prompts left out that stand with different answers")
        return lines


def find_duplicates(examples: Sequence[Example], gold: str | None = None) -> Duplicates:
    """Among all examples, by normalised prompt; the first one of equals stays. `gold` is as in `gold_text`."""
    if gold is not None and not any(gold in example.columns for example in examples):
        there = ", ".join(examples[0].columns) or "none"
        raise UserError(f"gold: no column {gold!r} goes on to the rewards; there are {there}")
    keys = [fingerprint(prompt_text(example.prompt)) for example in examples]
    golds: dict[str, set[str]] = {}
    for key, example in zip(keys, examples, strict=True):
        golds.setdefault(key, set()).add(gold_text(example.columns, gold))
    conflicting = {index for index, key in enumerate(keys) if len(golds[key]) > 1}
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    repeated = {index for index, key in enumerate(keys) if first[key] != index}
    return Duplicates(repeated - conflicting, conflicting)
