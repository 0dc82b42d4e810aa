"""A recipe that does little but ends in every way a recipe can; the tests of launch and command line run copies."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch.distributed as dist

from sparrow import peers
from sparrow.config import Component
from sparrow.errors import UserError
from sparrow.launch import check_stop, run_recipe


@dataclass(kw_only=True)
class Nested:
    size: int = 1


@dataclass(kw_only=True)
class Config:
    recipe: str
    end: Literal["done", "user_error", "bug", "stop", "setup_error", "killed", "suspended"] = "done"
    on_rank: int = 0
    work: int = 0  # seconds that the other ranks do not look up
    cleanup_fails: bool = False
    silence: float = 300.0  # until a rank is given up
    nested: Nested = field(default_factory=Nested)
    part: Component | None = None


def say(line: str) -> None:
    """One write a line, so that the lines of several ranks do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Toy:
    """Ends as it is told."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        peers.SECONDS_OF_SILENCE = config.silence

    def setup(self) -> None:
        if self.config.end == "setup_error":
            raise UserError("checkpoint: not found")
        part = self.config.part.build() if self.config.part else None
        say(f"setup rank={self.rank} part={part}")

    def train(self) -> None:
        end = self.config.end if self.rank == self.config.on_rank else "done"
        if end == "user_error":
            raise UserError("lr: 2.0 is above the limit of 1.0")
        if end == "bug":
            raise RuntimeError("a bug")
        if end in ("killed", "suspended"):
            os.kill(os.getpid(), signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        time.sleep(self.config.work)
        while self.config.end == "stop":
            time.sleep(0.05)
            check_stop()
        say(f"trained size={self.config.nested.size}")

    def cleanup(self) -> None:
        say("cleanup")
        if self.config.cleanup_fails:
            raise OSError("a file is gone")


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(Toy, Config, argv)


if __name__ == "__main__":
    sys.exit(main())
