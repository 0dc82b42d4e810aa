"""The two kinds of process of a WorkerPool (sparrow/worker_pool.py), seen from their parent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.worker_main import HEADER

START_SECONDS = 120.0
SEND_SECONDS = 10.0
MAX_REPLY_BYTES = 1 << 20
# Wall time that a try may take, in its CPU seconds: for items that sleep, and for a machine that others load.
WALL_PER_CPU = 10.0
# The rest of the environment may hold keys, which text of a model has no business near.
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")


class WorkersLostError(RuntimeError):
    """The processes of a pool cannot be started, or end again and again."""


@dataclass
class Try:
    """An item of a call, on its way through the workers, and the CPU seconds it may take."""

    index: int
    payload: bytes
    seconds: float
    retried: bool = False


class Worker:
    """One forked process and the try that it is at."""

    def __init__(self, template: Template) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.pid = template.fork(theirs)
        self.socket.settimeout(SEND_SECONDS)
        self.served = 0
        self.current: Try | None = None
        self.deadline = 0.0
        self._received = bytearray()

    def start(self, item: Try, until: float) -> None:
        """Raises OSError if the process is gone."""
        self.current = item
        self.served += 1
        self.deadline = min(time.monotonic() + WALL_PER_CPU * item.seconds, until)
        self.socket.sendall(HEADER.pack(len(item.payload), item.seconds) + item.payload)

    def receive(self) -> dict[str, Any] | None:
        """The reply once it is complete; raises ConnectionError if the process ended, or talks nonsense."""
        chunk = self.socket.recv(1 << 16)
        if not chunk:
            raise ConnectionError("a worker ended")
        self._received += chunk
        if len(self._received) < HEADER.size:
            return None
        length = HEADER.unpack_from(self._received)[0]
        if length > MAX_REPLY_BYTES:
            raise ConnectionError("a worker's reply is too long")
        if len(self._received) < HEADER.size + length:
            return None
        reply: dict[str, Any] = json.loads(self._received[HEADER.size :])
        self._received.clear()
        return reply


class Template:
    """The process that loads the function and forks workers (sparrow/worker_main.py)."""

    def __init__(self, function: str, memory_mb: int, warm_up: list[Any]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            options = {
                "function": function,
                "memory_mb": memory_mb,
                "warm_up": warm_up,
                "path": sys.path,
                "control": theirs.fileno(),
                "parent": os.getpid(),
            }
            main = Path(__file__).with_name("worker_main.py")
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(main), json.dumps(options)],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        self.close = weakref.finalize(self, _close, self._control, self._process)
        self._control.settimeout(START_SECONDS)
        if self._control.recv(64) != b"ready":
            self.close()
            raise WorkersLostError(f"the process that loads {function} ended at its start; its message is above")

    def fork(self, work: socket.socket) -> int:
        socket.send_fds(self._control, [b"fork"], [work.fileno()])
        return self._reply()

    def kill(self, pid: int) -> int:
        self._control.send(f"kill {pid}".encode())
        return self._reply()

    def _reply(self) -> int:
        message = self._control.recv(64)
        if not message:
            raise ConnectionError("the process that forks workers ended")
        return int(message)


def _close(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()  # it kills its workers and ends
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("PYTHON")}
    # Two workers with a thread for each core of the machine each would fight.
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
