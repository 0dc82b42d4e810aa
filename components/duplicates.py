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

GOLD_COLUMNS = ("answer", "tests")
_LATEX_SPACE = re.compile(r"\\[,;:! ]")


def normalised(text: str) -> str:
    """Without whitespace, dollar signs and LaTeX spaces (`\\,` `\\;` `\\:` `\\!` `\\ ` `~`); NFC, case folded."""
    close = "".join(_LATEX_SPACE.sub("", text).replace("~", "").replace("$", "").split())
    folded = unicodedata.normalize("NFC", close).casefold()
    return unicodedata.normalize("NFC", folded)


def fingerprint(text: str) -> str:
    """16 hexadecimal digits of SHA-256 of the normalised text: two texts in 10^5 collide once in 10^9 data sets."""
    return hashlib.sha256(normalised(text).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompt_text(prompt: str | Sequence[Message]) -> str:
    """The text of a prompt, of all its messages."""
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def gold_text(columns: Mapping[str, Any]) -> str:
    """The gold answer as text to compare, without the whitespace around it; empty where there is none."""
    gold = {name: columns[name] for name in GOLD_COLUMNS if columns.get(name) is not None}
    stripped = {name: value.strip() if isinstance(value, str) else value for name, value in gold.items()}
    return json.dumps(stripped, sort_keys=True, default=str) if stripped else ""


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


def find_duplicates(examples: Sequence[Example]) -> Duplicates:
    """Among all examples, by normalised prompt; the first one of equals stays."""
    keys = [fingerprint(prompt_text(example.prompt)) for example in examples]
    golds: dict[str, set[str]] = {}
    for key, example in zip(keys, examples, strict=True):
        golds.setdefault(key, set()).add(gold_text(example.columns))
    conflicting = {index for index, key in enumerate(keys) if len(golds[key]) > 1}
    first: dict[str, int] = {}
    for index, key in enumerate(keys):
        first.setdefault(key, index)
    repeated = {index for index, key in enumerate(keys) if first[key] != index}
    return Duplicates(repeated - conflicting, conflicting)
