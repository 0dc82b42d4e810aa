"""The tools are scripts, not a package: they find each other by their folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Torchrun = Callable[..., str]

TOOLS = str(Path(__file__).parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)


@pytest.fixture
def torchrun() -> Torchrun:
    """Runs a tool in two processes that see no GPU, and returns what it printed."""

    def run(tool: ModuleType, *arguments: object) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        whole = [*command, str(tool.__file__), *map(str, arguments)]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, check=True).stdout

    return run
