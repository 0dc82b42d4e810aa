"""Untrusted text (prompts, responses, names of metrics) made harmless: in HTML, and in JSON inside a script element."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from typing import Any

# Everything but tab and newline that has no glyph of its own, or changes how its neighbours are shown.
_UNSEEN = re.compile(r"[^\t\n\x20-\x7e\xa1-\xac\xae-\u01ff\u0400-\u04ff\u3000-\u9fff]")
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(value: Any) -> str:
    """Control, direction and surrogate characters as their code point: they can neither act nor break the encoding."""
    return _UNSEEN.sub(_code_point, str(value).replace("\r\n", "\n"))


def _code_point(match: re.Match[str]) -> str:
    character = match[0]
    return f"[U+{ord(character):04X}]" if unicodedata.category(character) in _HIDDEN else character


def escaped(value: Any) -> str:
    """For the text of an element or a quoted attribute."""
    return html.escape(visible(value))


def script_json(value: Any) -> str:
    """JSON that no HTML parser takes for the end of its script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def number(value: float) -> str:
    """Four digits, as a person would write them: 0.9312, 1234, 12345, 1.2e-07, nan."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    return f"{value:.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"
