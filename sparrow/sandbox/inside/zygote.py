"""The process that forks programs: one at a time, each as PID 1's child in new PID, mount and IPC namespaces.

It lives in user, PID, mount, network, UTS and IPC namespaces of its own, has no privilege outside them, and never reads
a program: text and input pass by as descriptors, so that no program finds another's text in the memory it inherits.

    worker, outside                       zygote                    PID 1                    program
    {"limits", "paths", ...}  -------->   unshare user, PID
    writes the uid map        <- "map" -
    "mapped"                  -------->   fork, file tree, preload
                              <- "ready"
    {"run"} + descriptors     -------->   unshare PID, fork  ---->  mount, limits, drop
                                          waits, kills              everything, fork  ---->  runs
                              <- outcome  wait4             <----   exit          <----      ends
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import site
import socket
import sys
import time
from typing import Any

from . import filter as syscalls
from . import kernel, program, root

_CONTROL = 3
_DESCRIPTORS = 5  # of a run: job, stdin, stdout, stderr, result
_FILTER = syscalls.filter_program()
_PAST_ALL = 256  # the zygote has a dozen descriptors
_SETUP_FAILED = 250  # exit code of PID 1, next to a report


def main(descriptor: int) -> None:
    # However many descriptors the trainer has: what a program closes below has to reach all of this process's.
    control = socket.socket(fileno=os.dup2(descriptor, _CONTROL))
    if descriptor != _CONTROL:
        os.close(descriptor)
    config = json.loads(control.recv(1 << 20))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # PID 1 must have no handler: those without one do not reach it
    try:
        own_pid_namespace = _isolate(control, config)
    except Exception as error:
        step = str(error) if isinstance(error, kernel.StepError) else f"{type(error).__name__}: {error}"
        _send(control, {"failed": step})
        return
    site.setquit()  # `exit` and `quit`, which the interpreter's -S left out
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            _send(control, {"unloaded": f"{name}: {type(error).__name__}: {error}"})
            return
    gc.collect()
    gc.freeze()
    _send(control, {"ready": True})
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, _DESCRIPTORS)
        if not message:
            return
        if len(descriptors) == _DESCRIPTORS:  # else a late "kill", of a run that had ended by itself
            _send(control, _run(control, config, descriptors, own_pid_namespace))


def _send(control: socket.socket, content: dict[str, Any]) -> None:
    control.send(json.dumps(content).encode())


def _isolate(control: socket.socket, config: dict[str, Any]) -> int:
    """Everything that is done once; the descriptor of the PID namespace."""
    os.umask(0o022)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # before the trainer, where the machine runs out of memory
    with contextlib.suppress(PermissionError):  # where it is not allowed, the user's groups stay, but see no file
        os.setgroups([])
    kernel.unshare(kernel.NEW_USER | kernel.NEW_PID, "unshare the user and PID namespaces")
    _send(control, {"map": True})
    if control.recv(100) != b"mapped":
        sys.exit(1)
    _go_on_as_first_process(control)
    own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    spaces = kernel.NEW_MOUNT | kernel.NEW_NET | kernel.NEW_UTS | kernel.NEW_IPC
    kernel.unshare(spaces, "unshare the mount, network, UTS and IPC namespaces")
    socket.sethostname("sandbox")
    root.enter(config["paths"], config["hidden"], config["binds"])
    sys.path[:0] = config["python_path"]
    kernel.drop_bounding_set()
    return own_pid_namespace


def _go_on_as_first_process(control: socket.socket) -> None:
    """The rest runs in a child, whose PID namespace, unlike the host's, may be unshared and gone back to.

    What the worker started only waits for it; they die together.
    """
    child = os.fork()
    if child:
        control.close()
        os.waitpid(child, 0)
        os._exit(0)
    kernel.die_with_parent()


def _run(
    control: socket.socket, config: dict[str, Any], descriptors: list[int], own_pid_namespace: int
) -> dict[str, Any]:
    start = time.monotonic()
    report, report_writer = os.pipe()
    kernel.unshare(kernel.NEW_PID, "unshare the PID namespace")
    pid = os.fork()
    if pid == 0:
        _first_process(config, descriptors, report_writer)
    kernel.return_to_own_pid_namespace(own_pid_namespace)
    for descriptor in (*descriptors, report_writer):
        os.close(descriptor)
    ended_by = _wait(control, pid, config["limits"]["seconds"])
    # Returns when every process of the namespace is gone: the kernel kills them with PID 1 and waits for them first.
    _, status, usage = os.wait4(pid, 0)
    failure = os.read(report, 1000).decode()
    os.close(report)
    if failure:
        return {"broken": failure}
    return {
        "ended_by": ended_by,
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - start,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def _wait(control: socket.socket, pid: int, seconds: float) -> str:
    """Until the namespace ends, is told to, or has had its time."""
    process = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.register(control, select.POLLIN)
        events = poll.poll(seconds * 1000)
        if any(descriptor == process for descriptor, _ in events):
            return "itself"
        os.kill(pid, signal.SIGKILL)
        if not events:
            return "time"
        if not control.recv(100):
            sys.exit(0)  # nobody is there any more
        return "order"
    finally:
        os.close(process)


def _first_process(config: dict[str, Any], descriptors: list[int], report: int) -> None:
    """PID 1 of the new namespace: gives up everything, forks the program, and ends when it ends."""
    try:
        kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_IPC, "unshare the mount and IPC namespaces of a program")
        limits, uid = config["limits"], config["uid"]
        root.mount_home(limits["disk_mb"], limits["files"], uid)
        os.setsid()
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.drop_capabilities()
        _set_limits(limits)
        kernel.die_with_parent()
        if _orphaned(report):
            os._exit(1)
        kernel.install_filter(_FILTER)
        child = os.fork()
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode()[:1000])
        os._exit(_SETUP_FAILED)
    if child == 0:
        _become_program(descriptors)
    os.closerange(0, _PAST_ALL)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _orphaned(report: int) -> bool:
    """Whether the zygote, the only reader, died before `die_with_parent`."""
    poll = select.poll()
    poll.register(report, select.POLLERR)
    return bool(poll.poll(0))


def _set_limits(limits: dict[str, Any]) -> None:
    megabyte = 1 << 20
    seconds = int(limits["seconds"]) + 2
    for name, value in (
        (resource.RLIMIT_DATA, limits["memory_mb"] * megabyte),
        # Shared mappings are no "data"; the room is for libraries and what threads reserve without using it.
        (resource.RLIMIT_AS, (limits["memory_mb"] + 1024) * megabyte),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_FSIZE, limits["disk_mb"] * megabyte),
        (resource.RLIMIT_NOFILE, _PAST_ALL),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 64 * megabyte),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (limit, limit))


def _become_program(descriptors: list[int]) -> None:
    job_at, *streams, result = descriptors
    size = os.fstat(job_at).st_size
    job = json.loads(os.pread(job_at, size, 0))
    for target, source in enumerate(streams):
        os.dup2(source, target)
    result = os.dup2(result, _CONTROL)  # in its place: what was received has higher numbers
    os.closerange(_CONTROL + 1, _PAST_ALL)
    program.run(job, result)
