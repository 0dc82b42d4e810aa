"""The system calls that Python has no function for, each raising `StepError` with the step that failed."""

from __future__ import annotations

import ctypes
import os
import struct

NEW_MOUNT, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38
_CAP_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


class StepError(Exception):
    """A step of the isolation that the kernel refused, and its answer."""


def check(result: int, step: str) -> None:
    """Raises what errno says where a C function returned -1."""
    if result < 0:
        raise StepError(f"{step}: {os.strerror(ctypes.get_errno())}")


def unshare(flags: int, step: str) -> None:
    check(_libc.unshare(flags), step)


def return_to_own_pid_namespace(descriptor: int) -> None:
    """Takes back an `unshare(NEW_PID)` after its one child was made, so that there can be another."""
    check(_libc.setns(descriptor, NEW_PID), "setns to the own PID namespace")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    source_, target_, kind_, options_ = arguments
    check(_libc.mount(source_, target_, kind_, ctypes.c_ulong(flags), options_), f"mount {kind or source} on {target}")


def set_mount_attributes(path: str, attributes: int, recursive: bool) -> None:
    """mount_setattr(2), of Linux 5.12: unlike a bind remount it reaches the mounts below."""
    raw = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, raw, ctypes.c_size_t(len(raw)))
    check(result, f"mount_setattr {path}")


def pivot_root(new: str, old: str) -> None:
    check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], os.fsencode(new), os.fsencode(old)), "pivot_root")


def unmount(path: str) -> None:
    check(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"unmount {path}")


def die_with_parent() -> None:
    check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl PR_SET_PDEATHSIG")


def drop_bounding_set() -> None:
    """Capabilities past the kernel's last one are refused, which ends the loop."""
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            assert capability > 30, "the capabilities of this user namespace cannot be dropped"
            return


def drop_capabilities() -> None:
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    check(_libc.capset(header, bytes(24)), "capset")
    check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl PR_SET_NO_NEW_PRIVS")


def install_filter(program: bytes) -> None:
    """seccomp filter of the calling thread and of what it forks."""
    assert len(program) % 8 == 0
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    check(_libc.prctl(22, 2, fprog, 0, 0), "prctl PR_SET_SECCOMP")
