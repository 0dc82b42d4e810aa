"""Whether two answers say the same, where that takes no algebra: spelling, plain numbers, words, choices, times, bases.

The rules that math-verify lacks are here, too, and hold before it is asked (sparrow/components/math_judge.py).
"""

from __future__ import annotations

import re
from fractions import Fraction

from sparrow.components.math_answer import tidy
from sparrow.components.math_words import base_digits, choice, clock, is_time, split_unit, word_key

_RATIONAL = re.compile(
    r"(?P<sign>[+-]?) ?(?:(?P<decimal>[0-9]{0,15}\.[0-9]{1,15})"
    r"|\\frac ?\{(?P<a>[0-9]{1,15})\} ?\{(?P<b>[0-9]{1,15})\}|(?P<c>[0-9]{1,15})(?: ?/ ?(?P<d>[0-9]{1,15}))?)"
)
# A space that parts no two words or digits.
_IDLE_SPACE = re.compile(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])")
# Coordinates or an interval.
_PARTS = re.compile(r"([(\[])([^()\[\]{}]+)([)\]])")
# Decimals this far apart are not the same rounded; those between are for mathematics to tell.
_SURELY_APART = Fraction(1, 10**5)


def quick_verdict(answer: str, gold: str) -> bool | None:
    """Right, wrong, or None where mathematics has to tell."""
    ours, theirs = tidy(answer), tidy(gold)
    if _IDLE_SPACE.sub("", ours) == _IDLE_SPACE.sub("", theirs):
        return bool(ours)
    for rule in (_by_choice, _by_words, _by_clock, _by_base):
        verdict = rule(ours, theirs)
        if verdict is not None:
            return verdict
    (our_value, our_unit), (their_value, their_unit) = split_unit(ours), split_unit(theirs)
    if our_unit and their_unit and our_unit != their_unit:
        return False
    verdict = _by_parts(our_value, their_value)
    return by_numbers(our_value, their_value) if verdict is None else verdict


def _by_choice(answer: str, gold: str) -> bool | None:
    letter = choice(gold, strict=True)
    return None if letter is None else choice(answer) == letter


def _by_words(answer: str, gold: str) -> bool | None:
    """A gold answer in words wants these words; letters are never multiplied, else "no" would be "on"."""
    wanted = word_key(gold)
    if wanted is not None:
        return word_key(answer) == wanted
    return False if word_key(answer) is not None else None


def _by_clock(answer: str, gold: str) -> bool | None:
    ours, theirs = clock(answer), clock(gold)
    if ours is None or theirs is None:
        return None
    if not is_time(answer) and not is_time(gold):
        a, b = ours[0], theirs[0]
        return len(a) == len(b) and any(a) == any(b) and all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))
    return ours[0] == theirs[0] and (ours[1] == theirs[1] or not ours[1] or not theirs[1])


def _by_base(answer: str, gold: str) -> bool | None:
    """An answer may leave out the base that the gold one has, and not the other way round."""
    ours, theirs = base_digits(answer), base_digits(gold)
    if ours is None or theirs is None or (ours[1] is None and theirs[1] is None):
        return None
    return ours[0] == theirs[0] and ours[1] in (theirs[1] or "10", None)


def _by_parts(answer: str, gold: str) -> bool | None:
    """Part by part, in order; without this (1,1) and (2,2) would be the same, empty, open interval."""
    ours, theirs = _PARTS.fullmatch(answer), _PARTS.fullmatch(gold)
    if ours is None or theirs is None:
        return None
    pairs = [ours[2].split(","), theirs[2].split(",")]
    if (ours[1], ours[3], len(pairs[0])) != (theirs[1], theirs[3], len(pairs[1])) or len(pairs[0]) < 2:
        return None
    verdicts = [by_numbers(ours.strip(), theirs.strip()) for ours, theirs in zip(*pairs, strict=True)]
    if False in verdicts:
        return False
    return None if None in verdicts else True


def by_numbers(answer: str, gold: str) -> bool | None:
    """Of two plain numbers; None where one is not plain, or decimals are close."""
    a, b = plain_integer(answer), plain_integer(gold)
    if a is not None and b is not None:
        return a == b
    x, y = _rational(answer), _rational(gold)
    if x is None or y is None:
        return None
    if x[0] == y[0]:
        return True
    rounded = x[1] or y[1]
    return None if rounded and abs(x[0] - y[0]) <= _SURELY_APART * max(abs(x[0]), abs(y[0])) else False


def plain_integer(tidied: str) -> str | None:
    """In canonical digits, if it is one; as text, since Python refuses to parse 5,000 digits."""
    match = re.fullmatch(r"([+-]?) ?0*([0-9]+)", tidied)
    if match is None:
        return None
    return match[2] if match[1] != "-" or match[2] == "0" else f"-{match[2]}"


def _rational(tidied: str) -> tuple[Fraction, bool] | None:
    """The value of a plain integer, fraction or decimal of at most 15 digits, and whether it is a decimal."""
    match = _RATIONAL.fullmatch(tidied)
    if match is None:
        return None
    decimal, denominator = match["decimal"], int(match["b"] or match["d"] or 1)
    if denominator == 0:
        return None
    value = Fraction(decimal) if decimal else Fraction(int(match["a"] or match["c"]), denominator)
    return (-value if match["sign"] == "-" else value), decimal is not None
