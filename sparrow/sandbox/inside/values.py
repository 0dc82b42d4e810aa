"""Plain data as JSON, in both directions: what goes to a program's function and what comes back from it.

Lists, text, numbers, booleans, None and objects with text keys are JSON as it stands. What JSON has no form for is an
object with one key: {"!tuple": [...]}, {"!set": [...]}, {"!frozenset": [...]}, {"!dict": [[key, value], ...]},
{"!int": "hex"}, {"!bytes": "hex"}, {"!complex": [real, imaginary]}. Only data can come out of `decode`: nothing is
executed, whatever a program sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HASHED = ("!set", "!frozenset", "!dict")
_LARGE = 10**300  # far below the number of digits that Python's JSON reader takes


def encode(value: Any) -> Any:
    """What `json.dumps` takes, and `decode` gives back; subclasses (Counter, namedtuple, IntEnum) as their base.

    Raises:
        TypeError: something else than plain data.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -_LARGE < number < _LARGE else {"!int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {key: encode(item) for key, item in value.items()}
        return {"!dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for tag, kind in (("!tuple", tuple), ("!set", set), ("!frozenset", frozenset)):
        if isinstance(value, kind):
            return {tag: [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"!bytes": value.hex()}
    if isinstance(value, complex):
        return {"!complex": [value.real, value.imag]}
    raise TypeError(f"a {type(value).__name__} is no plain data")


def decode(data: Any) -> Any:
    """The value of what `json.loads` gave.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RecursionError: not what `encode` makes.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) == 1:
        ((tag, content),) = data.items()
        if tag.startswith("!"):
            return _TAGS[tag](content)
    return {key: decode(item) for key, item in data.items()}


def hashed_items(data: Any) -> int:
    """How many items `decode` would put into sets and dicts at most, those whose keys are no plain text.

    An item of several counts as several, since each comparison of two of them may look at all.
    """
    if isinstance(data, list):
        return sum(hashed_items(item) for item in data)
    if not isinstance(data, dict):
        return 0
    own = 0
    for tag, content in data.items():
        if tag in _HASHED and isinstance(content, list):
            keys = [item[0] if tag == "!dict" and isinstance(item, list) and item else item for item in content]
            own += sum(_leaves(key) for key in keys)
    return own + sum(hashed_items(item) for item in data.values())


def _leaves(data: Any) -> int:
    if isinstance(data, dict):
        data = list(data.values())
    return max(1, sum(map(_leaves, data))) if isinstance(data, list) else 1


def _items(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("not a list")
    return [decode(item) for item in content]


def _dict(content: Any) -> dict[Any, Any]:
    return dict(_items(content))


_TAGS: dict[str, Callable[[Any], Any]] = {
    "!tuple": lambda content: tuple(_items(content)),
    "!set": lambda content: set(_items(content)),
    "!frozenset": lambda content: frozenset(_items(content)),
    "!dict": _dict,
    "!int": lambda content: int(content, 16),
    "!bytes": bytes.fromhex,
    "!complex": lambda content: complex(*_items(content)),
}
