"""A progress bar with tok/s and the time that is left; nothing where nobody looks at a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total_tokens: int) -> Iterator[Callable[[int, float], None]]:
    """Yields what takes the tokens so far and the seconds of the makespan in which they were made."""
    if not sys.stderr.isatty():
        yield lambda tokens, seconds: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
        TextColumn("{task.fields[rate]:.0f} tok/s"), TextColumn("eta"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_tokens, rate=0.0)
        yield lambda tokens, seconds: bar.update(task, completed=tokens, rate=tokens / seconds)
