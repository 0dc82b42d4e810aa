"""Where the answer of a response stands, and its spelling: text only, linear in the response, no mathematics.

What a model writes is hostile. Only the end of a response is looked at, and only so much of an answer; nothing here
evaluates anything.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

# Of a response's end, in which its answer must stand, and of an answer. Longer answers are wrong unread.
MAX_TAIL_CHARS = 20_000
MAX_ANSWER_CHARS = 1_000
MAX_NESTING = 40

_BRACE_OR_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*\{?|\\.|[{}]", re.DOTALL)
_ANCHOR = re.compile(r"(?:answer|solution)\W{0,8}?(?:\s+is\b|:|=)|####", re.IGNORECASE)
# Another opener ends a formula: ten thousand of them must not each be searched to the end.
_NO_BRACKET = r"(?:[^\\]|\\(?![()\[\]]))+"
_MATH = re.compile(rf"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(({_NO_BRACKET})\\\)|\\\[({_NO_BRACKET})\\\]")
# ASCII digits, thousands grouped or not; a sign counts only where no digit precedes it.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.])[+-])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"(?:/[0-9]+(?![0-9.]))?(?:\s*\\?%)?"
)


def find_answer(text: str, truncated: bool = False) -> str | None:
    """The response's answer as it is written; None where it gives none.

    1. Only what follows the last `</think>` counts. A `<think>` that is not closed leaves no answer.
    2. The last `\\boxed{...}` (or `\\fbox`); of nested ones the outermost. If it is empty or not closed there is no
       answer, whatever stands before it.
    3. Without any box, and if the response was not truncated: what follows the last "answer is", "answer:" or "####"
       on its line; else the last formula in dollars or the last number, whichever ends later.
    """
    text = text[-MAX_TAIL_CHARS:]
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    boxed, content = last_box(text)
    if boxed:
        return content
    return None if truncated else _from_text(text.replace("\u2212", "-"))


def last_box(text: str) -> tuple[bool, str | None]:
    """Whether there is a box, and the last one's content; one pass."""
    opened: list[tuple[bool, int]] = []  # is a box, start of its content
    found, content, end_of_content = False, None, -1
    bare: int | None = None  # where the content of the last box begins, if it has no braces
    for match in _BRACE_OR_BOX.finditer(text):
        token = match[0]
        if token.startswith(("\\boxed", "\\fbox")):
            found = True
            if token.endswith("{"):
                opened.append((True, match.end()))
            content, end_of_content = None, -1
            bare = None if token.endswith("{") else match.end()
        elif token == "{":
            opened.append((False, match.end()))
        elif token == "}" and opened:
            is_box, start = opened.pop()
            # Inner ones close first: an outer box takes over the content, and one that stays open leaves it.
            if is_box and (bare is not None or content is None or start <= end_of_content):
                content, end_of_content, bare = text[start : match.start()], match.start(), None
    if bare is not None:
        content = _without_braces(text, bare)
    content = content.strip() if content is not None else None
    return found, content or None


def _without_braces(text: str, start: int) -> str | None:
    """`\\boxed 5`: TeX would take one token, people mean the word."""
    match = re.compile(r"[^\s$]+").match(text, start)
    return match[0].rstrip(".,") if match else None


def _from_text(text: str) -> str | None:
    if anchors := list(_ANCHOR.finditer(text)):
        line = text[anchors[-1].end() :].lstrip(" :*\n").partition("\n")[0]
        formula = _MATH.match(line)
        stated = _inner(formula) if formula else re.split(r"\.(?:\s|$)|\bbecause\b|\bsince\b", line, maxsplit=1)[0]
        if stated.strip(" *"):
            return stated.strip(" *")
    formulas, numbers = list(_MATH.finditer(text)), list(_NUMBER.finditer(text))
    if formulas and (not numbers or formulas[-1].end() >= numbers[-1].end()):
        return _inner(formulas[-1]).strip() or None
    return numbers[-1][0] if numbers else None


def _inner(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = {
    **dict.fromkeys("−–—‒", "-"),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/"},
    **{"π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge "},
    **{"≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "≈": r"\approx "},
    **{"√": r"\sqrt ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "ℝ": r"\mathbb{R}", "′": "'"},
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060", ""),
}
_FRACTIONS = {"½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅛": (1, 8), "⅜": (3, 8)}
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}


def _power_of_ten(match: re.Match[str]) -> str:
    return rf"\times 10^{{{_SCALES[match[1]]}}}"


# In this order.
_TIDY: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|limits|bigl?|bigr?|Bigl?|Bigr?)(?![A-Za-z])"), ""),
    (re.compile(r"\\left\s*(?=[\\(\[|{.])\.?|\\right\s*(?=[\\)\]|}.])\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (
        re.compile(
            r"\\(?:math(?:rm|bf|it|sf|tt)|boldsymbol|bm|text(?:bf|it|rm|normal|sf|tt)|mbox|hbox|operatorname)\*?\s*\{"
        ),
        r"\\text{",
    ),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le"),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge"),
    (re.compile(r"\\(?:lbrace|rbrace)(?![A-Za-z])"), lambda m: r"\{" if m[0] == r"\lbrace" else r"\}"),
    (re.compile(r"\^\s*\{?\s*(?:\\circ|\\degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])"), r"^\\circ "),
    (re.compile(r"\{([:=<>])\}"), r"\1"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"(?<=[0-9A-Za-z)])\*\*(?=[0-9A-Za-z({-])"), "^"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,?|,\\!)(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"\\!|\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\[,;: >]|(?<!\\)~"), " "),
    (re.compile(r"\\?\$|\\[()]|(?<!\\)\\[\[\]]|\*\*"), " "),
    (re.compile(r"(?<=[0-9])\s*[eE]\s*([+-]?[0-9]+)(?![0-9.A-Za-z])"), r"\\times 10^{\1}"),
    (re.compile(r"(?<=[0-9])\s*(?:\\text ?\{)?\s*(hundred|thousand|million|billion)\s*\}?(?![A-Za-z])"), _power_of_ten),
    (re.compile(r"\s+"), " "),
]
# A trigonometric function of degrees; degrees by themselves are plain numbers with a unit.
_TRIG_OF_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z]) ?(?:\^ ?\{?[0-9]\}? ?)?)"
    r"(?:\( ?([0-9]{1,9}(?:\.[0-9]{1,9})?) ?\^\\circ ?\)|\{? ?([0-9]{1,9}(?:\.[0-9]{1,9})?) ?\^\\circ ?\}?)"
)
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]{0,9})\.([0-9]{0,9})\\(?:overline|bar|dot) ?(?:\{([0-9]{1,9})\}|([0-9]))(?![0-9]|\\dot)"
)
_CHOOSE = [
    re.compile(
        r"(?:\\text ?\{ ?C ?\}|(?<![A-Za-z\\])C) ?_ ?(?:\{([0-9]{1,4})\}|([0-9])) ?\^ ?(?:\{([0-9]{1,4})\}|([0-9]))"
    ),
    re.compile(r"(?:\{\} ?|(?<![0-9A-Za-z}]))_ ?(?:\{([0-9]{1,4})\}|([0-9])) ?C ?_ ?(?:\{([0-9]{1,4})\}|([0-9]))"),
]
_SET_OF_ALL = re.compile(r"\\\{ ?[a-z] ?(?:\\in ?(?:\\mathbb ?\{R\}|R) ?)?(?:\||\\mid(?![A-Za-z])|:)(.*)\\\}")
_DOLLARS = re.compile(r"\s*\\?\$\s?([0-9][0-9,.{}]*?)[.,;]?\s*")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?(?![0-9,])")
_MIXED = re.compile(r"(?<![0-9.}/^_])(-?)([0-9]+) ?\\frac ?(?:\{([0-9]+)\}\{([0-9]+)\}|([0-9])([0-9])(?![0-9]))")
_MIXED_PLAIN = re.compile(r"(-?)([0-9]+) ([0-9]+)/([0-9]+)")


@lru_cache(maxsize=4096)
def tidy(answer: str) -> str:
    """One spelling for what is written in many: Unicode, spacing, dollars, fonts, thousands, e-notation, mixed."""
    text = _ascii(answer)
    if dollars := _DOLLARS.fullmatch(text):
        text = rf"{dollars[1]}\text{{ dollars}}"
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text.endswith((".", ",", ";")) and not text.endswith("\\,"):
        text = text[:-1].rstrip()
    if text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1].strip()
    if _GROUPED.match(text):  # 1,234 is a number; (1,234) and 1, 234 are two
        text = _GROUPED.sub(lambda match: match[0].replace(",", ""), text, count=1)
    text = _REPEATING.sub(_repeating, text)
    text = _TRIG_OF_DEGREES.sub(lambda match: rf"{match[1]}(\frac{{{match[2] or match[3]}\pi}}{{180}})", text)
    for pattern in _CHOOSE:
        text = pattern.sub(_binomial, text)
    if members := _SET_OF_ALL.fullmatch(text):
        text = members[1].strip()
    text = _MIXED.sub(_improper, text)
    plain = _MIXED_PLAIN.fullmatch(text)
    return _improper(plain) if plain else text


def _ascii(text: str) -> str:
    for sign, (numerator, denominator) in _FRACTIONS.items():
        text = text.replace(sign, rf"\frac{{{numerator}}}{{{denominator}}}")
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    text = re.sub(r"\\sqrt (\([^()]*\)|[0-9A-Za-z]+)", lambda match: rf"\sqrt{{{match[1].strip('()')}}}", text)
    return "".join(_SYMBOLS.get(character, character) for character in unicodedata.normalize("NFKC", text))


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _repeating(match: re.Match[str]) -> str:
    before, repeated = match[1] + match[2], match[3] or match[4]
    numerator = int(before + repeated) - int(before or "0")
    return rf"\frac{{{numerator}}}{{{10 ** len(match[2]) * (10 ** len(repeated) - 1)}}}"


def _binomial(match: re.Match[str]) -> str:
    of, chosen = match[1] or match[2], match[3] or match[4]
    return rf"\binom{{{of}}}{{{chosen}}}"


def _improper(match: re.Match[str]) -> str:
    sign, whole, *parts = (group for group in match.groups() if group is not None)
    digits = [int(part) for part in (whole, *parts) if len(part) <= 18]
    if len(digits) < 3:
        return match[0]
    return rf"{sign}\frac{{{digits[0] * digits[2] + digits[1]}}}{{{digits[2]}}}"


def too_much(answer: str) -> bool:
    """Longer or deeper than any answer worth reading."""
    if len(answer) > MAX_ANSWER_CHARS:
        return True
    text = unicodedata.normalize("NFKC", answer)  # one sign may be 18, and a full-width bracket is one
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return len(text) > MAX_ANSWER_CHARS or deepest > MAX_NESTING
