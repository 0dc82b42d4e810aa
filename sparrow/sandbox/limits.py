"""What one untrusted program may use."""

from __future__ import annotations

from dataclasses import dataclass

from sparrow.errors import UserError


@dataclass(frozen=True)
class Limits:
    """Per run of a program.

    Attributes:
        seconds: of the clock, from the start of its namespaces to the end of its last process.
        memory_mb: of each process; where there is a cgroup, of all of them together.
        disk_mb: of the files in its home, the only place it can write to.
        files: in its home.
        processes: and threads, at a time; each program has two from the start, and the sandbox one.
        output_mb: of what it prints, and of what its function returns.
    """

    seconds: float = 10.0
    memory_mb: int = 1024
    disk_mb: int = 32
    files: int = 1000
    processes: int = 32
    output_mb: int = 4

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 0.1), ("memory_mb", 64), ("disk_mb", 1), ("files", 16), ("processes", 4), ("output_mb", 1)
        ):  # fmt: skip
            if not least <= getattr(self, name) <= 1e6:
                raise UserError(f"sandbox: {name} must be between {least} and 1000000, got {getattr(self, name)}")
