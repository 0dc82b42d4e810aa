"""The untrusted process: becomes an ordinary Python program and runs the text it was given, then ends.

Nothing here is a barrier. What keeps a program in was done before, and what it says is judged outside.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from .values import decode, encode

# What the text of a function may use without an import, as on the sites that the tasks of this style come from.
_CALL_NAMES: dict[str, Any] = {}
exec(
    """
from typing import *
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import ceil, floor, gcd, inf, lcm, log2, sqrt
""",
    _CALL_NAMES,
)
_MESSAGE = 500  # characters of an exception's text that are told


def run(job: dict[str, Any], result: int) -> None:
    """Runs it and exits.

    Args:
        job: "source"; for a function also "entry_point", and "arguments" as `values.encode` made it.
        result: descriptor for what the function returned.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    if "entry_point" in job:
        _end(_call(job, result))
    _end(_guarded(lambda: _execute(job["source"], "__main__", {})))


def _open_streams() -> None:
    """As the interpreter does at its start."""
    sys.argv = [""]
    for number, name, errors in ((0, "stdin", "surrogateescape"), (1, "stdout", "surrogateescape"),
                                 (2, "stderr", "backslashreplace")):  # fmt: skip
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffer = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(buffer, encoding="utf-8", errors=errors, line_buffering=number == 2)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _execute(source: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    module = types.ModuleType(name)
    sys.modules[name] = module
    module.__dict__.update({**names, "__name__": name, "__builtins__": builtins})
    exec(compile(source, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _call(job: dict[str, Any], result: int) -> int:
    try:
        names = _execute(job["source"], "solution", _CALL_NAMES)
        function = _entry_point(names, job["entry_point"])
        value = function(*decode(job["arguments"]))
        content = json.dumps({"value": encode(value)})
    except BaseException as error:
        content = json.dumps({"error": traceback.format_exception_only(error)[-1].strip()[:_MESSAGE]})
    with open(result, "w", encoding="ascii") as file:
        file.write(content)
    return 0


def _entry_point(names: dict[str, Any], path: str) -> Callable[..., Any]:
    """`f`, `Solution.f`, or the `f` of a class `Solution` where there is no function of that name."""
    first, _, method = path.partition(".")
    if not method and first not in names and "Solution" in names:
        first, method = "Solution", first
    if first not in names:
        raise NameError(f"the program defines no {path!r}")
    return getattr(names[first](), method) if method else names[first]


def _guarded(action: Callable[[], Any]) -> int:
    """The exit code that the interpreter would have had."""
    try:
        action()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return int(leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 1
    return 0


def _end(code: int) -> None:
    """As the interpreter ends: waits for threads, runs atexit's functions, flushes."""

    def finish() -> None:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # The program may have put a buffer of its own in the place of the first.
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()

    finish_code = _guarded(finish)
    os._exit(code or finish_code)
