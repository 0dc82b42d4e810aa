"""LiveCodeBench's private tests: JSON in a pickled string, in zlib, in base64. The pickle is never executed.

A pickle is a program, and can call anything. Here its instructions are only listed, by the standard library's
disassembler, and nothing but those that spell one string is accepted.
"""

from __future__ import annotations

import base64
import pickletools
import zlib

_STRINGS = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_FRAMING = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}


def decode_text(encoded: str, max_bytes: int = 2**28) -> str:
    """The string in it.

    Raises:
        ValueError: it is no base64, no zlib, larger than `max_bytes`, or a pickle of anything but one string.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(encoded, validate=True), max_bytes)
    except zlib.error as error:
        raise ValueError(f"not zlib: {error}") from error
    if not inflater.eof:
        raise ValueError(f"cut off, or above {max_bytes} bytes")
    return _pickled_text(data)


def _pickled_text(data: bytes) -> str:
    text: str | None = None
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _STRINGS and text is None:
            text = argument
        elif opcode.name not in _FRAMING:
            raise ValueError(f"a pickle of more than one string: {opcode.name}")
    if text is None:
        raise ValueError("a pickle without a string")
    return text
