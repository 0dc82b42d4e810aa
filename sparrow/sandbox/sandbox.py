"""Runs untrusted Python programs and functions, several at a time, each in namespaces of its own."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparrow.errors import UserError
from sparrow.sandbox.inside.filter import supported
from sparrow.sandbox.inside.values import decode, encode, hashed_items
from sparrow.sandbox.limits import Limits
from sparrow.sandbox.probe import check_isolation
from sparrow.sandbox.worker import Ending, Worker, WorkerDied, memory_file

# Numbers that all have the same hash are easily found, and a set of n of them takes n² steps to build.
_MOST_HASHED = 5000
_ATTEMPTS = 2
# "exited" with code 0; "failed" with another one, an exception, or killed by the kernel (memory, a crash).
Status = Literal["exited", "failed", "timeout", "output"]


@dataclass(frozen=True)
class ProgramRun:
    """What a program did.

    Attributes:
        status: see `Status`; "timeout" and "output" are killed for what they went over.
        code: its exit code; 128 + n where signal n ended it.
        stdout, stderr: at most `output_mb` each.
        seconds, cpu_seconds: of all its processes together.
    """

    status: Status
    code: int
    stdout: str
    stderr: str
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Failure:
    """In the place of a function's value: there is none.

    Attributes:
        status: as of a program.
        message: the exception's, where there was one.
    """

    status: Status
    message: str


class SandboxError(Exception):
    """The sandbox itself failed, for other programs too: says nothing about the program."""


class Sandbox:
    """Runs untrusted programs; may be used from several threads.

    Each run has PID, mount and IPC namespaces of its own, in the user, network and UTS namespaces of one of `workers`
    processes, without any privilege, network or view of the host's files; docs/tasks.md says what it cannot do.

    Args:
        timeout: seconds of the clock a run may take.
        memory_mb, disk_mb, files, processes, output_mb: see `Limits`.
        workers: programs that run at a time.
        binds: paths that programs see read-only besides the interpreter and its libraries.
        python_path: those of the `binds` that programs import modules from.
        preload: modules to import once, before any program, where importing takes long.

    Raises:
        UserError: this machine cannot isolate programs; says which step the kernel refused. There is no way to run
            them without.
    """

    def __init__(
        self, timeout: float = 10.0, memory_mb: int = 1024, disk_mb: int = 32, files: int = 1000, processes: int = 32,
        output_mb: int = 4, workers: int = 1, binds: Sequence[str] = (), python_path: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:  # fmt: skip
        if workers < 1:
            raise UserError(f"sandbox: workers must be at least 1, got {workers}")
        if sys.platform != "linux" or not supported():
            raise UserError(f"sandbox: needs Linux on x86_64 or aarch64, not {sys.platform} on {os.uname().machine}")
        for path in (*binds, *python_path):
            if not os.path.isabs(path) or not Path(path).exists():
                raise UserError(f"sandbox: binds and python_path must be absolute paths that exist, got {path!r}")
        self.limits = Limits(timeout, memory_mb, disk_mb, files, processes, output_mb)
        self._new = lambda: Worker(self.limits, binds, python_path, preload)
        self._closed = False
        self._owner = os.getpid()
        self._workers: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(workers - 1):
            self._workers.put(None)  # started when it is needed
        first = _started(self._new)
        self._bounds = tuple(first.group.folders)
        self._workers.put(first)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="sandbox")
        try:
            check_isolation(self)
        except BaseException:
            self.close()
            raise

    def run_program(self, program: str, stdin: str = "") -> ProgramRun:
        """Runs a program with that text on its standard input.

        Raises:
            SandboxError: no fault of the program's.
        """
        ending = self._run({"source": program}, stdin.encode("utf-8", "surrogatepass"))
        stdout, stderr = (content.decode("utf-8", "replace") for content in (ending.stdout, ending.stderr))
        return ProgramRun(_status(ending), ending.code, stdout, stderr, ending.seconds, ending.cpu_seconds)

    def call_function(self, program: str, entry_point: str, list_of_args: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a program's function with each list of arguments, every time in a process of its own.

        Args:
            program: its text; defines the function.
            entry_point: "f", "Solution.f", or the "f" of a class `Solution`, of which an instance is made.
            list_of_args: plain data, `sparrow.sandbox.inside.values` says which.

        Returns:
            Per list of arguments the value that the function returned, plain data too, with at most 5000 items in
            sets and dicts (a tuple in a set is as many as it has); or a `Failure`.

        Raises:
            SandboxError: no fault of the program's.
            TypeError: arguments that are no plain data.
        """
        return self.map(lambda arguments: self.call(program, entry_point, arguments), list_of_args)

    def call(self, program: str, entry_point: str, arguments: Sequence[Any]) -> Any:
        """As `call_function`, once."""
        job = {"source": program, "entry_point": entry_point, "arguments": encode(list(arguments))}
        ending = self._run(job, b"")
        status = _status(ending)
        if status != "exited":
            return Failure(status, f"exit code {ending.code}")
        try:
            answer = json.loads(ending.result)
            if "error" in answer:
                return Failure("failed", str(answer["error"])[:1000])
            if hashed_items(answer["value"]) > _MOST_HASHED:
                return Failure("failed", f"a value with more than {_MOST_HASHED} items in sets and dicts")
            return decode(answer["value"])
        # Whatever a program put into its place; all that these can do is fail.
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            return Failure("failed", f"no readable value: {type(error).__name__}")

    def map(self, function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """The function of each item, as many at a time as there are workers."""
        if len(items) == 1:
            return [function(items[0])]
        return list(self._threads.map(function, items))

    def describe(self) -> list[str]:
        """What is in force on this machine, in lines for a log."""
        limits, together = self.limits, "a cgroup bounds a program's processes together"
        each = "no cgroup can be made here"
        return [
            "user, PID, mount, network, IPC and UTS namespaces; no capability; seccomp filter; uid 65534",
            f"{limits.seconds:g} s, {limits.disk_mb} MB in {limits.files} files, {limits.output_mb} MB of output",
            f"memory {limits.memory_mb} MB: " + (
                together if "memory" in self._bounds else f"{each}: of each process, so {limits.processes} times that"
            ),
            f"{limits.processes} processes: " + (
                together if "pids" in self._bounds else f"{each}; RLIMIT_NPROC, counted per user namespace"
            ),
        ]  # fmt: skip

    def close(self) -> None:
        """Ends all processes, those at work after their run; the sandbox cannot be used any more.

        Nothing in a fork of the process that made it.
        """
        if os.getpid() != self._owner:
            return
        self._closed = True
        self._threads.shutdown()
        self._end_idle()

    def _end_idle(self) -> None:
        idle: list[Worker | None] = []
        with suppress(queue.Empty):
            while True:
                idle.append(self._workers.get_nowait())
        for worker in idle:
            if worker is not None:
                worker.close()
            self._workers.put(None)  # for whoever waits for one, to find the sandbox closed

    def _run(self, job: dict[str, Any], stdin: bytes) -> Ending:
        files: list[int] = []
        try:
            for content in (json.dumps(job).encode(), stdin):
                files.append(memory_file(content))
            for _ in range(_ATTEMPTS):
                try:
                    return self._once(*files)
                except WorkerDied as error:
                    failure = error
            self._check_that_others_run(failure)
            return Ending("itself", 128 + signal.SIGKILL, b"", b"", b"", 0.0, 0.0)
        finally:
            for file in files:
                os.close(file)

    def _once(self, job: int, stdin: int) -> Ending:
        with self._worker() as worker:
            return worker.run(job, stdin)

    def _check_that_others_run(self, failure: WorkerDied) -> None:
        """A program that ends each worker that runs it, where another program ends none, does so itself.

        None should be able to. If one is, that must not be a way out of the reward.
        """
        job, stdin = memory_file(json.dumps({"source": ""}).encode()), memory_file(b"")
        try:
            self._once(job, stdin)
        except WorkerDied as error:
            raise SandboxError(f"{failure}; {error}") from error
        finally:
            os.close(job)
            os.close(stdin)

    @contextmanager
    def _worker(self) -> Iterator[Worker]:
        """One that is free, or a new one; None takes the place of one that did not survive."""
        if os.getpid() != self._owner:
            raise RuntimeError(f"this sandbox is process {self._owner}'s; make another one after a fork")
        worker = self._workers.get()
        kept: Worker | None = None
        try:
            if self._closed:
                raise RuntimeError("this sandbox was closed")
            worker = worker or self._new()
            yield worker
            kept = worker
        finally:
            if kept is None and worker is not None:
                worker.close()
            self._workers.put(kept)
            if self._closed:
                self._end_idle()


def _started(new: Callable[[], Worker]) -> Worker:
    try:
        return new()
    except WorkerDied as error:
        raise UserError(f"sandbox: its process cannot be started: {error}") from error


def _status(ending: Ending) -> Status:
    if ending.how == "time":
        return "timeout"
    if ending.how == "output":
        return "output"
    return "exited" if ending.code == 0 else "failed"
