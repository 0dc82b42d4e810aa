"""Budget schedules against the paper's tables, written out here once more in their compressed notation."""

from __future__ import annotations

import importlib.resources
import math
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.budget import FixedBudget, RatioBudget, StepSchedule, StepTable
from sparrow.components.schedule_file import read_schedule
from sparrow.components.tail_controller import TailController
from sparrow.errors import UserError
from sparrow.protocols import BudgetSchedule, RunSettings

# Released tables of arXiv 2606.08446; 8B 0.86 with 384 for the misprinted 388.
TABLES = {
    "qwen3-1.7b-0.75": "32×2 48×2 64×2 80×2 96×12",
    "qwen3-1.7b-0.80": "32 48 64 80 96×2 128×3 160×11",
    "qwen3-1.7b-0.86": "32 64 96×2 128 160 192 224×2 256×11",
    "qwen3-1.7b-0.92": "64 128 192 224 256 320 384×2 448 512×11",
    "qwen3-4b-0.75": "32×4 48 64 80 96 128×4 160×6 192×2",
    "qwen3-4b-0.80": "32×2 48 64 80 96 128 160×3 192 224×9",
    "qwen3-4b-0.86": "32 48 64 80 96 128 160 224 256×2 320×4 384×4 512×2",
    "qwen3-4b-0.92": "48 96 160 192 256 384 448 768 896 1024×2 1152×9",
    "qwen3-8b-0.75": "32×3 48×2 80×3 96×4 128×6 160×2",
    "qwen3-8b-0.80": "32×2 48 64 80 96 128×2 160×2 192×3 224×4 256×3",
    "qwen3-8b-0.86": "32 48 64 80 128 160 192 256×4 320×6 384 448×2",
    "qwen3-8b-0.92": "48 96 128 192 256 448 512 640 768×3 896×5 1024×4",
    "qwen3-14b-0.86": "32 48 80 128 256 384×10 512 640×2 896×2",
}
THE_RUN = RunSettings(
    model="Qwen3-4B",
    page_size=16,
    selector="CentroidSelector",
    sink_pages=1,
    recent_pages=2,
    dense_layers=2,
    temperature=1.0,
    estimator="top_20",
)


def expand(text: str) -> list[int]:
    words = [word.partition("×") for word in text.split()]
    return [int(pages) for pages, _, times in words for _ in range(int(times or 1))]


def edited(tmp_path: Path, **changes: Any) -> str:
    """A copy of the 4B schedule with some keys changed, or removed where the value is None."""
    released = read_schedule("qwen3-4b-0.86")
    node = {key: value for key, value in (vars(released) | changes).items() if value is not None}
    file = tmp_path / "edited.yaml"
    file.write_text(yaml.safe_dump(node))
    return str(file)


@pytest.mark.parametrize("name", TABLES)
def test_packaged_schedule_is_the_released_table(name: str) -> None:
    schedule = StepSchedule(name)
    entries = expand(TABLES[name])
    assert len(entries) == 20
    lengths = torch.arange(0, 60_000, 125)
    expected = torch.tensor([entries[min(int(length) // 2000, 19)] for length in lengths])
    assert torch.equal(schedule.pages(lengths), expected)
    assert schedule.max_pages == max(entries)
    model, _, tau = name.rpartition("-")
    assert schedule.provenance is not None
    assert (schedule.provenance.model, schedule.provenance.tau) == (model, float(tau))
    assert (schedule.provenance.source, schedule.provenance.estimator) == ("released", "top_20")


def test_every_packaged_schedule_is_listed_here_or_says_where_it_is_from() -> None:
    folder = importlib.resources.files("sparrow.recipes").joinpath("configs", "schedules")
    names = {Path(file.name).stem for file in folder.iterdir()}
    assert names == {*TABLES, "qwen3-0.6b-0.86", "smollm2-135m-instruct-0.86", "smollm2-135m-instruct-0.91"}
    borrowed = read_schedule("qwen3-0.6b-0.86")
    assert borrowed.source == "borrowed from qwen3-1.7b, not calibrated"
    assert borrowed.pages == read_schedule("qwen3-1.7b-0.86").pages
    assert read_schedule("smollm2-135m-instruct-0.91").source == "calibrated"


def test_edges_of_the_bins() -> None:
    schedule = StepSchedule(pages=[4, 6, 6, 9], bin_width=100)
    lengths = torch.tensor([[0, 99, 100], [299, 300, 10**9]], dtype=torch.int32)
    pages = schedule.pages(lengths)
    assert pages.tolist() == [[4, 4, 6], [6, 9, 9]]
    assert pages.dtype == torch.int64


@given(
    entries=st.lists(st.integers(1, 2000), min_size=1, max_size=30),
    bin_width=st.integers(1, 5000),
    lengths=st.lists(st.integers(0, 200_000), max_size=50),
)
def test_any_monotone_schedule_looks_up_its_bin(entries: list[int], bin_width: int, lengths: list[int]) -> None:
    entries.sort()
    schedule = StepSchedule(pages=entries, bin_width=bin_width)
    expected = [entries[min(length // bin_width, len(entries) - 1)] for length in lengths]
    assert schedule.pages(torch.tensor(lengths, dtype=torch.int64)).tolist() == expected


def test_fixed_budget() -> None:
    budget = FixedBudget(pages=256)
    pages = budget.pages(torch.tensor([0, 5, 10**6], dtype=torch.int32))
    assert (pages.tolist(), pages.dtype, budget.max_pages) == ([256] * 3, torch.int64, 256)
    assert budget.check(THE_RUN) == []
    with pytest.raises(UserError, match="2, fewer than the 3 sink and recent"):
        FixedBudget(pages=2).check(THE_RUN)


@pytest.mark.parametrize("pages", [0, -3, True, 2.0])
def test_fixed_budget_refuses(pages: Any) -> None:
    with pytest.raises(UserError, match="FixedBudget: pages must be a whole number"):
        FixedBudget(pages=pages)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "exactly one of"),
        ({"path": "qwen3-4b-0.86", "pages": [3]}, "beside pages, .* by ~kv_cache.budget.pages$"),
        (
            {"path": "qwen3-4b-0.86", "pages": [3], "bin_width": 100},
            "beside pages and bin_width, .* by ~kv_cache.budget.pages ~kv_cache.budget.bin_width$",
        ),
        ({"pages": []}, "pages is empty"),
        ({"pages": [3, 4], "bin_width": 0}, "bin_width must be a whole number"),
        ({"pages": [8, 8, 7], "bin_width": 50}, r"pages\[2\] \(from cached length 100\) is 7, below the 8"),
        ({"pages": [8, 0]}, r"pages\[1\] \(from cached length 2000\) must be a whole number of at least 1, got 0"),
        ({"path": "qwen3-4b-0.68"}, "no schedule is called 'qwen3-4b-0.68', did you mean 'qwen3-4b-0.86'"),
        ({"path": "nowhere/at_all.yaml"}, "nowhere/at_all.yaml: not readable as YAML"),
    ],
)
def test_arguments_that_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StepSchedule(**kwargs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pagse": [3]}, "unknown key 'pagse', did you mean 'pages'"),
        ({"sink_pages": None, "tau": None}, "missing tau, sink_pages"),
        ({"pages": [32, 48.5] + [64] * 18}, r"pages\[1\] \(from cached length 2000\) .* got 48.5"),
        ({"pages": "32 48"}, "pages must be a list"),
        ({"pages": [32] * 19}, "a released schedule has 20 entries, this has 19"),
        ({"pages": [64] * 19 + [48]}, r"pages\[19\] \(from cached length 38000\) is 48, below the 64"),
        ({"tau": 1.5}, "tau must be a number above 0 and at most 1.0, got 1.5"),
        ({"temperature": True}, "temperature must be a number"),
        ({"estimator": "top20"}, "estimator must be one of top_20, exact, got 'top20'"),
        ({"dense_layers": -1}, "dense_layers must be a whole number of at least 0, got -1"),
        ({"model": 4}, "model must be a name, got 4"),
        ({"model": "qwen3-5b"}, "model 'qwen3-5b' is none of the released ones, qwen3-1.7b, "),
        ({"model": "org/qwen3-4b", "source": "calibrated"}, "model 'org/qwen3-4b' matches no checkpoint"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = edited(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        StepSchedule(file)
    assert file in str(error.value)


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "pages: [1\n", "model: a\nmodel: b\n", "\tx"])
def test_broken_yaml_names_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=r"broken\.yaml"):
        StepSchedule(str(file))


def test_dips_and_other_lengths_where_they_are_allowed(tmp_path: Path) -> None:
    file = edited(tmp_path, pages=[9, 7, 8], source="calibrated here")
    assert StepSchedule(file, allow_dips=True).max_pages == 9


def test_matching_run_passes_and_each_difference_is_refused_or_listed() -> None:
    name = "qwen3-4b-0.86"
    assert StepSchedule(name).check(THE_RUN) == []
    assert StepSchedule(name).check(replace(THE_RUN, model="/models/Qwen3-4B/", selector="centroid")) == []
    others = {
        "model": "qwen3-8b",
        "page_size": 8,
        "selector": "HeadSoftmaxSelector",
        "sink_pages": 0,
        "recent_pages": 3,
        "dense_layers": 0,
        "temperature": 0.6,
        "estimator": "exact",
    }
    assert [*others, "tau", "architecture", "weights", "adapter"] == [field.name for field in fields(RunSettings)]
    for key, value in others.items():
        other = replace(THE_RUN, **{key: value})
        with pytest.raises(UserError, match=f"schedule {name}: {key} is .*allow_foreign"):
            StepSchedule(name).check(other)
        differences = StepSchedule(name, allow_foreign=True).check(other)
        assert len(differences) == 1
        assert differences[0].startswith(f"{key} is ")


def test_the_refusal_of_an_estimator_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set acceptance\.estimator: top_k"):
        StepSchedule("qwen3-4b-0.86").check(replace(THE_RUN, estimator="exact"))
    with pytest.raises(UserError, match=r"set acceptance\.estimator: exact"):
        StepSchedule(edited(tmp_path, estimator="exact")).check(THE_RUN)


def test_arguments_of_a_selector_have_to_agree(tmp_path: Path) -> None:
    selector = "SegmentSoftmaxSelector(landmarks_per_page=2)"
    schedule = StepSchedule(edited(tmp_path, selector=selector, source="calibrated"))
    assert schedule.check(replace(THE_RUN, selector=selector)) == []
    with pytest.raises(UserError, match=r"selector is 'Seg.*=2\)' in the schedule, 'Seg.*=4\)' in this run"):
        schedule.check(replace(THE_RUN, selector=selector.replace("2", "4")))


def test_the_name_of_every_save_says_nothing_but_the_architecture_does(tmp_path: Path) -> None:
    figures = {"architecture": "qwen3, 4 layers", "weights": "aa"}
    for name, run_name, fits in [
        ("model", "tiny_sft/model", True),
        ("base", "steps/7/model", True),
        ("model", "base", True),
        ("base", "base-instruct", False),
    ]:
        schedule = StepSchedule(edited(tmp_path, model=name, source="calibrated", **figures))
        run = replace(THE_RUN, model=run_name, **figures)
        if not fits:
            with pytest.raises(UserError, match="model is 'base' in the schedule, 'base-instruct' in this run"):
                schedule.check(run)
            continue
        assert schedule.check(run) == []
        with pytest.raises(UserError, match="architecture is 'qwen3, 4 layers' in the schedule, 'qwen3, 5"):
            schedule.check(replace(run, architecture="qwen3, 5 layers"))
    nothing_known = replace(THE_RUN, model="elsewhere/model")
    with pytest.raises(UserError, match="model is 'base'"):
        schedule.check(nothing_known)


def test_another_adapter_is_said_and_not_refused(tmp_path: Path) -> None:
    """The same one in another folder is none other; a schedule that was measured without one says nothing of it."""
    schedule = StepSchedule(edited(tmp_path, source="calibrated", adapter="adapter, weights aa"))
    assert schedule.check(replace(THE_RUN, adapter="copy, weights aa")) == []
    for adapter, shown in ((None, "none"), ("adapter, weights bb", "adapter, weights bb"), ("trained", "trained")):
        (note,) = schedule.check(replace(THE_RUN, adapter=adapter))
        assert (
            note.startswith("adapter is 'adapter, weights aa' in the schedule") and f"and {shown} in this run" in note
        )
    assert StepSchedule("qwen3-4b-0.86").check(replace(THE_RUN, adapter="adapter, weights aa")) == []


def test_another_tau_and_other_weights_are_said_and_not_refused(tmp_path: Path) -> None:
    schedule = StepSchedule(edited(tmp_path, source="calibrated", architecture="a", weights="aa"))
    notes = schedule.check(replace(THE_RUN, tau=0.9, architecture="a", weights="bb"))
    assert notes[0] == "tau is 0.86 in the schedule, 0.9 in this run" and notes[1].startswith("weights are not those")
    assert schedule.check(replace(THE_RUN, tau=0.86, architecture="a", weights="aa")) == []


def test_names_in_a_file_may_be_spelt_as_the_checkpoint_and_the_class_are(tmp_path: Path) -> None:
    file = edited(tmp_path, model="Qwen3-4B", selector="CentroidSelector", source="calibrated")
    assert StepSchedule(file).check(THE_RUN) == []


def test_inline_entries_have_no_provenance_to_differ() -> None:
    schedule = StepSchedule(pages=[3, 5])
    assert schedule.check(replace(THE_RUN, model="anything", estimator="exact")) == []
    with pytest.raises(UserError, match=r"pages\[0\] is 3, fewer than the 6"):
        schedule.check(replace(THE_RUN, sink_pages=4))


def test_reserved_pages_are_no_matter_of_provenance() -> None:
    with pytest.raises(UserError, match=r"pages\[0\] is 32, fewer than the 41"):
        StepSchedule("qwen3-4b-0.86", allow_foreign=True).check(replace(THE_RUN, recent_pages=40))


def test_ratio_budget_by_hand() -> None:
    budget = RatioBudget(share=0.1, minimum=3, maximum=6, page_size=4)
    lengths = torch.tensor([[0, 1, 120], [121, 124, 200], [240, 241, 10**9]], dtype=torch.int32)
    # 0, 1, 30 pages; 31, 31, 50; 60, 61, many. In floating point a tenth of 30 would round up to 4.
    pages = budget.pages(lengths)
    assert pages.tolist() == [[3, 3, 3], [4, 4, 5], [6, 6, 6]]
    assert (pages.dtype, budget.max_pages) == (torch.int64, 6)
    assert RatioBudget(share=1.0, minimum=3).pages(torch.tensor(1000)) == 63
    assert RatioBudget(share=0.5, minimum=3).check(THE_RUN) == []
    with pytest.raises(UserError, match="page_size 4 is not the 16 of the cache"):
        budget.check(THE_RUN)
    with pytest.raises(UserError, match="2, fewer than the 3 sink and recent"):
        RatioBudget(share=0.5, minimum=2).check(THE_RUN)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 100_000), st.integers(1, 64))
def test_ratio_budget_is_the_rounded_share(part: int, more: int, length: int, page_size: int) -> None:
    share = Fraction(part, part + more)
    expected = max(1, math.ceil(share * math.ceil(Fraction(length, page_size))))
    assert RatioBudget(float(share), 1, page_size=page_size).pages(torch.tensor(length)) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"share": 0.0, "minimum": 3}, "share must be above 0 and at most 1, got 0.0"),
        ({"share": 1.5, "minimum": 3}, "share must be .* got 1.5"),
        ({"share": 0.5, "minimum": 0}, "minimum must be a whole number of at least 1, got 0"),
        ({"share": 0.5, "minimum": 8, "maximum": 7}, "maximum must be a whole number of at least 8, got 7"),
        ({"share": 0.5, "minimum": 8, "page_size": 0}, "page_size must be"),
    ],
)
def test_ratio_budgets_that_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        RatioBudget(**kwargs)


@pytest.mark.parametrize(
    "budget",
    [
        FixedBudget(pages=7),
        RatioBudget(share=0.3, minimum=4, maximum=20, page_size=4),
        StepSchedule(pages=[4, 9, 6, 30], bin_width=37, allow_dips=True),
        TailController(StepSchedule(pages=[4, 9, 30], bin_width=37), grid=[4, 8, 16, 32]),
    ],
    ids=lambda budget: type(budget).__name__,
)
def test_no_length_reads_more_than_the_largest_budget_until_it(budget: BudgetSchedule) -> None:
    bounds = [budget.max_pages_until(length) for length in range(300)]
    largest = budget.pages(torch.arange(300)).cummax(0).values.tolist()
    if isinstance(budget, TailController):  # what it may become, not only what it is
        assert bounds == [32] * 300 and max(largest) <= 32
    else:
        assert bounds == largest
    assert max(bounds) <= budget.max_pages


def test_entries_are_replaced_where_a_captured_graph_reads_them() -> None:
    table = StepTable([4, 8], bin_width=10)
    first = table.pages(torch.tensor([3, 30]))
    held_N = table._tables_N[torch.device("cpu")]
    table.replace([5, 9])
    assert table._tables_N[torch.device("cpu")] is held_N and held_N.tolist() == [5, 9]
    assert (first.tolist(), table.pages(torch.tensor([3, 30])).tolist()) == ([4, 8], [5, 9])
