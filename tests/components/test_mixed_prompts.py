"""Data sets together: all examples, or shares of a stream."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.arithmetic import ArithmeticProblems
from sparrow.components.data import FiniteData, JsonlPrompts
from sparrow.components.mixed_prompts import ConcatenatedPrompts, WeightedPrompts
from sparrow.components.pointer_chase import PointerChase
from sparrow.config import Component, load_config
from sparrow.errors import UserError


def part(tmp_path: Path, name: str, count: int, **columns: object) -> JsonlPrompts:
    file = tmp_path / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{name}{i}", **columns}) + "\n" for i in range(count)))
    return JsonlPrompts(str(file))


def prompts(data: ConcatenatedPrompts | WeightedPrompts, start: int, stop: int) -> list[object]:
    return [data.example(index).prompt for index in range(start, stop)]


def test_concatenation_has_all_examples_and_all_columns(tmp_path: Path) -> None:
    data = ConcatenatedPrompts([part(tmp_path, "a", 2, answer="1"), part(tmp_path, "b", 1, level=3)])
    assert prompts(data, 0, 4) == ["a0", "a1", "b0", "a0"]
    assert [example.columns for example in data.examples()] == [
        {"answer": "1", "level": None},
        {"answer": "1", "level": None},
        {"answer": None, "level": 3},
    ]
    shuffled = ConcatenatedPrompts([part(tmp_path, "a", 20), part(tmp_path, "b", 20)], shuffle_seed=1)
    first, second = prompts(shuffled, 0, 40), prompts(shuffled, 40, 80)
    assert first != second and sorted(map(str, first)) == sorted(map(str, second))


def test_concatenation_drops_what_stands_in_two_parts(tmp_path: Path) -> None:
    same, other = part(tmp_path, "a", 2, answer="1"), part(tmp_path, "A", 3, answer="1")
    data = ConcatenatedPrompts([same, other])
    assert prompts(data, 0, 3) == ["a0", "a1", "A2"]
    assert data.notes == ["all parts: 2 repeated prompts left out"]
    assert ConcatenatedPrompts([same, other], deduplicate=False).size == 5


def test_concatenation_wants_an_end(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"parts\.1: ArithmeticProblems has no end"):
        ConcatenatedPrompts([part(tmp_path, "a", 2), ArithmeticProblems()])  # type: ignore[list-item]
    stream = WeightedPrompts([part(tmp_path, "a", 2), ArithmeticProblems()], [1.0, 1.0])
    with pytest.raises(UserError, match=r"parts\.1: WeightedPrompts has no end"):
        ConcatenatedPrompts([part(tmp_path, "b", 2), stream])
    with pytest.raises(UserError, match="parts: at least one"):
        ConcatenatedPrompts([])


def test_shares_hold_in_every_block_and_no_example_is_skipped(tmp_path: Path) -> None:
    data = WeightedPrompts([part(tmp_path, "a", 7), part(tmp_path, "b", 300)], [3.0, 1.0], block=8)
    for start in range(0, 80, 8):
        assert Counter(str(p)[0] for p in prompts(data, start, start + 8)) == {"a": 6, "b": 2}
    drawn = [str(p) for p in prompts(data, 0, 80)]
    assert [p for p in drawn if p[0] == "b"] == [f"b{i}" for i in range(20)]
    assert [p for p in drawn if p[0] == "a"] == [f"a{i % 7}" for i in range(60)]
    # Any order of asking gives the same, and the blocks differ.
    assert prompts(data, 40, 48) == drawn[40:48]
    assert len({tuple(p[0] for p in drawn[start : start + 8]) for start in range(0, 80, 8)}) > 1


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6), st.integers(6, 50))
def test_shares_are_the_weights_up_to_rounding(weights: list[float], block: int) -> None:
    parts = [PointerChase(nodes=5, hops=2, seed=seed) for seed in range(len(weights))]
    data = WeightedPrompts(parts, weights, 0, block)
    counts = data._counts
    assert sum(counts) == block and min(counts) >= 1
    exact = [block * weight / sum(weights) for weight in weights]
    below_one = sum(share < 1 for share in exact)
    assert all(abs(count - share) <= 1 + below_one for count, share in zip(counts, exact, strict=True))


def test_the_stream_does_not_change_with_versions(tmp_path: Path) -> None:
    data = WeightedPrompts([part(tmp_path, "a", 9), part(tmp_path, "b", 9)], [1.0, 1.0], seed=3, block=6)
    stream = " ".join(map(str, prompts(data, 0, 12)))
    assert stream == "a0 a1 b0 a2 b1 b2 b3 a3 a4 a5 b4 b5"


def test_finite_parts_of_a_stream_can_be_checked(tmp_path: Path) -> None:
    data = WeightedPrompts(
        [part(tmp_path, "a", 3, level=1), ArithmeticProblems(), part(tmp_path, "b", 3)], [1.0, 1.0, 1.0], block=3
    )
    assert isinstance(data, FiniteData) and data.size is None
    assert [example.prompt for example in data.examples()] == ["a0", "a1", "a2", "b0", "b1", "b2"]
    data.drop({1, 3})
    assert {str(p) for p in prompts(data, 0, 30) if isinstance(p, str)} == {"a0", "a2", "b1", "b2"}
    assert all(set(data.example(index).columns) == {"level", "answer"} for index in range(9))
    with pytest.raises(UserError, match=r"parts\.2: none of its 2 examples is left"):
        data.drop({2, 3})


@dataclass
class Schema:
    data: Component


def test_parts_are_nodes_of_a_config(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    part(tmp_path, "b", 3, question="q", answer="1")
    (tmp_path / "run.yaml").write_text(f"""
data:
  _component_: sparrow.components.mixed_prompts.WeightedPrompts
  weights: [1, 3]
  block: 4
  parts:
    - {{_component_: sparrow.components.data.JsonlPrompts, path: {tmp_path}/a.jsonl}}
    - _component_: sparrow.components.mixed_prompts.ConcatenatedPrompts
      parts:
        - _component_: sparrow.components.dataset_prompts.DatasetPrompts
          path: {tmp_path}/b.jsonl
          template: "{{question}} {{prompt}}"
          columns: {{answer: answer}}
""")
    data = load_config(Schema, str(tmp_path / "run.yaml")).data.build()
    assert sorted(map(str, prompts(data, 0, 4))) == ["a0", "q b0", "q b1", "q b2"]


@pytest.mark.parametrize(
    ("weights", "block", "message"),
    [
        ([1.0], 10, "weights"),
        ([1.0, 0.0], 10, "weights"),
        ([1.0, float("nan")], 10, "weights"),
        (["1", 2.0], 10, "weights"),
        ([True, 2.0], 10, "weights"),
        ([None, 2.0], 10, "weights"),
        ([1.0, 1.0], 1, "block"),
    ],
)
def test_bad_shares(tmp_path: Path, weights: list[Any], block: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        WeightedPrompts([part(tmp_path, "a", 3), part(tmp_path, "b", 3)], weights, block=block)
