"""What the tests of the worker pool run in its workers."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any


def act(item: Any) -> Any:
    """`[what, argument]`."""
    what, argument = item
    return globals()[f"_{what}"](argument)


MEMORY: list[str] = []


def _remember(text: str) -> None:
    MEMORY.append(text)


def _remembered(_: Any) -> list[str]:
    return MEMORY


def _echo(value: Any) -> Any:
    return value


def _pid(_: Any) -> int:
    return os.getpid()


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def _work(cpu_seconds: float) -> str:
    until = time.process_time() + cpu_seconds
    while time.process_time() < until:
        pass
    return "worked"


def _spin(_: Any) -> None:
    while True:
        pass


def _power(_: Any) -> int:
    """One operation in C that no Python signal handler interrupts."""
    return (9**9**9) % 7


def _memory(megabytes: int) -> int:
    return len(bytearray(megabytes << 20))


def _raise(text: str) -> None:
    raise ValueError(text)


def _die(_: Any) -> None:
    os._exit(3)


def _segfault(_: Any) -> None:
    ctypes.string_at(0)


def _die_once(mark: str) -> str:
    if not Path(mark).exists():
        Path(mark).touch()
        os._exit(3)
    return "survived"


def _print(text: str) -> str:
    print(text, flush=True)
    return "printed"


def _environment(name: str) -> str | None:
    return os.environ.get(name)


def _modules(name: str) -> bool:
    return name in sys.modules


def _kill_template(_: Any) -> None:
    os.kill(os.getppid(), 9)
    time.sleep(60)
