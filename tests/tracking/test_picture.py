"""The picture of a run: what is read from the file, and that any file gives a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from sparrow.tracking.picture import draw_run


def written(tmp_path: Path, rows: list[dict[str, Any]], tail: str = "") -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return file


def metrics(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward": 0.02 * step,
        "val/mean@1": 0.03 * step,
        "acceptance/p5": 0.9,
        "acceptance/tau": 0.86,
        **{f"acceptance/p5_bin/{start}": 0.95 - start / 10_000 for start in (0, 64, 128)},
        "budget/kv_read_ratio": 0.4,
        "budget/mean_pages": 20.0,
        "completions/mean_length": 180.0,
        "completions/mean_terminated_length": 170.0,
        "completions/clipped_ratio": 0.1,
    }


@pytest.mark.parametrize("count", [1, 45])
def test_a_run_in_progress_gives_a_picture(tmp_path: Path, count: int) -> None:
    file = written(tmp_path, [metrics(step) for step in range(1, count + 1)], tail='{"step": 4, "rew')
    draw_run(file, tmp_path / "run.png", tau=0.9)
    image = imread(tmp_path / "run.png")
    assert image.shape == (720, 1620, 4)  # five charts that have data, in rows of three
    assert image[..., :3].std() > 0.02
    assert not list(tmp_path.glob("*.part"))


def test_more_data_is_more_ink_and_tau_is_taken_from_the_run(tmp_path: Path) -> None:
    pictures = []
    for name, rows, tau in (
        ("none", [], None),
        ("no_tau", [{**metrics(step), "acceptance/tau": "nan"} for step in (1, 2)], None),
        ("from_run", [metrics(step) for step in (1, 2)], None),
        ("given", [metrics(step) for step in (1, 2)], 0.86),
    ):
        draw_run(written(tmp_path, rows), tmp_path / f"{name}.png", tau)
        pictures.append(imread(tmp_path / f"{name}.png"))
    assert not np.array_equal(pictures[0], pictures[1])
    assert not np.array_equal(pictures[1], pictures[2])
    assert np.array_equal(pictures[2], pictures[3])


def test_lines_of_one_step_are_merged_and_odd_values_do_no_harm(tmp_path: Path) -> None:
    whole = written(tmp_path, [metrics(step) for step in (1, 2, 3)])
    draw_run(whole, tmp_path / "whole.png")
    split = [{key: row[key] for key in keys} for row in map(metrics, (3, 1, 2)) for keys in _halves(row)]
    draw_run(written(tmp_path, split), tmp_path / "split.png")
    assert np.array_equal(imread(tmp_path / "whole.png"), imread(tmp_path / "split.png"))
    draw_run(written(tmp_path, [dict.fromkeys(metrics(1), "nan") | {"step": 1}]), tmp_path / "nan.png")
    assert (tmp_path / "nan.png").stat().st_size > 0


def _halves(row: dict[str, Any]) -> tuple[list[str], list[str]]:
    names = [name for name in row if name != "step"]
    return ["step", *names[:5]], ["step", *names[5:]]


def test_names_of_metrics_are_no_formulas_and_no_directions(tmp_path: Path) -> None:
    odd = {f"val/mean@{name}": 0.5 for name in ("$\\frac{$", "\u202e", "\ud800", "_x")}
    draw_run(written(tmp_path, [{**metrics(step), **odd} for step in (1, 2)]), tmp_path / "run.png")
    assert imread(tmp_path / "run.png").shape == (720, 1620, 4)
