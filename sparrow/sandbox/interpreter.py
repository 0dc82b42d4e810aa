"""Where the interpreter is that programs run in, and what of its files they see."""

from __future__ import annotations

import os
import sys

_SYSTEM_PATHS = ("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64")


def base_interpreter() -> str:
    """The Python that a virtual environment was made from; itself where there is none."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def interpreter_paths() -> list[str]:
    """What it needs: programs, libraries, the standard library."""
    # Not `sys.prefix`, nor what `sysconfig` says of it: a virtual environment is the project's.
    bases = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    own = [f"{base}/{folder}" for base in sorted(bases) for folder in ("bin", "lib", "lib64")]
    return [*own, _standard_library(), *_SYSTEM_PATHS]


def package_paths() -> list[str]:
    """What is installed for the base interpreter, within its own paths: the project too, where there is no other."""
    return [*(f"{_standard_library()}/{name}-packages" for name in ("site", "dist")), "/usr/lib/python3/dist-packages"]


def _standard_library() -> str:
    return os.path.dirname(os.path.realpath(os.__file__))
