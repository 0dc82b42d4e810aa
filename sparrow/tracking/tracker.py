"""What a tracker is, and the fan-out that keeps a failing one from stopping the training."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sparrow.errors import UserError

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives a run's metrics and samples, on rank 0 only.

    Any but `log_dict` may be missing, so that torchtune's metric loggers, which have `log_dict` and `close`, stand in
    the same list.
    """

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        """Called once before anything is logged; `run_id` is that of the first start when the run is resumed."""
        ...

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of one step; docs/metrics.md lists the names."""
        ...

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Some of the step's rollouts, each a flat dict (prompt, response, reward, ...)."""
        ...

    def log_files(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """Files that the run stands on (settings, schedule, calibration), once, after `start`."""
        ...

    def close(self) -> None:
        """Nothing is logged after this."""
        ...


class SafeTrackers:
    """Fans out to several trackers; an exception in one is reported once, counted, and never reaches the caller.

    Attributes:
        failures: failed calls per tracker, by class and, of several of one class, its place in the list. While there
            are any, `tracking/failures` is among the metrics.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._names = _names(self._trackers)
        self.failures: Counter[str] = Counter()
        self.run_id = ""

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str | None = None) -> None:
        """Starts every tracker; `run_id` comes from `state_dict` of the interrupted run, None makes a new one.

        A tracker that cannot start is left out. Raises UserError where the user can mend it.
        """
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._trackers = [t for t in self._trackers if self._call(t, "start", run_dir, config, self.run_id)]

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        if failures := self.failures.total():
            metrics = {**metrics, "tracking/failures": failures}
        for tracker in self._trackers:
            self._call(tracker, "log_dict", dict(metrics), step)

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        for tracker in self._trackers:
            self._call(tracker, "log_samples", [dict(row) for row in rows], step)

    def log_files(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        for tracker in self._trackers:
            self._call(tracker, "log_files", name, kind, paths)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: {"run_id": ...}."""
        return {"run_id": self.run_id}

    def close(self) -> None:
        if not self.run_id:  # Never started: there is nothing to end.
            return
        for tracker in self._trackers:
            self._call(tracker, "close")
        for name, count in self.failures.items():
            _log.warning("%s failed %d times in this run", name, count)

    def _call(self, tracker: Tracker, method: str, *args: Any) -> bool:
        """Whether it went well."""
        function = getattr(tracker, method, None)
        if function is None:
            return True
        try:
            function(*args)
        except Exception as error:
            if isinstance(error, UserError) and method == "start":
                raise
            name = self._names[id(tracker)]
            self.failures[name] += 1
            if self.failures[name] == 1:
                _log.warning("%s.%s failed, training goes on: %s: %s", name, method, type(error).__name__, error)
            return False
        return True


def _names(trackers: Sequence[Tracker]) -> dict[int, str]:
    """By identity: the class, and where that does not tell them apart the place in the list."""
    classes = [type(tracker).__name__ for tracker in trackers]
    return {
        id(tracker): name if classes.count(name) == 1 else f"{name} {place}"
        for place, (tracker, name) in enumerate(zip(trackers, classes, strict=True))
    }
