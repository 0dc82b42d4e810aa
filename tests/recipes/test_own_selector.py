"""The selector that docs/architecture.md shows, written to a file and named in a config."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

from sparrow.recipes import sparrow_grpo

from .conftest import HERE, metrics

ROOT = HERE.parents[1]


def shown(language: str) -> str:
    """The block of that language in the section on selectors."""
    section = (ROOT / "docs" / "architecture.md").read_text().split("## A selector of your own")[1].split("\n## ")[0]
    (block,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return str(block)


def test_a_file_of_ten_lines_is_a_selector(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the working directory is put on it
    source = shown("python")
    assert len(source.splitlines()) <= 10
    Path("my_selector.py").write_text(source)
    config = yaml.safe_load(shown("yaml")) | {"base": str(HERE / "mini.yaml"), "model": str(checkpoint)}
    Path("mine.yaml").write_text(yaml.safe_dump(config | {"output_dir": "run"}))
    assert sparrow_grpo.main(["--config", "mine.yaml"]) == 0
    assert "_component_: my_selector.StrongestHead" in capsys.readouterr().out
    rows = [row for row in metrics(tmp_path / "run") if "reward" in row]
    assert len(rows) == 2 and all(row["budget/kv_read_ratio"] < 1 for row in rows)
    assert Path(sys.modules.pop("my_selector").__file__ or "").parent == tmp_path
