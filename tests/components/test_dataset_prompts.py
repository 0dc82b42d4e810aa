"""Prompts from published data sets: mapped columns, templates, verl's schema, duplicates, order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow.components.data import Example, FiniteData
from sparrow.components.dataset_prompts import DatasetPrompts, verl_prompts
from sparrow.errors import UserError

ROW = {"question": "1+1?", "meta": {"gold": "2", "tags": ["sum", "easy"]}, "level": 1}


def file_of(tmp_path: Path, *rows: dict[str, Any]) -> str:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def test_columns_are_mapped_by_dotted_paths(tmp_path: Path) -> None:
    columns = {"answer": "meta.gold", "tag": "meta.tags.0", "grade": "level", "note": "meta.note?"}
    data = DatasetPrompts(file_of(tmp_path, ROW), prompt="question", columns=columns)
    assert isinstance(data, FiniteData)
    assert data.example(0) == Example("1+1?", {"answer": "2", "tag": "sum", "grade": 1, "note": None})


def test_without_a_mapping_all_other_columns_go_on(tmp_path: Path) -> None:
    path = file_of(tmp_path, ROW, {"question": "b", "extra": 0})
    assert DatasetPrompts(path, prompt="question").example(0).columns == {
        "meta": ROW["meta"],
        "level": 1,
        "extra": None,
    }
    assert DatasetPrompts(path, prompt="question", columns={}).example(0).columns == {}


def test_a_name_with_a_dot_goes_before_a_path(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"a.b": "whole", "a": {"b": "part", "c.d": "inner"}})
    assert DatasetPrompts(path, prompt="a.b", columns={}).example(0).prompt == "whole"
    assert DatasetPrompts(path, prompt="a.c.d", columns={}).example(0).prompt == "inner"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("Q: {question}\n\\boxed{}", "Q: f{x}{question}\n\\boxed{}"),
        ("{meta.gold} {1} {} {{question}} { question }", "2 {1} {} {question} { question }"),
        ("\\frac{1}{2}{level}}", "\\frac{1}{2}1}"),
    ],
)
def test_only_names_in_braces_are_fields(tmp_path: Path, template: str, text: str) -> None:
    path = file_of(tmp_path, ROW | {"question": "f{x}{question}"})
    assert DatasetPrompts(path, template=template).example(0).prompt == text


def test_chat_and_system_make_messages(tmp_path: Path) -> None:
    path = file_of(tmp_path, ROW)
    user = {"role": "user", "content": "1+1?"}
    assert DatasetPrompts(path, prompt="question", chat=True).example(0).prompt == [user]
    system = {"role": "system", "content": "Be brief."}
    assert DatasetPrompts(path, template="{question}", system="Be brief.").example(0).prompt == [system, user]


VERL = {
    "prompt": [{"role": "user", "content": "1+1?"}],
    "data_source": "math_dapo",
    "ability": "MATH",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": "u-1", "split": "train"},
}


def test_verl_parquet(tmp_path: Path) -> None:
    rows = [VERL, VERL | {"prompt": [{"role": "user", "content": "2+2?"}], "extra_info": {"index": "u-2"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    data = verl_prompts(str(tmp_path))
    assert data.example(0).prompt == VERL["prompt"]
    assert data.example(0).columns == {
        "answer": "2",
        "source": "math_dapo",
        "ability": "MATH",
        "id": "u-1",
        "extra_info": {"index": "u-1", "split": "train"},
    }
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "data_source": "b"}]), tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"train.parquet, row 1: no column 'reward_model.ground_truth'"):
        verl_prompts(str(tmp_path))


def test_duplicates_go_and_conflicts_go_all(tmp_path: Path) -> None:
    rows = [
        {"prompt": "Find $x$.", "answer": "1"},
        {"prompt": "find x .", "answer": " 1"},
        {"prompt": "Find\\, x.\n", "answer": "1", "level": 2},
        {"prompt": "y?", "answer": "3"},
        {"prompt": "Y?", "answer": "4"},
        {"prompt": "y ?", "answer": "3"},
        {"prompt": "z?", "answer": "5"},
    ]
    data = DatasetPrompts(file_of(tmp_path, *rows))
    assert [example.prompt for example in data.examples()] == ["Find $x$.", "z?"]
    assert [note.split(": ")[1] for note in data.notes] == [
        "2 repeated prompts left out",
        "3 prompts left out that stand with different answers",
    ]
    everything = DatasetPrompts(file_of(tmp_path, *rows), deduplicate=False)
    assert everything.size == 7 and everything.notes == []


def test_dropped_examples_leave_no_trace_in_the_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{index}"} for index in range(10)]
    data = DatasetPrompts(file_of(tmp_path, *rows), shuffle_seed=5)
    data.example(3)
    data.drop({2, 7})
    without = DatasetPrompts(file_of(tmp_path, *rows[:2], *rows[3:7], *rows[8:]), shuffle_seed=5)
    assert [data.example(index) for index in range(24)] == [without.example(index) for index in range(24)]
    with pytest.raises(UserError, match="none of 8 examples is left"):
        data.drop(set(range(8)))


SCRIPT = """
import sys
from sparrow.components.dataset_prompts import DatasetPrompts
data = DatasetPrompts(sys.argv[1], shuffle_seed=11)
print(" ".join(data.example(index).prompt for index in range(int(sys.argv[2]), int(sys.argv[3]))))
"""


def test_another_process_with_another_hash_seed_has_the_same_order(tmp_path: Path) -> None:
    path = file_of(tmp_path, *({"prompt": f"p{index}"} for index in range(9)))
    data = DatasetPrompts(path, shuffle_seed=11)
    here = [str(data.example(index).prompt) for index in range(27)]
    command = [sys.executable, "-c", SCRIPT, path, "5", "27"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == here[5:]
    # As other Python versions and machines have it.
    assert here[:9] == ["p6", "p4", "p3", "p0", "p7", "p8", "p2", "p5", "p1"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt": "questions"}, "line 1: no column 'questions', did you mean 'question'?"),
        ({"prompt": "meta.gold.x"}, "line 1: no column 'meta.gold.x'; there are 'question', 'meta', 'level'"),
        ({"prompt": "meta.tags.2"}, "no column 'meta.tags.2'"),
        ({"prompt": "level"}, "line 1: level: the prompt must be text or a list of {role, content} messages, not 1"),
        ({"template": "{questio}"}, "line 1: template: no column 'questio', did you mean 'question'?"),
        ({"template": "{meta}"}, "line 1: template: {meta} is no text but"),
        ({"prompt": "question", "template": "{question}"}, "prompt and template: one of them"),
        ({"prompt": "question", "columns": {"truncated": "level"}}, "columns: no column may be called 'truncated'"),
        ({"prompt": "question", "columns": {"answer": "gold"}}, "line 1: no column 'gold'"),
        ({"prompt": "question", "limit": 0}, "limit must be at least 1, got 0"),
        ({"prompt": "messages"}, "no column 'messages'"),
    ],
)
def test_mistakes_name_row_and_column(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        DatasetPrompts(file_of(tmp_path, ROW), **keys)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["completions", "prompts", "completion_lengths", "truncated"])
def test_columns_that_the_run_needs_itself_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"line 1: no column may be called '{name}'.*rename"):
        DatasetPrompts(file_of(tmp_path, ROW | {name: 1}), prompt="question")


def test_messages_stay_messages(tmp_path: Path) -> None:
    path = file_of(tmp_path, VERL)
    assert DatasetPrompts(path, columns={}).example(0).prompt == VERL["prompt"]
    with pytest.raises(UserError, match="holds messages already"):
        DatasetPrompts(path, columns={}, system="Be brief.")
