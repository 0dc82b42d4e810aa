"""The end of samples.jsonl: newest first, whatever its size, whatever its rows lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparrow.tracking.report import samples
from sparrow.tracking.report.samples import read_samples


def row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "prompt": "p", "response": f"r{step}", "reward": 1.0, "length": 3, "terminated": True, **more}


def written(tmp_path: Path, rows: list[Any], tail: str = "") -> Path:
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return file


def test_the_newest_rows_come_first_and_an_unfinished_one_not_at_all(tmp_path: Path) -> None:
    file = written(tmp_path, [row(step) for step in range(1, 31)], tail='{"step": 31, "response": "')
    found = read_samples(file, 3)
    assert [sample.step for sample in found.rows] == [30, 29, 28]
    assert found.skipped == 0
    assert [sample.step for sample in read_samples(file, 50).rows] == list(range(30, 0, -1))


def test_only_the_end_of_a_large_file_is_read(tmp_path: Path) -> None:
    long = "x" * 2**20
    file = written(tmp_path, [row(step, prompt=long) for step in range(12)])
    found = read_samples(file, 12)
    assert found.skipped == file.stat().st_size - samples.TAIL_BYTES > 0
    assert [sample.step for sample in found.rows] == [11, 10, 9, 8, 7, 6, 5]


def test_tokens_come_with_their_alphas_or_not_at_all(tmp_path: Path) -> None:
    whole = row(1, tokens=["a", "b"], alphas=[900, -1], omitted=7)
    uneven, wrong = row(2, tokens=["a"], alphas=[1, 2]), row(3, tokens=["a"], alphas=[0.5])
    last, middle, first = read_samples(written(tmp_path, [whole, uneven, wrong]), 5).rows
    assert (first.tokens, first.alphas, first.omitted) == (["a", "b"], [900, -1], 7)
    assert middle.tokens == last.tokens == []


def test_rows_of_another_shape_do_no_harm(tmp_path: Path) -> None:
    odd = {"step": 4, "response": "r", "prompt": 3, "reward": "nan", "length": "x", "terminated": 1, "rewards": [1]}
    odd |= {"lowest": [{"position": "1"}, 3, {"position": 1, "alpha": 0.5}], "advantage": None, "alpha_min": True}
    rows = [[1], {"step": "1"}, {"response": "r"}, odd]
    (sample,) = read_samples(written(tmp_path, rows), 5).rows
    assert sample.reward != sample.reward and sample.prompt == ""
    assert (sample.length, sample.terminated, sample.rewards, sample.advantage, sample.alpha_min) == (
        None,
        None,
        {},
        None,
        None,
    )
    assert len(sample.lowest) == 1


def test_no_file_is_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path / "samples.jsonl", 3).rows == []
