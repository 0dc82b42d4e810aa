"""How far an evaluation is: a bar with the time that is left on a terminal, nothing elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class SampleProgress:
    """A context manager; on stderr, so that the tables can be piped.

    Args:
        total: samples.
        done: of an earlier part.
        shown: False on all ranks but the first.
    """

    def __init__(self, name: str, total: int, done: int, shown: bool) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples  {task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task(name, total=total, completed=done, speed="")
        self._total = total

    def update(self, samples: int, tokens_per_second: float) -> None:
        """`samples` are done, this part's and earlier ones."""
        self._bar.update(self._task, completed=min(samples, self._total), speed=f"{tokens_per_second:.0f} tokens/s")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
