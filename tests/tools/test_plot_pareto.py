"""Budgets at equal P5 on surfaces whose answers are plain: P5 in steps over budgets that double."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import plot_pareto
import pytest
from pareto import Needed, budget_for, geometric_mean, ratios

from sparrow.cost_search import COLUMNS, Cell

# By budget in pages: P5.
PAPER = {8: 0.5, 16: 0.7, 32: 0.9, 64: 1.0}
# Half the pages of the same size for the same P5, but it stops below 1.
BETTER = {4: 0.5, 8: 0.7, 16: 0.9}


def curve(p5_by_budget: dict[int, float]) -> list[tuple[int, Cell]]:
    return [(budget, Cell(p5, p5, p5, 5000)) for budget, p5 in p5_by_budget.items()]


def write_surface(path: Path, p5_by_pages: dict[int, float], page_size: int = 16, bins=(0, 512), tokens=5000) -> Path:
    rows = [
        f"{page_size},{start},{pages},{p5},{p5 - 0.02:.3f},{min(1, p5 + 0.02):.3f},{tokens}"
        for start in bins
        for pages, p5 in p5_by_pages.items()
    ]
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return path


def run(tmp_path: Path, *arguments: str) -> int:
    return plot_pareto.main([*arguments, "--png", str(tmp_path / "new" / "p.png"), "--out", str(tmp_path / "p.json")])


def test_between_two_budgets_the_logarithm_is_linear():
    points = curve({100: 0.5, 400: 0.9, 1600: 0.95})
    # Half of the way from .5 to .9 is half of the factor four.
    assert budget_for(points, 0.7) == Needed(pytest.approx(200), 400)
    assert budget_for(points, 0.94) == Needed(pytest.approx(400 * 4**0.8), 1600)
    assert budget_for(points, 0.5) == Needed(100, 100) and budget_for(points, 0.95) == Needed(1600, 1600)


@pytest.mark.parametrize("p5", [0.49, 0.951])
def test_beyond_the_grid_there_is_no_answer(p5):
    assert budget_for(curve({100: 0.5, 400: 0.9, 1600: 0.95}), p5) is None


def test_the_first_budget_that_reaches_it_counts_where_a_curve_dips():
    points = curve({100: 0.5, 200: 0.9, 400: 0.6, 800: 0.92})
    assert budget_for(points, 0.7) == Needed(pytest.approx(100 * math.sqrt(2)), 200)
    # .92 is all of the way up from the dip; .91 is 31 / 32 of it.
    assert budget_for(points, 0.91) == Needed(pytest.approx(400 * 2 ** (31 / 32)), 800)


def test_a_budget_of_the_reference_that_adds_nothing_is_no_point():
    reference = curve({100: 0.5, 200: 0.9, 400: 0.6, 800: 0.9, 1600: 1.0, 3200: 1.0})
    found = ratios(curve({50: 0.4, 100: 0.9, 200: 1.0}), reference)
    assert [(ratio.reference_budget, ratio.p5) for ratio in found] == [(100, 0.5), (200, 0.9), (1600, 1.0)]
    # .5 is a fifth of the way from .4 to .9.
    assert [ratio.ratio for ratio in found] == pytest.approx([0.5 * 2**0.2, 0.5, 0.125])
    assert [ratio.grid_ratio for ratio in found] == [1.0, 0.5, 0.125]
    assert [ratio.ratio for ratio in ratios(reference, reference)] == [1.0, 1.0, 1.0]


def test_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0) and geometric_mean([0.25, 1.0]) == pytest.approx(0.5)
    assert geometric_mean([]) is None


def test_ratios_by_hand(tmp_path, capsys):
    """Pages of 32 and of 16 tokens: half the pages are the same tokens, and the better one needs half of the tokens."""
    paper = write_surface(tmp_path / "paper.csv", PAPER)
    better = write_surface(tmp_path / "better.csv", BETTER)
    wide = write_surface(tmp_path / "wide.csv", {4: 0.5, 8: 0.7, 16: 0.9}, page_size=32)
    surfaces = [f"--surface={label}={path}" for label, path in (("a", paper), ("b", better), ("w", wide))]
    assert run(tmp_path, *surfaces, "--tau", "0.8") == 0
    content = json.loads((tmp_path / "p.json").read_text())
    assert content["reference"] == "a" and content["page_sizes"] == {"a": 16, "b": 16, "w": 32}
    (found,) = content["bins"]
    assert found["bin_start"] == 512, "the last one"
    a, b, w = found["labels"].values()
    # Half of the way from .7 to .9: sqrt(2) times 256 tokens, and 128.
    assert a["at_tau"] == {"budget": pytest.approx(256 * math.sqrt(2)), "grid_budget": 512}
    assert b["at_tau"] == {"budget": pytest.approx(128 * math.sqrt(2)), "grid_budget": 256}
    assert [pair["ratio"] for pair in a["at_equal_p5"]] == [1, 1, 1, 1]
    # The reference's 1.0 is beyond what the others reach.
    assert [pair["reference_budget"] for pair in b["at_equal_p5"]] == [128, 256, 512]
    assert b["mean_ratio"] == pytest.approx(0.5) and b["mean_grid_ratio"] == pytest.approx(0.5)
    assert w["mean_ratio"] == pytest.approx(1.0)
    assert "tau 0.8: 181 (256)" in (printed := capsys.readouterr().out) and "mean of 3: 0.500 (0.500)" in printed
    png = tmp_path / "new" / "p.png"
    assert png.read_bytes().startswith(b"\x89PNG") and list(png.parent.iterdir()) == [png]


def test_the_grid_ratio_is_of_the_next_budget_and_the_reference_can_be_chosen(tmp_path):
    paper, other = write_surface(tmp_path / "p.csv", PAPER), write_surface(tmp_path / "o.csv", {2: 0.3, 16: 0.7})
    arguments = [f"--surface=paper={paper}", f"--surface=other={other}", "--bins", "512", "0"]
    assert run(tmp_path, *arguments) == 0
    content = json.loads((tmp_path / "p.json").read_text())
    assert [found["bin_start"] for found in content["bins"]] == [0, 512]
    first, second = content["bins"][0]["labels"]["other"]["at_equal_p5"]
    # .5 is half of the way from 32 to 256 tokens, at 32 * sqrt(8) = 90.5; the reference takes 128.
    assert (first["ratio"], first["grid_ratio"]) == (pytest.approx(math.sqrt(0.5)), 2.0)
    assert (second["ratio"], second["grid_ratio"]) == (1.0, 1.0)
    assert run(tmp_path, *arguments, "--reference", "other") == 0
    content = json.loads((tmp_path / "p.json").read_text())
    (pair,) = content["bins"][0]["labels"]["paper"]["at_equal_p5"]
    assert pair["reference_budget"] == 256 and pair["ratio"] == 1.0, "the reference's .3 is below what paper covers"


def test_curves_without_a_common_p5_have_no_ratio(tmp_path, capsys):
    low = write_surface(tmp_path / "low.csv", {8: 0.1, 16: 0.2})
    high = write_surface(tmp_path / "high.csv", {8: 0.8, 16: 0.9})
    assert run(tmp_path, f"--surface=low={low}", f"--surface=high={high}") == 0
    labels = json.loads((tmp_path / "p.json").read_text())["bins"][0]["labels"]
    assert labels["high"] == {"at_tau": None, "at_equal_p5": [], "mean_ratio": None, "mean_grid_ratio": None}
    assert "mean of 0: no P5 in common" in capsys.readouterr().out


def test_cells_of_few_tokens_are_left_out(tmp_path, capsys):
    paper = write_surface(tmp_path / "p.csv", PAPER)
    few = write_surface(tmp_path / "few.csv", BETTER, bins=(0,))
    with few.open("a") as file:
        file.writelines(f"16,512,{pages},{p5},0,1,999\n" for pages, p5 in BETTER.items())
    arguments = [f"--surface=paper={paper}", f"--surface=few={few}"]
    assert run(tmp_path, *arguments) == 0
    assert json.loads((tmp_path / "p.json").read_text())["bins"][0]["bin_start"] == 0
    assert run(tmp_path, *arguments, "--min-tokens", "999") == 0
    assert json.loads((tmp_path / "p.json").read_text())["bins"][0]["bin_start"] == 512
    capsys.readouterr()
    assert run(tmp_path, *arguments, "--bins", "512") == 2
    assert "--bins: bin 512 is not in every surface" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--surface=p.csv"], "--surface p.csv: must be label=path"),
        (["--surface=a=p.csv", "--surface=a=p.csv"], "each label once"),
        (["--surface=a=absent.csv"], "absent.csv: no such calibration surface"),
        (["--surface=a=two.csv"], "page sizes 16, 32 in one file"),
        (["--surface=a=p.csv", "--reference", "b"], "--reference b: no such label; there are a"),
        (["--surface=a=p.csv", "--min-tokens", "6000"], "--bins: no bin is in every surface .*a: none"),
    ],
)
def test_bad_input_is_one_line(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_surface(Path("p.csv"), PAPER)
    two = write_surface(Path("two.csv"), PAPER)
    two.write_text(two.read_text() + "32,0,4,0.5,0.4,0.6,5000\n")
    assert run(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(words, error), error
