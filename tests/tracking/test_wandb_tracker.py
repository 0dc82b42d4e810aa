"""Weights & Biases in offline mode: nothing leaves, the id stays, the table has a row per step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from sparrow.errors import UserError
from sparrow.tracking.samples import shorten
from sparrow.tracking.wandb import WandbTracker


@pytest.fixture(autouse=True)
def no_wandb_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_offline_runs_keep_their_id_and_log_a_row_per_step(tmp_path: Path) -> None:
    for resumed in range(2):
        tracker = WandbTracker("test", max_characters=10)
        tracker.start(tmp_path, {"lr": 1e-6}, "abc123")
        for step in (2 * resumed + 1, 2 * resumed + 2):
            tracker.log_dict({"reward": 0.5, "acceptance/p5": float("nan")}, step)
            tracker.log_samples([{"text": "x" * 20, "reward": 0.5}], step)
            tracker.log_samples([], step)
        tracker.close()
    runs = list(tmp_path.glob("wandb/offline-run*"))
    assert len(runs) == 2 and all((run / "run-abc123.wandb").exists() for run in runs)
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run*/files/media/table/*.json")]
    assert all(table["columns"] == ["step", "text", "reward"] for table in tables)
    rows = sorted(row for table in tables for row in table["data"])
    assert rows == [[step, "xxxxx [... 10 characters ...] xxxxx", 0.5] for step in (1, 2, 3, 4)]


def test_files_become_an_artifact_and_cells_a_histogram(tmp_path: Path) -> None:
    (tmp_path / "qwen3-4b.yaml").write_text("pages: [40]")
    (tmp_path / "surface.csv").write_text("bin,pages,p5")
    tracker = WandbTracker("test")
    tracker.start(tmp_path, {}, "abc123")
    tracker.log_files("schedule", "schedule", [tmp_path / "qwen3-4b.yaml", tmp_path / "surface.csv"])
    tracker.log_dict({"acceptance/histogram/0": 1.0, "acceptance/histogram/1": 3.0, "reward": 0.5}, 1)
    tracker.close()
    [record] = tmp_path.glob("wandb/offline-run*/run-abc123.wandb")
    content, until = b"", time.monotonic() + 60
    while b"[1,3]" not in content and time.monotonic() < until:  # W&B's own process writes it
        time.sleep(0.1)
        content = record.read_bytes()
    assert b"qwen3-4b.yaml" in content and b"surface.csv" in content
    assert b'"histogram"' in content and b"[1,3]" in content and b"histogram/0" not in content


def test_the_environment_wins_over_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker = WandbTracker("test", mode="online")
    tracker.start(tmp_path, {}, "abc123")
    tracker.log_dict({"reward": 0.5}, 1)
    tracker.close()
    assert not list(tmp_path.glob("wandb/*/*.wandb"))


def test_shorten_keeps_both_ends_and_says_how_much_is_gone() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abc [... 1 characters ...] efg"
    assert shorten("abcdefg", 1) == " [... 6 characters ...] g"


def test_no_characters_are_too_few() -> None:
    with pytest.raises(UserError, match="max_characters must be at least 1, got 0"):
        WandbTracker("test", max_characters=0)
