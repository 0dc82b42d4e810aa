"""A control group around a worker, where one can be made: bounds the memory and number of all its processes together.

Made below the group that this process is in, so that its own bounds hold too. With version 2, a group that has
processes can hand no controller down, unless it is the root; there the limits of each process are all there is.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_BASE_MB = 64  # for the zygote, and the kernel's own memory
_BASE_PROCESSES = 4
_REMOVE_SECONDS = 5.0
_number = itertools.count()


@dataclass(frozen=True)
class ControlGroup:
    """Its folders, by what they bound: "memory", "pids". Two with version 1, the same with version 2."""

    folders: Mapping[str, Path]

    @classmethod
    def create(cls, memory_mb: int, processes: int) -> ControlGroup:
        """One with whatever this process may bound; without folders where that is nothing."""
        memory = (memory_mb + _BASE_MB) << 20
        # The file that has to be there, and those that may be; in both versions' names.
        wanted = {
            "memory": [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory),
                       ("memory.max", memory), ("memory.swap.max", 0)],
            "pids": [("pids.max", processes + _BASE_PROCESSES)],
        }  # fmt: skip
        name = f"sparrow-{os.getpid()}-{next(_number)}"
        folders = {}
        for controller, settings in wanted.items():
            folder = _make(controller, name)
            if folder is not None and _set(folder, settings):
                folders[controller] = folder
            elif folder is not None and folder not in folders.values():
                _removed(folder)
        return cls(folders)

    def with_process(self, pid: int) -> ControlGroup:
        """Puts a process into it; what refuses to take it is no longer a part of the group."""
        return ControlGroup({name: folder for name, folder in self.folders.items() if _add(folder, pid)})

    def remove(self) -> None:
        """As soon as its processes are gone, which were killed before; the next start tries again for what stays."""
        end = time.monotonic() + _REMOVE_SECONDS
        for folder in self.folders.values():
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


def _set(folder: Path, settings: Sequence[tuple[str, int]]) -> bool:
    """False where the folder's controller is not handed down to it, so that it has none of the files."""
    there = [(folder / file, value) for file, value in settings if (folder / file).exists()]
    for path, value in there:
        path.write_text(str(value))
    return bool(there)


def _add(folder: Path, pid: int) -> bool:
    try:
        (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


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
