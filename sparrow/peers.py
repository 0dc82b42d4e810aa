"""The other processes of a run: one that fails says so in the job's store, and the others end instead of waiting.

A collective waits for a process that is gone until its time-out, and a rollout does not look at the others for minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import psutil
import torch.distributed as dist

from sparrow.errors import RESUME_ADVICE, UserError

# Keys of the job's store; ranks end theirs.
FAILED = f"sparrow/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
HEARD = f"{FAILED}/heard"
THERE, BEATS, PIDS, LEFT = (f"{FAILED}/{name}" for name in ("there", "beats", "pids", "left"))
STORE_NOTE = "store.txt"
NO_NODE = "-"  # where it happened is not known, or cannot speak for itself

SECONDS_TO_COME = 600
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_BE_HEARD = 5.0
# A rank that writes gigabytes may keep its own watcher from running for a minute.
SECONDS_OF_SILENCE = 300.0
STORE_TIMEOUT = timedelta(seconds=30)


def _store() -> dist.Store:
    """A connection of its own to the store of torchrun: that of the process group may be busy waiting."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)


def wait_for_all() -> None:
    """Until every rank has come this far: where one ended before, the others are not to wait as for a collective.

    Raises:
        UserError: a rank has not come.
    """
    store, ranks = _store(), range(int(os.environ["WORLD_SIZE"]))
    store.set(f"{THERE}/{os.environ['RANK']}", "")
    try:
        store.wait([f"{THERE}/{rank}" for rank in ranks], timedelta(seconds=SECONDS_TO_COME))
    except dist.DistStoreError:
        missing = [rank for rank in ranks if not store.check([f"{THERE}/{rank}"])]
        raise UserError(
            f"ranks {missing} have not started within {SECONDS_TO_COME} s: see what their nodes say"
        ) from None


def tell_of_a_kill(note: Path, cause: str) -> None:
    """For the agent of a node whose ranks are all gone: tells those of the others, if the store is there.

    Args:
        note: where one of the ranks wrote where the store is.
    """
    host, port = note.read_text(encoding="utf-8").split()
    with suppress(dist.DistError):
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=SECONDS_TO_BE_HEARD))
        store.compare_set(FAILED, "", f"{NO_NODE} {cause}")


class _Watch:
    """What one rank knows of the others, by the store.

    A rank that fails says so. One that is killed cannot: those on its node miss its process, and everywhere else the
    rank before it misses its beat, as it does of one whose node is lost.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store, self.rank, ranks = store, dist.get_rank(), dist.get_world_size()
        store.set(f"{PIDS}/{self.rank}", str(os.getpid()))
        if agents_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            address = f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}"
            Path(agents_file).with_name(STORE_NOTE).write_text(address, encoding="utf-8")
        first = self.rank - int(os.environ["LOCAL_RANK"])
        neighbours = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
        self.pids = {rank: int(store.get(f"{PIDS}/{rank}")) for rank in neighbours if rank != self.rank}
        self.next, self.beats, self.looks_in_silence = (self.rank + 1) % ranks, 0, 0

    def failure(self) -> str | None:
        """Node and cause of what ended the run, if anything did."""
        self.store.add(f"{BEATS}/{self.rank}", 1)
        gone = [rank for rank, pid in self.pids.items() if not psutil.pid_exists(pid)]
        silent = self._silent()
        if self.store.check([FAILED]):  # what a rank says of itself comes before what is missed
            return self.store.get(FAILED).decode()
        for rank, cause in [(rank, "is gone: its process was killed") for rank in gone] + silent:
            if not self.store.check([f"{LEFT}/{rank}"]):
                return self.store.compare_set(FAILED, "", f"{NO_NODE} rank {rank} {cause}").decode()
        return None

    def _silent(self) -> list[tuple[int, str]]:
        """The next rank, if so many looks in a row found it silent; they pause while this process stands still."""
        beats = self.store.add(f"{BEATS}/{self.next}", 0)
        self.looks_in_silence = self.looks_in_silence + 1 if beats == self.beats else 0
        self.beats = beats
        if self.looks_in_silence * SECONDS_BETWEEN_LOOKS < SECONDS_OF_SILENCE:
            return []
        cause = f"has not been heard of for {SECONDS_OF_SILENCE:.0f} s: its node is lost, or it stands still"
        return [(self.next, cause)]

    def leave(self) -> None:
        """This rank is done: from now on it is not missed."""
        self.store.set(f"{LEFT}/{self.rank}", "")


@contextmanager
def watched(report: Callable[[str, bool], None]) -> Iterator[None]:
    """Inside, the loss of another rank is reported and ends this process; a failure of this one is told to the others.

    Whatever passes as an exception is a failure. What is to end all ranks in an orderly way must not.

    Args:
        report: takes a message, and whether this process's end is but the consequence of another's.
    """
    store, ended = _store(), threading.Event()
    watch = _Watch(store)

    def look() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            try:
                told = watch.failure()
            except dist.DistError:  # The store went with the process that held it.
                if not ended.wait(SECONDS_TO_BE_HEARD):
                    report(f"lost torchrun's store, with the process or node that held it; {RESUME_ADVICE}", True)
                    os._exit(1)
                return
            if told is not None and not ended.is_set():
                _leave(store, told, report)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        ended.set()
        watcher.join()
        # The first to fail is the cause; what others meet after it is not to hide it. Reported before the others are
        # told: with them the store may go, and then this node's agent.
        if isinstance(error, UserError):
            report(str(error), False)
        with suppress(dist.DistError):
            if is_lost_peer(error):
                store.compare_set(FAILED, "", f"{NO_NODE} rank {dist.get_rank()} {_lost(error)}")
            else:
                what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                _tell(store, f"rank {dist.get_rank()} failed: {what}")
        raise
    ended.set()
    watcher.join()
    with suppress(dist.DistError):
        watch.leave()


def _tell(store: dist.Store, cause: str) -> None:
    """Says it, and lets the other nodes leave first: with this process its agent goes, and maybe the store with it."""
    store.compare_set(FAILED, "", f"{os.environ['GROUP_RANK']} {cause}")
    elsewhere = dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"])
    until = time.monotonic() + SECONDS_TO_BE_HEARD
    while store.add(HEARD, 0) < elsewhere and time.monotonic() < until:
        time.sleep(0.05)
    if elsewhere:
        time.sleep(SECONDS_BETWEEN_LOOKS)  # until their agents have told why


def _leave(store: dist.Store, told: str, report: Callable[[str, bool], None]) -> NoReturn:
    """Ends this process; on the node where it happened, the rank that failed comes first and says it better."""
    node, _, cause = told.partition(" ")
    if node == os.environ["GROUP_RANK"]:
        time.sleep(SECONDS_TO_BE_HEARD)
    else:
        with suppress(dist.DistError):  # the store may have gone since
            store.add(HEARD, 1)
    report(said(cause), True)
    os._exit(1)


def said(cause: str) -> str:
    """What a rank that did not fail itself reports."""
    return f"{cause}; this ended all ranks, and {RESUME_ADVICE}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether another process was gone, by what a collective or the store raised; torch has no class of its own for it.

    gloo raises a RuntimeError like any other; NCCL raises the same class for what is wrong with its own set-up.
    """
    if isinstance(error, dist.DistBackendError):
        return any(words in str(error) for words in ("remote process", "onnection", "ncclRemoteError", "aborted"))
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "/gloo/" in str(error)


def lost_peer_message(error: BaseException) -> str:
    """One line; the store is asked who failed, as far as it still answers."""
    try:
        store = _store()
        if store.check([FAILED]):
            return said(store.get(FAILED).decode().partition(" ")[2])
    except dist.DistError:  # The store went with the process that held it.
        pass
    return f"{_lost(error)}; {RESUME_ADVICE}"


def _lost(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"lost the connection to another process, which was killed or lost its node ({first_line})"
