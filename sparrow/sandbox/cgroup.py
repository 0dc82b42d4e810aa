"""A control group around a worker, where one can be made: bounds the memory and number of all its processes together.

Made below the group that this process is in, so that its own bounds hold too. With version 2, a group that has
processes can hand no controller down, unless it is the root; there the limits of each process are all there is.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_BASE_MB = 64  # for the zygote, and the kernel's own memory
_BASE_PROCESSES = 4
_REMOVE_SECONDS = 5.0
_number = itertools.count()


@dataclass(frozen=True)
class ControlGroup:
    """Its folders: one for each of version 1's controllers, or one of version 2.

    Attributes:
        bounds: what is in force: "memory", "pids".
    """

    folders: tuple[Path, ...]
    bounds: tuple[str, ...]

    @classmethod
    def create(cls, memory_mb: int, processes: int) -> ControlGroup:
        """One with whatever this process may bound; without folders where that is nothing."""
        folders: list[Path] = []
        bounds: list[str] = []
        wanted = {
            "memory": (("memory.limit_in_bytes", "memory.max"), (memory_mb + _BASE_MB) << 20),
            "pids": (("pids.max",), processes + _BASE_PROCESSES),
        }
        name = f"sparrow-{os.getpid()}-{next(_number)}"
        for controller, (files, value) in wanted.items():
            folder = _make(controller, name)
            if folder is None:
                continue
            if folder not in folders:
                folders.append(folder)
            if _set(folder, files, value):
                bounds.append(controller)
        return cls(tuple(folders), tuple(bounds))

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        """As soon as its processes are gone, which were killed before; the next start tries again for what stays."""
        end = time.monotonic() + _REMOVE_SECONDS
        for folder in self.folders:
            while not _removed(folder) and time.monotonic() < end:
                time.sleep(0.01)


def _make(controller: str, name: str) -> Path | None:
    parent = _own_group(controller)
    if parent is None or not os.access(parent / "cgroup.procs", os.W_OK):
        return None
    for left in parent.glob("sparrow-*-*"):
        owner = re.fullmatch(r"sparrow-(\d+)-\d+", left.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _removed(left)  # of a trainer that was killed
    folder = parent / name
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return None
    return folder


def _removed(folder: Path) -> bool:
    """False where it has processes still."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _set(folder: Path, files: tuple[str, ...], value: int) -> bool:
    for file in files:
        if (folder / file).exists():
            (folder / file).write_text(str(value))
            return True
    return False


def _own_group(controller: str) -> Path | None:
    """This process's group of that controller, in the tree where it is mounted."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or (hierarchy == "0" and not controllers):
            root = _mounted(controller if controllers else None)
            if root is not None and (root / path.lstrip("/")).is_dir():
                return root / path.lstrip("/")
    return None


def _mounted(controller: str | None) -> Path | None:
    """Where version 1's tree of a controller, or version 2's (None), is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if kind == ("cgroup" if controller else "cgroup2") and (not controller or controller in options.split(",")):
            return Path(where)
    return None
