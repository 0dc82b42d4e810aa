"""Preparing the sets of programs: from their published columns to tests that their own solutions pass."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

from .prepare_sets import prepare, question_of, results, write

TACO = [
    {
        "question": "Add two numbers.",
        "solutions": json.dumps(["pass  # wrong", "pass  # right"]),
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}),
        "difficulty": "EASY",
        "url": None,
    },
    {
        "question": "Double it.",
        "solutions": json.dumps(["def double(x):\n    return 2 * x"]),
        "starter_code": "",
        "input_output": json.dumps({"fn_name": "double", "inputs": [[1], [[2]]], "outputs": [[2], [[2, 2]]]}),
        "difficulty": "EASY",
        "url": "u",
    },
    {
        "question": "Nobody solved it.",
        "solutions": json.dumps(["pass"]),
        "starter_code": "",
        "input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]}),
        "difficulty": "HARD",
        "url": None,
    },
    {
        "question": "No tests.",
        "solutions": "[]",
        "starter_code": "",
        "input_output": json.dumps({"inputs": [], "outputs": []}),
        "difficulty": "HARD",
        "url": None,
    },
    {
        "question": "Deep.",
        "solutions": "[]",
        "starter_code": "",
        "input_output": '{"fn_name": "f", "inputs": [' + "[" * 3000 + "]" * 3000 + '], "outputs": [1]}',
        "difficulty": "",
        "url": None,
    },
    {"question": "Broken.", "solutions": "[]", "starter_code": "", "input_output": "{", "difficulty": "", "url": None},
]


def test_taco(folder: Path) -> None:
    write(folder / "copy" / "ALL" / "train-00000-of-00009.parquet", TACO)
    assert prepare("taco", folder / "copy") == 0
    rows, manifest = results()
    assert rows[0]["tests"] == {"style": "stdin", "inputs": ["1 2\n", "3\n4"], "outputs": ["3\n", "7"]}
    assert rows[1]["tests"] == {
        "style": "call",
        "entry_point": "double",
        "inputs": [[1], [[2]]],
        "outputs": [2, [2, 2]],
    }
    assert "standard input" in question_of(rows[0])
    assert "called `double`" in question_of(rows[1]) and "def double(...):" in question_of(rows[1])
    assert [(drop["id"], drop["reason"]) for drop in manifest["dropped"]] == [
        ("taco-000003", "unusable"),
        ("taco-000004", "unusable"),
        ("taco-000005", "unusable"),
        ("taco-000002", "solution"),
    ]
    assert prepare("taco", folder / "copy", "solutions=0", "gold.max_tests=1") == 0
    assert [len(row["tests"]["inputs"]) for row in results()[0]] == [1, 1, 1]


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def private(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(cases))).decode()


def contest(question: str, public: list[dict[str, str]], hidden: str, **more: Any) -> dict[str, Any]:
    row = {"question_title": "T", "question_content": question, "platform": "leetcode", "question_id": question[:3]}
    row |= {"contest_date": "2024-09-01T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}"}
    return row | {"public_test_cases": json.dumps(public), "private_test_cases": hidden} | more


STDIN = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
CALL = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def test_livecodebench(folder: Path) -> None:
    starter = "class Solution:\n    def shift(self, x, by):\n        "
    called = {"starter_code": starter, "metadata": json.dumps({"func_name": "shift"})}
    given = [
        contest("p1 plain", STDIN, private(json.dumps(STDIN))),
        contest("p2 call", CALL, private(json.dumps(CALL)), **called),
        contest("p3 plain JSON", STDIN, json.dumps(STDIN)),
        contest("p4 harmful", STDIN, private(Harmful())),
        contest("p5 a list, not text", STDIN, private([1])),
        contest("p6 not base64", STDIN, "!"),
        contest("p7 both", STDIN, private(json.dumps(CALL))),
        contest("p8 early", STDIN, private(json.dumps(STDIN)), contest_date="2024-01-01T00:00:00"),
        contest("p9 no name", CALL, private(json.dumps(CALL))),
        contest("p0 no date", STDIN, private(json.dumps(STDIN)), contest_date="soon"),
    ]
    write(folder / "test6.jsonl", given)
    assert prepare("livecodebench", folder / "test6.jsonl", "gold.first_date=2024-08-01") == 0
    rows, manifest = results()
    assert not Path("harmed").exists()
    assert [row["id"] for row in rows] == ["p1 ", "p2 ", "p3 "]
    assert rows[0]["tests"] == {"style": "stdin", "inputs": ["1\n", "1\n"], "outputs": ["2\n", "2\n"]}
    assert rows[1]["tests"] == {
        "style": "call",
        "entry_point": "shift",
        "inputs": [[[1, 2], 3]] * 2,
        "outputs": [[4, 5]] * 2,
    }
    assert rows[1]["starter_code"] == starter and starter.strip() in question_of(rows[1])
    details = {drop["id"]: drop["detail"] for drop in manifest["dropped"]}
    assert manifest["counts"]["dates"] == 1 and manifest["counts"]["unusable"] == len(details) - 1
    assert "no day: 'soon'" in details["p0 "]
    assert "more than one string" in details["p4 "] and "more than one string" in details["p5 "]
    assert "private_test_cases" in details["p6 "] and "neither stdin nor functional" in details["p7 "]
    assert "outside" in details["p8 "] and "func_name" in details["p9 "]


HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def half(x):\n    """Half of it."""\n',
        "canonical_solution": "    return x / 2\n",
        "entry_point": "half",
        "base_input": [[1], [2]],
        "plus_input": [[3]],
        "atol": 0,
    },
    {
        "task_id": "HumanEval/1",
        "prompt": "def as_set(x):\n",
        "canonical_solution": "    return {1: set(x)} if x else object()\n",
        "entry_point": "as_set",
        "base_input": [[[1]], [[]]],
        "plus_input": [],
        "atol": 0,
    },
    {
        "task_id": "HumanEval/32",
        "prompt": "def find_zero(x):\n",
        "canonical_solution": "    return 0\n",
        "entry_point": "find_zero",
        "base_input": [[[1]]],
        "plus_input": [],
        "atol": 0,
    },
]
SOLVER = "gold.solver={_component_: prepare_parts.Local}"


def test_humaneval_plus(folder: Path) -> None:
    write(folder / "HumanEvalPlus.jsonl", HUMANEVAL)
    assert prepare("humaneval_plus", folder / "HumanEvalPlus.jsonl", SOLVER) == 0
    rows, manifest = results()
    assert [row["id"] for row in rows] == ["HumanEval/0"]
    assert rows[0]["tests"] == {
        "style": "call",
        "entry_point": "half",
        "inputs": [[1], [2], [3]],
        "outputs": [0.5, 1.0, 1.5],
        "tolerance": 1e-6,
    }
    assert HUMANEVAL[0]["prompt"] in question_of(rows[0])
    details = {drop["id"]: drop["detail"] for drop in manifest["dropped"]}
    assert "object object" in details["HumanEval/1"] and "any root" in details["HumanEval/32"]
    assert Path("closed").exists()


def test_mbpp_plus(folder: Path) -> None:
    task = {
        "task_id": "Mbpp/6",
        "prompt": '"""\nAdd them.\nassert add(1, 2) == 3\n"""\n',
        "canonical_solution": "\ndef add(a, b):\n    return a + b\n",
        "entry_point": "add",
        "base_input": [[1, 2]],
        "plus_input": [[3, 4]],
        "atol": 0,
    }
    other = task | {"task_id": "Mbpp/2", "entry_point": "similar_elements", "prompt": '"""\nOther.\n"""\n'}
    pairs = task | {
        "task_id": "Mbpp/7",
        "prompt": '"""\nSwap.\nassert swap([(1, 2)]) == {2: 1}\n"""\n',
        "canonical_solution": "\ndef swap(x):\n    return {value: key for key, value in set(x)}\n",
        "entry_point": "swap",
        "base_input": [[[[1, 2]]]],
        "plus_input": [[[]]],
    }
    write(folder / "MbppPlus.jsonl", [task, other, pairs])
    assert prepare("mbpp_plus", folder / "MbppPlus.jsonl", SOLVER) == 0
    rows, manifest = results()
    assert [row["tests"] for row in rows] == [
        {"style": "call", "entry_point": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]},
        {
            "style": "call",
            "entry_point": "swap",
            "inputs": [[[{"!tuple": [1, 2]}]], [[]]],
            "outputs": [{"!dict": [[2, 1]]}, {}],
        },
    ]
    assert manifest["counts"]["unusable"] == 1
