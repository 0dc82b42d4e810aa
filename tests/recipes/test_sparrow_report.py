"""`sparrow_report` from the command line: on the logs of a run, a killed one, several, and folders that are no run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from sparrow.recipes import sparrow_report
from sparrow.tracking.jsonl import JsonlTracker


def logged(folder: Path, steps: int) -> Path:
    tracker = JsonlTracker()
    tracker.start(folder, {}, "id")
    for step in range(1, steps + 1):
        tracker.log_dict({"reward": 0.1 * step, "acceptance/p5": 0.9, "time/step": 2.0}, step)
        tracker.log_samples([{"prompt": "p", "response": "é", "reward": 1.0, "length": 1, "terminated": True}], step)
    return folder


def reported(*arguments: str | Path) -> int:
    return sparrow_report.main([str(argument) for argument in arguments])


def test_the_default_run_leaves_a_complete_report(tmp_path: Path, grpo: Callable[..., list[dict[str, Any]]]) -> None:
    grpo("steps=2")
    assert reported("--run", tmp_path / "run") == 0
    page = (tmp_path / "run" / "report.html").read_text()
    for title in (
        "Reward and validation",
        "Acceptance tail",
        "KV budget",
        "KV read ratio",
        "Response length",
        "Time of",
    ):
        assert f"<h3>{title}" in page
    assert "2 of 2" in page and "<h4>Response</h4>" in page
    assert imread(tmp_path / "run" / "report.png").shape == (1080, 1620, 4)
    assert imread(tmp_path / "run" / "report_charts" / "tail.png").shape == (675, 1200, 4)
    assert not list((tmp_path / "run").rglob("*.part"))


def test_a_run_killed_at_any_byte_leaves_a_report_of_its_whole_lines(tmp_path: Path) -> None:
    folder = logged(tmp_path / "run", 3)
    whole = {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")}
    for end in range(0, len(whole["metrics.jsonl"]) + 1, 29):
        for name, content in whole.items():
            (folder / name).write_bytes(content[:end])
        run = sparrow_report.read_run(folder, "run", 12)
        page = sparrow_report.render([run], run.written)
        assert len(run.metrics.steps_N) == whole["metrics.jsonl"][:end].count(b"\n")
        assert len(run.samples.rows) == whole["samples.jsonl"][:end].count(b"\n")
        assert page.endswith("</html>\n") and "could not be read" not in page


def test_several_runs_give_one_page_and_their_common_pictures(tmp_path: Path) -> None:
    one, two = logged(tmp_path / "one", 3), logged(tmp_path / "two", 5)
    assert reported("--run", one, "--run", two, "--output", tmp_path / "both.html") == 0
    page = (tmp_path / "both.html").read_text()
    assert "<h1>2 runs</h1>" in page and '<details class="run" id="run-1"><summary>two</summary>' in page
    assert (tmp_path / "both.png").is_file()
    assert (tmp_path / "both_charts" / "compare_reward.png").is_file()


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert reported("--run", tmp_path) == 0
    assert "There is no whole line" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --run"),
        (["--run", "{0}/none"], "--run {0}/none: there is no such folder"),
        (["--run", "{0}/empty"], "--run {0}/empty: no metrics.jsonl in it, so it is not the folder of a run"),
        (["--run", "{0}"], "--run {0}: no metrics.jsonl in it; these folders in it have one: run"),
        (["--run", "{0}/run", "--run", "{0}/./run"], "--run: the same folder is given twice"),
        (["--run", "{0}/run", "--output", "{0}/x.txt"], "--output {0}/x.txt: give a file that ends with .html"),
        (["--run", "{0}/run", "--output", "{0}/no/x.html"], "--output {0}/no/x.html: give a file"),
        (["--run", "{0}/run", "--config", "tiny"], "unrecognized arguments: --config tiny"),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    logged(tmp_path / "run", 1)
    (tmp_path / "empty").mkdir()
    assert reported(*(argument.format(tmp_path) for argument in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message.format(tmp_path) in line


@pytest.mark.parametrize("road", [["sparrow", "run", "sparrow_report"], ["sparrow.recipes.sparrow_report"]])
def test_the_roads_to_it(tmp_path: Path, road: list[str]) -> None:
    logged(tmp_path / "run", 2)
    command = [sys.executable, "-m", *road, "--run", "run", "--output", "here.html"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["page", "here.html"]
    assert "<h1>run</h1>" in (tmp_path / "here.html").read_text()
