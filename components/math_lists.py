"""Answers of several parts: what they are split into, and whether their order and number count; text only."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sparrow.components.math_words import strip_words

_SEPARATOR = re.compile(r"[,;]|(?<![A-Za-z\\])(?:or|and)(?![A-Za-z])|\\[{}]|[()\[\]{}]")
_OPENING, _CLOSING = ("(", "[", "{", r"\{"), (")", "]", "}", r"\}")
_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_MEMBER = re.compile(r"^[A-Za-z] ?(?:=|\\in(?![A-Za-z])) ?(?=\\\{)")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|ne|neq)(?![A-Za-z])")


@dataclass(frozen=True)
class Listing:
    """An answer's parts.

    Attributes:
        kind: "set" in braces; "ordered" in the brackets of coordinates or an interval; "list" without any; "one" for
            what has no two parts.
        brackets: of "ordered", as "()" or "[)".
    """

    kind: Literal["set", "ordered", "list", "one"]
    parts: tuple[str, ...]
    brackets: str = ""


def listing(tidied: str) -> Listing:
    """Of an answer without its unit."""
    text = _MEMBER.sub("", strip_words(tidied).strip())
    parts = _split(text)
    if len(parts) > 1:
        return Listing("list", parts)
    for opening, closing in ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]")):
        if text.startswith(opening) and text.endswith(closing):
            parts = _split(text[len(opening) : -len(closing)])
            if len(parts) == 1 and opening == r"\{":
                return listing(parts[0])
            if len(parts) > 1:
                return Listing("set" if opening == r"\{" else "ordered", parts, opening + closing)
    return Listing("one", (text,))


def signed(parts: tuple[str, ...]) -> list[str] | None:
    """With both signs of each ±, one part for each; None where their number is not clear from the text."""
    found = []
    for part in parts:
        signs = _SIGNS.findall(part)
        if len(signs) > 1 or _RELATION.search(part):
            return None
        found += [_SIGNS.sub(sign, part) for sign in "+-"] if signs else [part]
    return found


def _split(text: str) -> tuple[str, ...]:
    """At commas, semicolons, "or" and "and" outside of brackets; no parts where brackets close what is not open."""
    depth, start, parts = 0, 0, []
    for match in _SEPARATOR.finditer(text):
        if match[0] in _OPENING:
            depth += 1
        elif match[0] in _CLOSING:
            depth -= 1
            if depth < 0:
                return ()
        elif depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part) if depth == 0 else ()
