"""The file tree that programs see: an empty tmpfs with read-only binds of the interpreter and its libraries."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import kernel

HOME = "/box"  # of every program: a tmpfs of its own, mounted anew for each
_OLD = "/host"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LOADER_CACHE = "/etc/ld.so.cache"


def enter(paths: Sequence[str], hidden: Sequence[str], binds: Sequence[str]) -> None:
    """Leaves the host's tree for good.

    Args:
        paths: what the interpreter needs; those that do not exist are left out, and links stay links.
        hidden: folders in them that are to look empty.
        binds: what the caller wants to be visible besides; all exist.
    """
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    # Where it is mounted does not matter: after the pivot the mount point is an ordinary folder of the old tree again.
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp" + _OLD)
    os.chdir("/tmp")
    kernel.pivot_root(".", "." + _OLD)
    os.chdir("/")
    for path in _outermost([path for path in (*paths, _LOADER_CACHE) if os.path.lexists(_OLD + path)]):
        if os.path.islink(_OLD + path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(_OLD + path), path)
        else:
            _bind(path, kernel.ATTR_NODEV)
    for path in filter(os.path.isdir, hidden):
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_RDONLY, "mode=755,size=4k")
    for path in binds:
        _bind(path, kernel.ATTR_NODEV)
    for device in _DEVICES:
        _bind(device, kernel.ATTR_NOEXEC)
    os.mkdir(HOME)
    if not os.path.exists("/tmp"):  # else a bind lies below it
        os.symlink(HOME, "/tmp")
    os.symlink(HOME, "/dev/shm")  # where POSIX semaphores and shared memory live; there they count as files do
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.set_mount_attributes("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, recursive=False)


def mount_home(megabytes: int, files: int, owner: int) -> None:
    """A fresh, empty home of bounded size, seen by the calling process's mount namespace only."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
    options = f"mode=700,size={megabytes}m,nr_inodes={files},uid={owner},gid={owner}"
    kernel.mount("tmpfs", HOME, "tmpfs", flags, options)
    os.chdir(HOME)


def _bind(path: str, attributes: int) -> None:
    if os.path.isdir(_OLD + path):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(_OLD + path, path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.set_mount_attributes(path, attributes | kernel.ATTR_RDONLY | kernel.ATTR_NOSUID, recursive=True)


def _outermost(paths: Sequence[str]) -> list[str]:
    """Without those that lie below another one, or are named twice."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return kept
