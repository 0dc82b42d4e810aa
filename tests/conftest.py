"""What all tests share: one thread (the machines have few cores), no deadlines, and which tests this machine can run.

A test says what it needs by a marker, and here is the one place that looks: `gpu` is skipped with its reason, `real` is
left out of the collection, because a checkpoint is the user's to give, not the machine's to have, and so is `gym` where
the extra `gym` is not installed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
import torch
import torch.distributed as dist

hypothesis.settings.register_profile("sparrow", deadline=None, derandomize=True)
hypothesis.settings.load_profile("sparrow")
torch.set_num_threads(1)

REAL_CHECKPOINT = "SPARROW_REAL_CHECKPOINT"
TOY_PART = """\
from dataclasses import dataclass


@dataclass
class Part:
    width: int
"""

TOY_CONFIG = """\
# A toy
recipe: toy_recipe.py
nested: {size: 3}
part: {_component_: toy_part.Part, width: 2}
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("gpu")
        wanted = 0 if marker is None else next(iter(marker.args), 1)
        if torch.cuda.device_count() < wanted:
            item.add_marker(pytest.mark.skip(reason=f"needs {wanted} CUDA device{'s' * (wanted > 1)}"))
    for marker_name, there in (("real", REAL_CHECKPOINT in os.environ), ("gym", bool(find_spec("reasoning_gym")))):
        left_out = [] if there else [item for item in items if item.get_closest_marker(marker_name)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    """Of the tests marked real."""
    folder = Path(os.environ[REAL_CHECKPOINT])
    assert (folder / "config.json").is_file(), f"{REAL_CHECKPOINT} is no Hugging Face folder: {folder}"
    return folder


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the tests marked gpu."""
    return torch.device("cuda", 0)


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this process alone, on the CPU."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what a program that runs one recipe and ends may change."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "toy_part", raising=False)


@pytest.fixture
def toy(tmp_path: Path, program: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with a recipe, a component and a config of their own."""
    shutil.copy(Path(__file__).with_name("toy_recipe.py"), tmp_path)
    (tmp_path / "toy_part.py").write_text(TOY_PART)
    (tmp_path / "toy.yaml").write_text(TOY_CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path
