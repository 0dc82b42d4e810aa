"""Rows of the sample table, as trackers without a page of their own show them.

A row holds the tokens one by one, each with its alpha; a table of texts shows those of lowest alpha in their context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Characters of no ordinary text, so that a search finds the marks.
MARK = "⟦{}⟧"
_NOT_SHOWN = ("tokens", "alphas", "omitted", "lowest", "rewards")


def flat_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and numbers only: `rewards/<name>` for each part, and the lowest tokens marked in their context."""
    flat = {name: value for name, value in row.items() if name not in _NOT_SHOWN}
    flat |= {f"rewards/{name}": value for name, value in row.get("rewards", {}).items()}
    if "lowest" in row:
        flat["lowest_alpha"] = "\n".join(_marked(token) for token in row["lowest"])
    return flat


def markdown(row: Mapping[str, Any]) -> str:
    """The row as a list of numbers and blocks of text; a model's text stands indented, where it is no markup."""
    flat = flat_row(row)
    texts = {name: value for name, value in flat.items() if isinstance(value, str)}
    numbers = [f"- {name}: {value}" for name, value in flat.items() if name not in texts]
    blocks = [f"**{name}**\n\n{_indented(value)}" for name, value in texts.items()]
    return "\n\n".join(["\n".join(numbers), *blocks])


def shorten(text: str, most: int) -> str:
    """`text` with its middle replaced by a count once it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 2
    tail = most - head
    return f"{text[:head]} [... {len(text) - most} characters ...] {text[len(text) - tail :]}"


def _marked(token: Mapping[str, Any]) -> str:
    around = f"{token['before']}{MARK.format(token['token'])}{token['after']}"
    return f"{token['alpha']:.3f} at {token['position']}: {around!r}"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
