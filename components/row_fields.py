"""Reading a row of a data set: dotted paths into nested columns, and templates that columns are put into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sparrow.errors import UserError
from sparrow.registry import did_you_mean

# Only a name in single braces is a field: LaTeX's \boxed{} and {1} stay as they are.
_FIELD = re.compile(r"\{\{([A-Za-z_][\w.]*)\}\}|\{([A-Za-z_][\w.]*)\}")
_MISSING = object()


def lookup(row: Mapping[str, Any], path: str, where: str) -> Any:
    """The value at a column's name or a dotted path: `reward_model.ground_truth`, `prompt.0.content`, `extra_info?`.

    A question mark at the end makes the column optional: None where it is missing.

    Raises:
        UserError: there is no such column; naming those there are.
    """
    name = path.removesuffix("?")
    value = _walk(row, name)
    if value is not _MISSING:
        return value
    if path.endswith("?"):
        return None
    hint = did_you_mean(name, row) or "; there are " + (", ".join(map(repr, row)) or "none")
    raise UserError(f"{where}: no column {name!r}{hint}")


def fill(template: str, row: Mapping[str, Any], where: str) -> str:
    """The template with each `{column}` replaced by its text; `{{word}}` stands for `{word}`.

    Braces in the columns' text, and braces around anything that is not a name, mean nothing.

    Raises:
        UserError: an unknown column, or one that is neither text nor a number.
    """

    def replace(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        value = lookup(row, match[2], f"{where}: template")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise UserError(f"{where}: template: {{{match[2]}}} is no text but {value!r:.60}")
        return str(value)

    return _FIELD.sub(replace, template)


def chat(text: str, system: str | None) -> list[dict[str, str]]:
    """The text as the user's message, after the system's, if there is one."""
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _walk(value: Any, path: str) -> Any:
    """A whole name goes before its parts: some columns have a dot in their name."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    head, dot, rest = path.partition(".")
    inner = _child(value, head)
    return _walk(inner, rest) if dot and inner is not _MISSING else _MISSING if dot else inner


def _child(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name, _MISSING)
    if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
        return value[int(name)]
    return _MISSING
