"""Dashboards know metrics by name: what runs log is exactly the list kept here, and all of it is in docs/metrics.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DOCS = (HERE.parents[1] / "docs" / "metrics.md").read_text()
EVERYTHING = [
    "steps=2",
    "validation.every=1",
    "validation.num_samples=4",
    "kl_coef=0.01",
    "distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001, rank: 4}",
    "kv_cache.budget._component_=sparrow.components.tail_controller.TailController",
    "kv_cache.budget.start._component_=sparrow.components.budget.StepSchedule",
    "kv_cache.budget.start.pages=[5,6,7]",
    "kv_cache.budget.start.bin_width=20",
    "kv_cache.budget.grid=[5,6,7,8]",
    "checkpoint_every=1",
]


def pattern(name: str) -> str:
    """`acceptance/p5_bin/32` -> `acceptance/p5_bin/<n>`; a reward's own name is `<function>`."""
    name = re.sub(r"/\d+$", "/<n>", name)
    return re.sub(r"^rewards/(?!not_applicable)[^/]+/", "rewards/<function>/", name)


def logged(rows: list[dict[str, Any]]) -> set[str]:
    return {pattern(name) for row in rows for name in row if name != "step"}


def documented() -> set[str]:
    """The names in the first column of the tables, `{a,b}` written out, with their `_bin` where a * says so."""
    names = set()
    for line in DOCS.splitlines():
        cell = line.split("|")[1] if line.startswith("| `") else ""
        for name, starred in re.findall(r"`([^`]+)`( \*)?", cell):
            for one in _alternatives(name):
                one = re.sub(r"<(start|cell)>", "<n>", one)
                names |= {one, f"{one}_bin/<n>"} if starred else {one}
    return names


def _alternatives(name: str) -> list[str]:
    found = re.search(r"\{([^}]+)\}", name)
    if found is None:
        return [name]
    return [one for part in found[1].split(",") for one in _alternatives(name.replace(found[0], part, 1))]


def _is_documented(name: str, names: set[str]) -> bool:
    # @N and <phase> stand for whatever a run has there.
    loose = {re.sub(r"<\w+>", "<x>", re.sub(r"@[Nk]$", "@<x>", one)) for one in names}
    candidates = {name, re.sub(r"@\d+$", "@<x>", name), re.sub(r"(?<=^time_share/).+", "<x>", name)}
    candidates |= {re.sub(r"(?<=^alarm/).+", "<x>", name), re.sub(r"<\w+>", "<x>", name)}
    return bool(candidates & (names | loose))


def test_names_are_those_of_the_list_and_all_are_documented(grpo) -> None:
    names = logged(grpo(*EVERYTHING))
    kept = set((HERE / "metric_names.txt").read_text().split())
    assert names == kept, (
        "a metric that is gone or renamed breaks dashboards; say so in CHANGELOG.md, and change the list"
    )
    assert not [name for name in sorted(names) if not _is_documented(name, documented())]
