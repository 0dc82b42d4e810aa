"""The recipe on the packaged config: tables, files, measured rows, and the search on a surface."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparrow.recipes import sparrow_calibrate, sparrow_cost

from .conftest import HERE

# docs/performance.md: 4B, 20 rows, 32K, the roof of that process.
STEPS = [
    {"model": "4b", "cache": cache, "backend": "triton", "batch": 20, "context": 32768, "ms": ms, "roof_gb_s": 4520.0}
    for cache, ms in (("dense", 24.90), ("qwen3-4b-0.86", 9.69))
]
SMALL = ["workload.requests=16", "workload.rows=4", "workload.median=3000", "workload.longest=9000"]


def run(tmp_path: Path, *overrides: str) -> dict:
    arguments = ["--config", "qwen3_4b_cost", f"output_dir={tmp_path}", *SMALL, *overrides]
    assert sparrow_cost.main(arguments) == 0
    return json.loads((tmp_path / "cost.json").read_text())


def test_tables_figures_and_picture(tmp_path, capsys):
    found = run(tmp_path)
    printed = capsys.readouterr().out
    assert "a decode step of 4 rows" in printed and "all rollouts" in printed
    eflops = [found["rollouts"][name]["eflop"] for name in ("dense", "qwen3-4b-0.86", "qwen3-4b-0.80")]
    assert eflops == sorted(eflops, reverse=True)
    assert found["step"]["2048"]["dense"]["weight_elements"] == found["step"]["32768"]["dense"]["weight_elements"]
    assert (tmp_path / "cost.png").stat().st_size > 10_000


SELECTOR = "caches.2.kv_cache.selector"


@pytest.mark.parametrize(
    ("selector", "marks"),
    [
        (f"{SELECTOR}._component_=sparrow.components.selector.CentroidSelector", 1),
        (f"{SELECTOR}={{_component_: sparrow.components.selector.SegmentSoftmaxSelector, segments: 4}}", 4),
        (f"{SELECTOR}._component_=sparrow.components.selector.WindowSelector", 0),
    ],
)
def test_what_selection_reads_is_printed(tmp_path, capsys, selector, marks):
    foreign = "caches.2.kv_cache.budget.allow_foreign=true"
    step = run(tmp_path, "contexts=[32768]", selector, foreign)["step"]["32768"]["qwen3-4b-0.86"]
    # 4 rows; 34 sparse layers of 8 heads of 128; 2,048 pages, of which the schedule lets 384 be read.
    width = 8 * 128
    marks_read, kv = 4 * 34 * width * 2048 * marks, 4 * 2 * width * (2 * 32768 + 34 * 384 * 16)
    assert (step["landmark_elements"], step["kv_elements"]) == (marks_read, kv)
    assert step["selection_share"] == marks_read / (marks_read + kv + step["weight_elements"])
    assert f"{step['selection_share']:6.1%}" in capsys.readouterr().out.split("all rollouts")[0]


def test_what_was_made_for_another_model_is_refused_or_said(tmp_path, capsys):
    arguments = ["--config", "qwen3_4b_cost", f"output_dir={tmp_path}", *SMALL, "model.name=qwen3-8b"]
    assert sparrow_cost.main(arguments) == 2
    error = "schedule qwen3-4b-0.80: model is 'qwen3-4b' in the schedule, 'qwen3-8b' in this run"
    assert error in capsys.readouterr().err
    pages = "caches.1.kv_cache.page_size=32"
    assert sparrow_cost.main([*arguments[:-1], pages]) == 2
    assert "page_size is 16 in the schedule, 32 in this run" in capsys.readouterr().err
    allowed = [f"caches.{number}.kv_cache.budget.allow_foreign=true" for number in (1, 2)]
    assert sparrow_cost.main([*arguments, *allowed]) == 0
    printed = capsys.readouterr().out
    assert "schedule of qwen3-4b-0.86, foreign but allowed: model is 'qwen3-4b' in the schedule" in printed


def test_a_surface_is_held_against_what_calibration_noted_beside_it(checkpoint, tmp_path, capsys):
    """From sparrow_calibrate to sparrow_cost, with the model's folder."""
    calibrated = tmp_path / "calibrated"
    calibrate = ["--config", str(HERE / "mini_calibrate.yaml"), f"model={checkpoint}", f"output_dir={calibrated}"]
    assert sparrow_calibrate.main(calibrate) == 0
    cache = "kv_cache: {_component_: sparrow.components.kv_cache.%sKVCache, page_size: 4, block_size: 16%s}"
    sparse = cache % (
        "Sparse",
        ", dense_layers: %d, selector: {_component_: sparrow.components.selector.%s}, budget: {_component_: %s}",
    )
    schedule = f"sparrow.components.budget.StepSchedule, path: {calibrated}/schedule.yaml"
    fixed = "sparrow.components.budget.FixedBudget, pages: 4"

    def cost(*details: object, allow: bool = False) -> int:
        caches = f"caches=[{{name: dense, {cache % ('Dense', '')}}}, {{name: sparse, {sparse % details}}}]"
        criterion = f"criterion: {{tau: 0.6, min_tokens: 100, bin_width: 16}}, allow_foreign: {str(allow).lower()}"
        return sparrow_cost.main(
            ["--config", "qwen3_4b_cost", f"model={checkpoint}", f"output_dir={tmp_path}/cost", "contexts=[40]", caches,
             "workload={requests: 8, samples: 1, rows: 4, prompt: 30, median: 10, shortest: 1, longest: 20}",
             f"search={{surfaces: [{calibrated}/surface.csv], cache: sparse, {criterion}}}"]
        )  # fmt: skip

    assert cost(1, "HeadSoftmaxSelector", schedule) == 0
    assert "foreign" not in capsys.readouterr().out.split("a decode step")[1]
    assert cost(2, "QuestSelector", fixed) == 2
    error = capsys.readouterr().err
    assert f"dense_layers is 1 in {calibrated}/surface.csv, 2 here" in error
    assert error.startswith("error: search.surfaces: ") and "search.allow_foreign: true" in error
    assert cost(2, "QuestSelector", fixed, allow=True) == 0
    assert "surface, foreign but allowed: selector is 'HeadSoftmaxSelector'" in capsys.readouterr().out


def test_predicted_stands_beside_measured(tmp_path, capsys):
    makespan = {
        "model": "4b", "cache": "dense", "backend": "triton", "requests": 240, "lengths": {"mean": 10771.0},
        "makespan_s": 950.0, "steps": 44600, "mean_rows": 58.0, "roof_gb_s": 4450.0,
    }  # fmt: skip
    for name, rows in (("step", STEPS), ("makespan", [makespan])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": rows}))
    files = ", ".join(f"{{path: {tmp_path}/{name}.json, model: 4b}}" for name in ("step", "makespan"))
    dense, sparse, queue = run(tmp_path, f"measured=[{files}]", "rates.layer_us=0", "rates.selection_us=0")["measured"]
    assert dense["predicted_s"] == pytest.approx(0.02316, rel=0.01), "the roof that was printed then"
    assert sparse["predicted_speedup"] == pytest.approx(23.16 / 7.38, rel=0.01)
    assert sparse["measured_speedup"] == pytest.approx(24.90 / 9.69)
    assert 0.8 < queue["predicted_s"] / queue["measured_s"] < 1, ".89 of the roof, swaps and host besides"
    printed = capsys.readouterr().out
    # (24.90 - 23.16) ms over 36 layers; (9.69 - 7.38) less that, over 34.
    assert "x predicted" in printed and "above the prediction: 48." in printed and " us a layer" in printed


def test_with_its_own_latencies_a_measured_step_is_met(tmp_path):
    """The other three contexts of docs/performance.md, by what 32K implies: within an eighth."""
    times = {4096: (5.90, 5.20), 8192: (8.77, 6.16), 16384: (14.12, 7.71)}
    rows = [
        STEPS[0] | {"cache": cache, "context": context, "ms": ms}
        for context, pair in times.items()
        for cache, ms in zip(("dense", "qwen3-4b-0.86"), pair, strict=True)
    ]
    (tmp_path / "step.json").write_text(json.dumps({"results": rows}))
    known = ["rates.layer_us=48.3", "rates.selection_us=16.8"]
    for case in run(tmp_path, f"measured=[{{path: {tmp_path}/step.json, model: 4b}}]", *known)["measured"]:
        assert case["predicted_s"] == pytest.approx(case["measured_s"], rel=0.125)


def test_the_search_prints_a_schedule_for_each_page_size(tmp_path, capsys):
    surface = tmp_path / "surface.csv"
    rows = [
        f"{page},{start},{pages},{p5},{p5},{p5},5000"
        for page, worse in ((16, 0.0), (32, 0.02), (64, 0.2))
        for start in range(0, 10_000, 2000)
        for pages, p5 in ((64 * 16 // page, 0.86 - worse), (128 * 16 // page, 0.92 - worse))
    ]
    surface.write_text("page_size,bin_start,budget_pages,p5,p5_low,p5_high,tokens\n" + "\n".join(rows))
    search = f"search={{surfaces: [{surface}], cache: qwen3-4b-0.86, criterion: {{tau: 0.85}}, allow_foreign: true}}"
    by_page = {choice["page_size"]: choice["pages"] for choice in run(tmp_path, search)["schedules"]}
    assert set(by_page[16]) == {64} and set(by_page[32]) == {64}, "1,024 tokens hold on 16, 2,048 on 32"
    printed = capsys.readouterr().out
    assert printed.index("page   16") < printed.index("page   32") < printed.index("none: surface of page size 64")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["~caches.0"], "one must be called dense"),
        (["workload.longest=100"], "must ascend"),
        (["measured=[{path: none.json, model: 4b}]"], "none.json"),
        (
            ["measured=[{path: FOLDER/rows.json, model: 4b}]"],
            "rows.json: results[0].ms: 'fast' must be a number above 0",
        ),
        (["search={surfaces: [a.csv], cache: other, criterion: {tau: .9}}"], "search.cache: 'other'"),
        (["search={surfaces: [], cache: qwen3-4b-0.86, criterion: {tau: .9}}"], "search.surfaces: [] names no file"),
        (["search={surfaces: [FOLDER/rows.json], cache: qwen3-4b-0.86, criterion: {tau: .9}}"], "rows.json: line 1: "),
        (["output_dir=FOLDER/rows.json/deeper"], "rows.json/deeper cannot be made: Not a directory"),
        (["contexts=[4096,40961]"], "contexts: 40961 is above max_position_embeddings 40960"),
        (["workload.prompt=32000"], "prompt 32000 and longest 9000 are above max_position_embeddings 40960"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, overrides, words):
    (tmp_path / "rows.json").write_text(json.dumps({"results": [STEPS[0] | {"ms": "fast"}]}))
    overrides = [override.replace("FOLDER", str(tmp_path)) for override in overrides]
    assert sparrow_cost.main(["--config", "qwen3_4b_cost", f"output_dir={tmp_path}", *SMALL, *overrides]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
