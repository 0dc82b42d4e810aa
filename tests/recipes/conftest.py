from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparrow.recipes import sparrow_grpo, sparrow_sft

from .prepare_sets import PARTS

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that half knows the task, made by the project's own warm-up."""
    folder = tmp_path_factory.mktemp("sft")
    assert sparrow_sft.main(["--config", str(HERE / "mini_sft.yaml"), f"output_dir={folder}"]) == 0
    return folder / "model"


@pytest.fixture
def arguments(checkpoint: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments of a mini run into `tmp_path`/name."""

    def make(*overrides: str, name: str = "run") -> list[str]:
        config = ["--config", str(HERE / "mini.yaml"), f"model={checkpoint}", f"output_dir={tmp_path / name}"]
        return [*config, *overrides]

    return make


@pytest.fixture
def grpo(arguments: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a mini run in this process and returns its metrics, a dict per step."""

    def run(*overrides: str, name: str = "run") -> list[dict[str, Any]]:
        assert sparrow_grpo.main(arguments(*overrides, name=name)) == 0
        return metrics(tmp_path / name)

    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with components of their own."""
    (tmp_path / "prepare_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "prepare_parts", raising=False)
    return tmp_path


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
