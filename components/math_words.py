"""Answers that are no formulas: words, choices, times, numerals in a base; and the units behind a number."""

from __future__ import annotations

import re

_NOT_WORDS = frozenset([
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "lg",
    "exp", "sqrt", "max", "min", "gcd", "lcm", "mod", "det", "pi", "inf", "infinity", "infty", "and", "or", "theta",
    "alpha", "beta",
])  # fmt: skip
_NUMBER_WORDS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
]  # fmt: skip
_SAME_WORDS = {
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions", "none"), "none"),
    **dict.fromkeys(("empty set", "the empty set", r"\emptyset", r"\varnothing", r"\{\}", r"\{ \}"), "none"),
    **{"dne": "does not exist", "undef": "undefined", "not defined": "undefined"},
}
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.&\- ]*")


def word_key(tidied: str) -> str | None:
    """Words as they are compared; None for what is mathematics."""
    bare = _TEXT.sub(lambda match: f" {match[1]} ", tidied).strip(" .!()")
    bare = re.sub(r"\s+", " ", bare)
    if bare.lower() in _SAME_WORDS or tidied in _SAME_WORDS:
        return _SAME_WORDS.get(bare.lower(), _SAME_WORDS.get(tidied))
    if bare.lower() in _NUMBER_WORDS or _WORDS.fullmatch(bare) is None:
        return None
    words = [word for word in re.split(r"[ \-.'’&]+", bare) if word]
    in_text = tidied.startswith(r"\text") and len(words[0]) > 1
    if not in_text and (not any(len(word) > 2 for word in words) and bare.lower() not in ("no", "yes")):
        return None
    if any(word.lower() in _NOT_WORDS for word in words):
        return None if not (in_text or len(words) > 1) or words[0].lower() in _NOT_WORDS else bare.casefold()
    return " ".join(words).casefold()


def strip_words(tidied: str) -> str:
    """Number words as digits, and "or" and "and" as commas."""
    text = re.sub(r"\\text ?\{ ?,? ?(or|and) ?\}", r" \1 ", tidied)
    text = _TEXT.sub(lambda match: match[1] if len(match[1].strip()) == 1 else match[0], text)
    lowered = _TEXT.sub(lambda match: match[1], text).strip().lower()
    return str(_NUMBER_WORDS.index(lowered)) if lowered in _NUMBER_WORDS else text


_CHOICE = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(([A-J])\)|([A-J])[).:])\s*(?P<rest>.*)", re.DOTALL)


def choice(tidied: str, strict: bool = False) -> str | None:
    """The letter of a multiple choice; what stands behind it, as in "(B) 12", is read over unless `strict`."""
    bare = _TEXT.sub(lambda match: match[1], tidied).strip()
    bare = re.sub(r"^(?:option|choice|answer)\s*:?\s*", "", bare, flags=re.IGNORECASE)
    if (match := _CHOICE.fullmatch(bare)) is not None:
        return match[1]
    match = None if strict else _CHOICE_WITH_TEXT.fullmatch(bare)
    if match is None or re.search(r"\b[A-J]\b[).:]?|\bor\b", match["rest"]):
        return None
    return match[1] or match[2]


_CLOCK = re.compile(r"([0-9]{1,9}(?: ?: ?[0-9]{1,9})+)\s*([ap]\.? ?m\b\.?)?", re.IGNORECASE)


def is_time(tidied: str) -> bool:
    """Two digits of minutes."""
    return re.match(r"[0-9]{1,2} ?: ?[0-5][0-9](?![0-9])", tidied) is not None


def clock(tidied: str) -> tuple[tuple[int, ...], str] | None:
    """A time or ratio, by its parts, and "am" or "pm"."""
    match = _CLOCK.fullmatch(_TEXT.sub(lambda match: match[1], tidied).strip())
    if match is None:
        return None
    return tuple(int(part) for part in match[1].split(":")), re.sub(r"[^apm]", "", (match[2] or "").lower())


_BASE = re.compile(r"([0-9A-Z]+)(?: ?_ ?(?:\{ ?(?:\\text ?\{)?([0-9]+|[a-z]+)\}?\}?|([0-9])))?")
_BASE_NAMES = {"two": "2", "three": "3", "five": "5", "eight": "8", "ten": "10", "sixteen": "16"}


def base_digits(tidied: str) -> tuple[str, str | None] | None:
    """Digits without leading zeros and, where given, the base of a numeral."""
    match = _BASE.fullmatch(tidied)
    if match is None or not any(character.isdigit() for character in match[1]):
        return None
    base = match[2] or match[3]
    return match[1].lstrip("0"), None if base is None else _BASE_NAMES.get(base, base)


_UNITS = {
    "mm": "millimeter millimetre millimeters millimetres", "cm": "centimeter centimetre centimeters centimetres",
    "m": "meter metre meters metres", "km": "kilometer kilometre kilometers kilometres",
    "in": "inch inches", "ft": "foot feet", "yd": "yard yards", "mi": "mile miles",
    "mg": "milligram milligrams", "g": "gram grams", "kg": "kilogram kilograms", "lb": "lbs pound pounds",
    "oz": "ounce ounces", "s": "sec secs second seconds", "min": "mins minute minutes",
    "h": "hr hrs hour hours", "day": "days", "week": "weeks", "month": "months", "year": "years yr yrs",
    "mph": "", "km/h": "kmh kph", "m/s": "mps", "l": "L liter litre liters litres", "ml": "mL milliliter milliliters",
    "deg": "degree degrees", "rad": "radian radians", "cent": "cents", "usd": "dollar dollars",
    "eur": "euro euros", "unit": "units", "pm": "p.m.", "am": "a.m.",
}  # fmt: skip
_UNIT_NAMES = {name: unit for unit, names in _UNITS.items() for name in (unit, *names.split())}
# Powers, and the words for them.
_POWERS = {"^2": 2, "^{2}": 2, "^3": 3, "^{3}": 3, "square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_BEHIND = re.compile(
    r"(?P<value>.*(?:\S(?=\s*\\text)|[0-9})\]!]))"
    r"(?:\s*(?P<text>(?:\\text ?\{[A-Za-z./ \-^0-9]*\}\s*)+)|(?P<gap>\s?)(?P<bare>[A-Za-z][A-Za-z./ ]*))"
    r"(?P<power>\^ ?\{?[23]\}?)?",
    re.DOTALL,
)
_DEGREES = re.compile(r"(?P<value>.*[0-9})])\s*\^\\circ ?(?P<scale>[CF]|\\text ?\{ ?[CF] ?\})?", re.DOTALL)
_HEDGE = re.compile(
    rf"\b(?:or|and|not|if|maybe|to|either|nor|but|possibly|{'|'.join(_NUMBER_WORDS)})\b|[0-9]{{2,}}", re.IGNORECASE
)
_MODULUS = re.compile(
    r"(?:[a-z] ?\\equiv ?)?(?P<value>-?[0-9]+) ?"
    r"(?:\\pmod ?\{?|\(? ?(?:\\text ?\{ ?mod ?\}|\\?b?mod) ?\{?) ?(?P<of>[0-9]+) ?\}? ?\)?"
)


def split_unit(tidied: str) -> tuple[str, str | None]:
    """Value, and its unit under one name; None for no unit, "" for words that are no unit known here.

    A single letter that touches the number, as in 3h, is a variable. The modulus of a residue is its unit.
    """
    residue = _MODULUS.fullmatch(tidied)
    if residue is not None and abs(int(residue["value"])) < int(residue["of"]):  # 10 mod 3 is for arithmetic
        return residue["value"], f"mod {residue['of']}"
    degrees = _DEGREES.fullmatch(tidied)
    if degrees is not None and "," not in degrees["value"]:
        scale = degrees["scale"]
        return degrees["value"].strip(), f"deg{_TEXT.sub(lambda m: m[1], scale).strip()}" if scale else "deg"
    match = _BEHIND.fullmatch(tidied)
    if match is None:
        return tidied, None
    text = match["text"] is not None
    words = _TEXT.sub(lambda inner: f" {inner[1]} ", match["text"]) if text else match["bare"]
    name, words, value = _unit(words, match["power"]), words.strip(), match["value"].strip()
    if not words:
        return (tidied, None) if match["power"] else (value, None)
    if _HEDGE.search(words) or not (text or _stands_for_a_unit(words, name, bool(match["gap"]))):
        return tidied, None
    return value, name


def _stands_for_a_unit(words: str, name: str, gap: bool) -> bool:
    """Of letters that are not marked as text: product of variables, or a unit?"""
    if len(words) == 1:
        return gap and words in ("m", "g", "s", "h", "L")
    if words.split()[0].lower() in _NOT_WORDS | {"factorial", "squared", "cubed", "dozen", "x", "percent", "pct"}:
        return False
    return bool(name) or (gap and all(len(word) > 2 for word in words.split()[:1]))


def _unit(words: str, power: str | None) -> str:
    exponent = _POWERS.get(power.replace(" ", ""), 1) if power else 1
    names = []
    for word in re.sub(r"\^\{?2\}?", " squared", re.sub(r"\^\{?3\}?", " cubed", words)).split():
        exponent = max(exponent, _POWERS.get(word.lower(), 1))
        if word.lower() not in _POWERS:
            names.append(_UNIT_NAMES.get(word) or _UNIT_NAMES.get(word.lower().strip(".")) or "")
    if len(names) != 1 or not names[0]:
        return ""
    return names[0] if exponent == 1 else f"{names[0]}^{exponent}"
