"""The seccomp filter: system calls that no ordinary program needs, and that were ways out of sandboxes before.

The namespaces contain a program without it; the filter keeps it from most of the kernel's rarely used code, and from
memory that no limit counts (memfd, System V shared memory).
"""

from __future__ import annotations

import os
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENT_0_AT = 0, 4, 16
_NAMESPACE_FLAGS = 0x7E020080  # CLONE_NEW*: mount, cgroup, UTS, IPC, user, PID, net, time
_AF_UNIX = 1
_NEWEST_KNOWN = 450  # set_mempolicy_home_node, of Linux 5.17; what came later answers "no such call"

# By architecture: AUDIT_ARCH, the calls whose first argument decides, and those that are refused: _sysctl, acct,
# add_key, adjtimex, bpf, chroot, clock_adjtime, clock_settime, create_module, delete_module, fanotify_init,
# finit_module, flock, fsconfig, fsmount, fsopen, fspick, get_kernel_syms, init_module, inotify_init, inotify_init1,
# io_cancel, io_destroy, io_getevents, io_pgetevents, io_setup, io_submit, io_uring_enter, io_uring_register,
# io_uring_setup, ioperm, iopl, kcmp, kexec_file_load, kexec_load, keyctl, lookup_dcookie, mbind, memfd_create,
# memfd_secret, migrate_pages, modify_ldt, mount, mount_setattr, move_mount, move_pages, mq_open, mq_unlink,
# mq_timedsend, mq_timedreceive, msgctl, msgget, msgrcv, msgsnd, name_to_handle_at, nfsservctl, open_by_handle_at,
# open_tree, perf_event_open, personality, pidfd_getfd, pivot_root, process_madvise, process_vm_readv,
# process_vm_writev, ptrace, query_module, quotactl, quotactl_fd, reboot, request_key, sched_setaffinity, sched_setattr,
# sched_setparam, sched_setscheduler, semctl, semget, semop, semtimedop, set_mempolicy, set_mempolicy_home_node,
# setdomainname, sethostname, setns, setpriority, ioprio_set, settimeofday, shmat, shmctl, shmdt, shmget, splice,
# swapoff, swapon, sync, syncfs, sysfs, syslog, tee, umount2, unshare, uselib, userfaultfd, ustat, vhangup, vmsplice
_ARCHITECTURES = {
    "x86_64": (0xC000003E, {"clone": 56, "clone3": 435, "socket": 41, "socketpair": 53, "prlimit64": 302}, (
        29, 30, 31, 64, 65, 66, 67, 68, 69, 70, 71, 73, 101, 103, 134, 135, 136, 139, 141, 142, 144, 153, 154, 155, 156,
        159, 161, 162, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 174, 175, 176, 177, 178, 179, 180, 203,
        206, 207, 208, 209, 210, 212, 220, 227, 237, 238, 240, 241, 242, 243, 246, 248, 249, 250, 251, 253, 256, 272,
        275, 276, 278, 279, 294, 298, 300, 303, 304, 305, 306, 308, 310, 311, 312, 313, 314, 319, 320, 321, 323, 333,
        425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 447, 450,
    )),
    "aarch64": (0xC00000B7, {"clone": 220, "clone3": 435, "socket": 198, "socketpair": 199, "prlimit64": 261}, (
        0, 1, 2, 3, 4, 18, 26, 30, 32, 39, 40, 41, 42, 51, 58, 60, 75, 76, 77, 81, 89, 92, 97, 104, 105, 106, 112, 116,
        117, 118, 119, 122, 140, 142, 161, 162, 170, 171, 180, 181, 182, 183, 186, 187, 188, 189, 190, 191, 192, 193,
        194, 195, 196, 197, 217, 218, 219, 224, 225, 235, 237, 238, 239, 241, 262, 264, 265, 266, 267, 268, 270, 271,
        272, 273, 274, 279, 280, 282, 292, 294, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 440, 442, 443, 447,
        450,
    )),
}  # fmt: skip


def supported() -> bool:
    return os.uname().machine in _ARCHITECTURES


def filter_program() -> bytes:
    """The filter, as classic BPF."""
    audit, special, refused = _ARCHITECTURES[os.uname().machine]
    code = [
        _step(_LOAD, _ARCH_AT),
        _step(_EQUAL, audit, 1, 0),  # a 32-bit call has other numbers
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        _step(_AT_LEAST, _NEWEST_KNOWN + 1, 0, 1),  # x32's numbers too
        _step(_RETURN, _ERRNO | _ENOSYS),
        # glibc falls back on clone, whose flags a filter can see.
        *_when(special["clone3"], [_step(_RETURN, _ERRNO | _ENOSYS)]),
    ]
    for number in refused:
        code += _when(number, [_step(_RETURN, _ERRNO | _EPERM)])
    code += _when(special["clone"], _by_argument(_ANY_BIT, _NAMESPACE_FLAGS, allowed=False))
    code += _when(special["socket"], _by_argument(_EQUAL, _AF_UNIX, allowed=True))
    code += _when(special["socketpair"], _by_argument(_EQUAL, _AF_UNIX, allowed=True))
    code += _when(special["prlimit64"], _by_argument(_EQUAL, 0, allowed=True))  # only a process's own limits
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """`then` must return, as it ends by loading something else than the number."""
    return [_step(_EQUAL, number, 0, len(then)), *then]


def _by_argument(test: int, value: int, allowed: bool) -> list[bytes]:
    verdicts = [_ALLOW, _ERRNO | _EPERM] if allowed else [_ERRNO | _EPERM, _ALLOW]
    yes, no = (_step(_RETURN, verdict) for verdict in verdicts)
    return [_step(_LOAD, _ARGUMENT_0_AT), _step(test, value, 0, 1), yes, no]


def _step(code: int, value: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, jump_true, jump_false, value)
