"""The process behind a WorkerPool (sparrow/worker_pool.py): it loads a function once, and forks workers that call it.

Run as a file, not as a module, so that it imports nothing but the standard library and what the function needs. It is
single-threaded, holds no GPU and no secret of the parent, and ends with the parent. Forking here costs milliseconds
where a fresh interpreter with its imports costs a second, so a worker may be killed at every item.

Control messages, one datagram each: `fork` with a socket attached -> the worker's pid; `kill PID` -> its wait status.
A worker's messages are frames: length and CPU seconds allowed (unused in replies), then UTF-8 JSON. Past its seconds a
worker is ended by the kernel (SIGPROF), which C code cannot hold up, and which a loaded machine does not bring nearer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

HEADER = struct.Struct(">Id")
PR_SET_PDEATHSIG = 1
PARENT_CHECK_SECONDS = 1.0


def main() -> None:
    """Serves the parent until its end of the control socket closes, or it is gone."""
    options = json.loads(sys.argv[1])
    parent = options["parent"]
    # A Ctrl-C or a scheduler's SIGTERM is for the parent, which may want to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    control = socket.socket(fileno=options["control"])
    sys.path[:] = options["path"]
    module, _, name = options["function"].rpartition(".")
    function = getattr(importlib.import_module(module), name)
    for item in options["warm_up"]:
        function(item)
    gc.collect()
    gc.freeze()  # pages of loaded modules stay shared with the workers
    control.send(b"ready")
    children: set[int] = set()
    control.settimeout(PARENT_CHECK_SECONDS)
    while os.getppid() == parent:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        except TimeoutError:
            # A process that the parent forked may hold the other end open: its closing alone does not tell.
            continue
        if not message:
            break
        if message == b"fork":
            pid = _fork(control, socket.socket(fileno=descriptors[0]), function, options["memory_mb"])
            children.add(pid)
            control.send(str(pid).encode())
        else:
            pid = int(message.split()[1])
            children.remove(pid)
            control.send(str(_end(pid)).encode())
    for pid in children:
        _end(pid)


def _end(pid: int) -> int:
    """Kills a worker, if it has not ended, and returns its wait status; not waited for, the number is still its own."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _fork(control: socket.socket, work: socket.socket, function: Callable[[Any], Any], memory_mb: int) -> int:
    template = os.getpid()
    pid = os.fork()
    if pid:
        work.close()
        return pid
    try:
        control.close()
        _confine(template, memory_mb)
        _serve(work, function)
    finally:
        os._exit(1)  # nothing of the template's own may run on


def _confine(template: int, memory_mb: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:  # it died before the line above
        os._exit(1)
    limit = memory_mb << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)


def _serve(work: socket.socket, function: Callable[[Any], Any]) -> NoReturn:
    with work.makefile("rb") as frames:
        while header := frames.read(HEADER.size):
            length, seconds = HEADER.unpack(header)
            item = frames.read(length)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            reply = _answer(function, item)
            signal.setitimer(signal.ITIMER_PROF, 0)
            work.sendall(HEADER.pack(len(reply), 0) + reply)
    os._exit(0)


def _answer(function: Callable[[Any], Any], item: bytes) -> bytes:
    try:
        return json.dumps({"kind": "done", "value": function(json.loads(item))}).encode()
    except MemoryError:
        return b'{"kind": "memory"}'
    except Exception as error:  # reported, counted and named by the parent
        return json.dumps({"kind": "error", "detail": f"{type(error).__name__}: {error!s:.200}"}).encode()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has gone; its workers go with this
        main()
