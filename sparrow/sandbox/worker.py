"""The near side of a zygote (`inside/zygote.py`): starts it, hands it programs, and reads what they print.

No program can block or fill this process: its input is a sealed memory file, its output is read up to a limit, and the
zygote's answer comes when all its processes are dead.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparrow.errors import UserError
from sparrow.sandbox.cgroup import ControlGroup
from sparrow.sandbox.inside.root import HOME
from sparrow.sandbox.interpreter import base_interpreter, interpreter_paths, package_paths
from sparrow.sandbox.limits import Limits
from sparrow.sandbox.refusal import refusal

_HERE = Path(__file__).resolve().parent
_START_SECONDS = 60.0
_GRACE_SECONDS = 30.0  # for a zygote on a loaded machine, after the time of a program is over
_NOBODY = 65534
_CHUNK = 1 << 16
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": HOME, "TMPDIR": HOME,
    "PYTHONHASHSEED": "0",  # the order of a set is the same in every run
    "OMP_NUM_THREADS": "1",
}  # fmt: skip
# Kept small: what is imported here, every program finds imported, and each fork copies its page tables.
_PRELOAD = ("bisect", "collections", "functools", "heapq", "itertools", "json", "math", "random", "re", "string")


class WorkerDied(Exception):
    """The zygote ended or no longer answers: the verifier's failure, not the program's."""


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        how: "itself", or killed for its "time" or its "output".
        code: exit code; 128 + n where signal n ended it.
        stdout, stderr, result: what it wrote, up to the limit.
        seconds, cpu_seconds: of all its processes.
    """

    how: Literal["itself", "time", "output"]
    code: int
    stdout: bytes
    stderr: bytes
    result: bytes
    seconds: float
    cpu_seconds: float


def memory_file(content: bytes) -> int:
    """Descriptor of a file that nobody can change any more, at its beginning."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class Worker:
    """One zygote; runs one program at a time.

    Args:
        limits: of every run.
        binds: paths that programs see read-only, besides the interpreter and its libraries.
        python_path: folders where programs find modules, before the standard library; to be in `binds`.
        preload: modules that are imported once, before any program.

    Raises:
        UserError: the kernel refuses a step of the isolation; says which, and which of its settings is why. Or a
            module to preload cannot be imported.
    """

    def __init__(
        self, limits: Limits, binds: Sequence[str] = (), python_path: Sequence[str] = (), preload: Sequence[str] = ()
    ) -> None:
        self._limits = limits
        self.group = ControlGroup.create(limits.memory_mb + limits.disk_mb, limits.processes)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                _command(theirs.fileno()),
                env=_ENVIRONMENT,
                cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        try:
            self._start(binds, python_path, preload)
        except BaseException:
            self.close()
            raise

    def run(self, job: int, stdin: int) -> Ending:
        """Runs a program to its end, in namespaces of its own.

        Args:
            job, stdin: memory files; the first with the JSON that `inside/program.py` takes.

        Raises:
            WorkerDied: the zygote did; this object is of no use any more.
        """
        pipes = [os.pipe() for _ in range(3)]
        readers = [reader for reader, _ in pipes]
        for reader in readers:
            os.set_blocking(reader, False)
        try:
            try:
                self._send(b"run", [job, stdin, *(writer for _, writer in pipes)])
            finally:
                for _, writer in pipes:
                    os.close(writer)
            return self._follow(readers)
        finally:
            for reader in readers:
                os.close(reader)

    def close(self) -> None:
        """Ends the zygote, and with it whatever runs."""
        self._control.close()  # at which it ends by itself, unless it is stuck
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.group.remove()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self, binds: Sequence[str], python_path: Sequence[str], preload: Sequence[str]) -> None:
        self.group = self.group.with_process(self.pid)
        self._control.settimeout(_START_SECONDS)
        config = {
            "limits": vars(self._limits), "paths": interpreter_paths(),
            "hidden": package_paths(), "binds": list(binds), "uid": _NOBODY,
            "python_path": list(python_path), "preload": [*_PRELOAD, *preload],
        }  # fmt: skip
        self._send(json.dumps(config).encode(), [])
        self._expect("map")
        _map_users(self.pid)
        self._send(b"mapped", [])
        self._expect("ready")

    def _expect(self, what: str) -> None:
        answer = self._answer()
        if "failed" in answer:
            raise UserError(refusal(answer["failed"]))
        if "unloaded" in answer:
            raise UserError(f"sandbox: preload: cannot import {answer['unloaded']}")
        assert what in answer, answer

    def _send(self, message: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._control, [message], descriptors)
        except OSError as error:
            raise WorkerDied(f"the sandbox's process does not listen: {error}") from error

    def _answer(self) -> dict[str, Any]:
        try:
            message = self._control.recv(_CHUNK)
        except OSError as error:
            raise WorkerDied(f"the sandbox's process does not answer: {error}") from error
        if not message:
            raise WorkerDied("the sandbox's process ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _follow(self, readers: list[int]) -> Ending:
        """Reads until the zygote says that all is over, and then what is still in the pipes."""
        written = {reader: bytearray() for reader in readers}
        limit = self._limits.output_mb << 20
        deadline = time.monotonic() + self._limits.seconds + _GRACE_SECONDS
        cut = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for reader in readers:
                selector.register(reader, selectors.EVENT_READ)
            answer = None
            while answer is None:
                ready = selector.select(max(deadline - time.monotonic(), 0))
                if not ready:
                    raise WorkerDied("the sandbox's process did not answer in time")
                for key, _ in ready:
                    if key.fd == self._control.fileno():
                        answer = self._answer()
                    elif not _read(key.fd, written[key.fd], limit):
                        selector.unregister(key.fd)
                        if len(written[key.fd]) > limit and not cut:
                            cut = True
                            self._send(b"kill", [])
        for reader in readers:
            while _read(reader, written[reader], limit):
                pass
        if "broken" in answer:
            raise WorkerDied(answer["broken"])
        cut = cut or any(len(content) > limit for content in written.values())
        stdout, stderr, result = (bytes(written[reader][:limit]) for reader in readers)
        code = answer["code"] if answer["code"] >= 0 else 128 - answer["code"]
        how: Literal["itself", "time", "output"]
        how = "output" if cut else "time" if answer["ended_by"] == "time" else "itself"
        return Ending(how, code, stdout, stderr, result, answer["seconds"], answer["cpu_seconds"])


def _read(descriptor: int, content: bytearray, limit: int) -> bool:
    """One chunk more; False where there is none, or above the limit.

    The end cannot be waited for: a process that this one forked meanwhile may hold the pipe open too.
    """
    try:
        chunk = os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return False
    content += chunk
    return bool(chunk) and len(content) <= limit


def _command(descriptor: int) -> list[str]:
    # The base interpreter without site: a virtual environment's packages are the project's, and not for programs.
    code = (
        f"import sys; sys.path.insert(0, {str(_HERE)!r}); from inside import zygote; sys.path.pop(0); "
        f"zygote.main({descriptor})"
    )
    return [base_interpreter(), "-s", "-S", "-P", "-B", "-c", code]


def _map_users(pid: int) -> None:
    """Root keeps 0 for the zygote and gives programs the id of nobody; anybody else has one id, shown as nobody's."""
    process = Path(f"/proc/{pid}")
    try:
        if os.geteuid() != 0:
            raise PermissionError
        for kind in ("uid_map", "gid_map"):
            (process / kind).write_text(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
    except OSError:
        try:
            (process / "setgroups").write_text("deny")
            (process / "uid_map").write_text(f"{_NOBODY} {os.geteuid()} 1\n")
            (process / "gid_map").write_text(f"{_NOBODY} {os.getegid()} 1\n")
        except OSError as error:
            raise UserError(refusal(f"write the user map: {error.strerror}")) from error
