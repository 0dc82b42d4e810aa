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
from typing import NoReturn

import torch.distributed as dist

from sparrow.errors import RESUME_ADVICE, UserError

FAILED = f"sparrow/failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
HEARD = f"{FAILED}/heard"
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_BE_HEARD = 5.0
STORE_TIMEOUT = timedelta(seconds=30)


def _store() -> dist.Store:
    """A connection of its own to the store of torchrun: that of the process group may be busy waiting."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=STORE_TIMEOUT)


@contextmanager
def watched(report: Callable[[str], None]) -> Iterator[None]:
    """Inside, the failure of another rank is reported and ends this process; one of this rank is told to the others.

    Whatever passes as an exception is a failure. What is to end all ranks in an orderly way must not.
    """
    store, ended = _store(), threading.Event()

    def watch() -> None:
        while not ended.wait(SECONDS_BETWEEN_LOOKS):
            try:
                cause = store.get(FAILED).decode() if store.check([FAILED]) else None
            except dist.DistError:  # The store went with the process that held it: the next collective says so.
                return
            if cause is not None and not ended.is_set():
                _leave(store, cause, report)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        ended.set()
        watcher.join()
        if not is_lost_peer(error):
            # The first to fail is the cause; what others meet after it is not to hide it.
            what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            with suppress(dist.DistError):
                _tell(store, f"rank {dist.get_rank()} failed: {what}")
        raise
    ended.set()
    watcher.join()


def _tell(store: dist.Store, cause: str) -> None:
    """Says it, and lets the other nodes leave first: with this process its agent goes, and maybe the store with it."""
    store.compare_set(FAILED, "", f"{os.environ['GROUP_RANK']} {cause}")
    elsewhere = dist.get_world_size() - int(os.environ["LOCAL_WORLD_SIZE"])
    until = time.monotonic() + SECONDS_TO_BE_HEARD
    while store.add(HEARD, 0) < elsewhere and time.monotonic() < until:
        time.sleep(0.05)
    if elsewhere:
        time.sleep(SECONDS_BETWEEN_LOOKS)  # until their agents have told why


def _leave(store: dist.Store, told: str, report: Callable[[str], None]) -> NoReturn:
    """Ends this process; on the node where it happened, the rank that failed comes first and says it better."""
    node, _, cause = told.partition(" ")
    if node == os.environ["GROUP_RANK"]:
        time.sleep(SECONDS_TO_BE_HEARD)
    else:
        store.add(HEARD, 1)
    report(said(cause))
    os._exit(1)


def said(cause: str) -> str:
    """What a rank that did not fail itself reports."""
    return f"{cause}; this ended all ranks, and {RESUME_ADVICE}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another process was gone. gloo raises a RuntimeError like any other."""
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
    return f"lost the connection to another process, which was killed or lost its node; {RESUME_ADVICE} ({error})"
