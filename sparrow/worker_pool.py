"""Worker processes that can be killed, for functions that hang, eat memory or crash on what a model wrote.

    pool = WorkerPool("sparrow.components.math_judge.judge")
    outcomes = pool.map([["1/2", ["0.5"]], ...])

Items and results are JSON, so that nothing that comes back can do more than be wrong. A pool may be used from any
thread; it installs no signal handler and forks nothing from the calling process.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sparrow.errors import UserError
from sparrow.worker_process import WALL_PER_CPU, Template, Try, Worker, WorkersLostError

# CPU time of a first try, however many items share the budget; several times what an ordinary answer needs.
SHORTEST_TRY_SECONDS = 0.05
# Deaths of the template process in one call, after which something is wrong with the machine.
MAX_RESTARTS = 3


@dataclass(frozen=True)
class Outcome:
    """Of one item.

    Attributes:
        kind: "done"; "timeout" and "memory" (what the item did to itself, its killing a fresh worker among them);
            "error" (the function raised, or a worker was lost).
        value: what the function returned, if done.
        detail: of an error.
    """

    kind: Literal["done", "timeout", "memory", "error"]
    value: Any = None
    detail: str = ""


class WorkerPool:
    """N processes that call a function on one item at a time each.

    Time is CPU time, so that a loaded machine turns no answer into a time-out. In a first round each item may take its
    share of half the budget (`budget * workers / 2 / items`, from SHORTEST_TRY_SECONDS up to `timeout`). What was
    slower is tried again with the whole `timeout`; each that fails again takes it from the other half of the budget,
    and when that is spent the rest are time-outs. So ordinary items are never starved by hostile ones, and on idle
    cores a call takes about max(budget, budget / 2 + items * SHORTEST_TRY_SECONDS / workers) seconds at most, whatever
    is in it. Wall time is limited too, to WALL_PER_CPU times these.
    An item whose worker died or ran out of memory gets one more try in a fresh worker.

    Args:
        function: dotted path of a function of one JSON value that returns a JSON value. Its module is imported in a
            process of its own: keep torch out of it.
        workers: processes.
        timeout: CPU seconds for one item.
        budget: CPU seconds of each worker for the slow items of one call; see above.
        memory_mb: address space of a worker.
        recycle: items after which a worker is replaced.
        warm_up: items of your own, put through the function once before any worker is forked: each has its caches.

    Raises:
        UserError: a limit that is not positive.
    """

    def __init__(
        self,
        function: str,
        workers: int = 2,
        timeout: float = 3.0,
        budget: float = 30.0,
        memory_mb: int = 1024,
        recycle: int = 2000,
        warm_up: Sequence[Any] = (),
    ) -> None:
        limits = {"workers": workers, "timeout": timeout, "budget": budget, "memory_mb": memory_mb, "recycle": recycle}
        for name, value in limits.items():
            if not value > 0:
                raise UserError(f"{name} must be positive, got {value}")
        self._function, self._memory_mb, self._recycle, self._warm_up = function, memory_mb, recycle, list(warm_up)
        self._workers, self._timeout, self._budget = workers, timeout, budget
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._template: Template | None = None
        self._idle: list[Worker] = []

    def map(self, items: Sequence[Any]) -> list[Outcome]:
        """The outcome of each item, in order.

        Raises:
            WorkersLostError: no process can be started, or the one that forks the workers ended several times.
            RuntimeError: in a fork of the process that made the pool, where both would talk to the same workers.
        """
        if os.getpid() != self._owner:
            raise RuntimeError(f"this pool is process {self._owner}'s; make another one after a fork")
        with self._lock:
            return _Call(self, items).run() if items else []

    def close(self) -> None:
        """Ends the processes; the next `map` starts others. Nothing in a fork, which has none."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        for worker in self._idle:
            worker.socket.close()
        self._idle = []
        if self._template is not None:
            self._template.close()
            self._template = None

    def _take(self, fresh: bool) -> Worker:
        if self._idle and not fresh:
            return self._idle.pop()
        if self._template is None:
            self._template = Template(self._function, self._memory_mb, self._warm_up)
        return Worker(self._template)

    def _end(self, worker: Worker) -> int:
        """Its wait status."""
        worker.socket.close()
        assert self._template is not None
        return self._template.kill(worker.pid)


class _Call:
    """One `map`: two rounds over the items, a worker for each try."""

    def __init__(self, pool: WorkerPool, items: Sequence[Any]) -> None:
        self.pool = pool
        share = pool._budget * pool._workers / 2 / len(items)
        self.first_seconds = min(pool._timeout, max(SHORTEST_TRY_SECONDS, share))
        self.waiting = deque(
            Try(index, json.dumps(item).encode(), self.first_seconds) for index, item in enumerate(items)
        )
        self.slow: deque[Try] = deque()
        self.outcomes: list[Outcome | None] = [None] * len(items)
        self.busy: dict[int, Worker] = {}
        self.selector = selectors.DefaultSelector()
        self.restarts = 0
        self.left = math.inf  # CPU seconds for tries that fail

    def run(self) -> list[Outcome]:
        complete = False
        try:
            self._round(self.waiting, math.inf)
            self.left = self.pool._budget * self.pool._workers / 2
            self._round(self.slow, time.monotonic() + WALL_PER_CPU * self.pool._budget / 2)
            complete = True
        finally:
            for worker in self.busy.values():
                worker.socket.close()
            if not complete:  # an exception passes: replies, the template's among them, would go to the next call
                self.pool._drop()
            self.selector.close()
        assert all(outcome is not None for outcome in self.outcomes)
        return [outcome for outcome in self.outcomes if outcome is not None]

    def _round(self, waiting: deque[Try], until: float) -> None:
        while waiting or self.busy:
            if time.monotonic() >= until or self.left <= 0:
                while waiting:
                    self.outcomes[waiting.popleft().index] = Outcome("timeout")
            try:
                while waiting and len(self.busy) < self.pool._workers:
                    self._start(waiting, until)
                self._wait()
                self._end_late()
            except ConnectionError as error:
                self._restart(error)

    def _start(self, waiting: deque[Try], until: float) -> None:
        worker = self.pool._take(fresh=waiting[0].retried)
        item = waiting.popleft()
        self.busy[worker.pid] = worker
        self.selector.register(worker.socket, selectors.EVENT_READ, worker)
        try:
            worker.start(item, until)
        except OSError:
            self._lost(worker)

    def _wait(self) -> None:
        if not self.busy:
            return
        nearest = min(worker.deadline for worker in self.busy.values())
        for key, _ in self.selector.select(max(0.0, nearest - time.monotonic())):
            worker: Worker = key.data
            try:
                reply = worker.receive()
            except (OSError, ValueError, RecursionError):
                self._lost(worker)
                continue
            if reply is not None:
                self._replied(worker, reply)

    def _replied(self, worker: Worker, reply: dict[str, Any]) -> None:
        item = self._release(worker)
        outcome = Outcome(**reply)
        if outcome.kind == "memory" and worker.served > 1:
            self._again(item)
        else:
            self.outcomes[item.index] = outcome
        idle = self.pool._idle
        spare = len(idle) + len(self.busy) < self.pool._workers
        if outcome.kind == "memory" or worker.served >= self.pool._recycle or not spare:
            self.pool._end(worker)
        else:
            idle.append(worker)

    def _lost(self, worker: Worker) -> None:
        """A worker died: of its CPU limit, or of what is not known. Where a fresh one does, too, the item did it."""
        item = self._release(worker)
        try:
            status = self.pool._end(worker)
        except ConnectionError as error:  # the template is gone, and took the worker with it
            if item.retried:
                self.outcomes[item.index] = Outcome("error", detail=f"{error}")
            else:
                self._again(item)
            raise
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            self._late(item)
        elif item.retried:
            self.outcomes[item.index] = Outcome("memory", detail="its worker died, twice")
        else:
            self._again(item)

    def _end_late(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self.busy.values() if worker.deadline <= now]:
            self._late(self._release(worker))
            self.pool._end(worker)

    def _late(self, item: Try) -> None:
        self.left -= item.seconds
        if item.seconds < self.pool._timeout:
            item.seconds = self.pool._timeout
            self.slow.append(item)
        else:
            self.outcomes[item.index] = Outcome("timeout")

    def _again(self, item: Try) -> None:
        item.retried = True
        item.seconds = self.pool._timeout
        self.slow.append(item)

    def _release(self, worker: Worker) -> Try:
        del self.busy[worker.pid]
        self.selector.unregister(worker.socket)
        item, worker.current = worker.current, None
        assert item is not None
        return item

    def _restart(self, error: Exception) -> None:
        """The template is gone, and its workers with it: what they were at is an error, the rest goes on."""
        self.restarts += 1
        for worker in list(self.busy.values()):
            self.outcomes[self._release(worker).index] = Outcome("error", detail=f"{error}")
            worker.socket.close()
        self.pool._drop()
        if self.restarts > MAX_RESTARTS:
            raise WorkersLostError(f"worker processes of {self.pool._function} ended {self.restarts} times") from error
