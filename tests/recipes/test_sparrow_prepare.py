"""Preparing published data sets: every config end to end on rows of our own in the published schema."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sparrow import registry
from sparrow.components.data import JsonlPrompts
from sparrow.recipes import sparrow_prepare

# A reward whose answers must be shorter than 30 characters, and programs that are run here, as these tests wrote them.
PARTS = """
import time

from sparrow.sandbox.inside import values


class Short:
    name, weight = "short", 1.0

    def __call__(self, completions, /, tests=None, **columns):
        scores = []
        for completion, test in zip(completions, tests, strict=True):
            names = {}
            exec(completion.removeprefix("```python").removesuffix("```"), names)
            if test["style"] == "stdin":
                scores.append(1.0 if "right" in completion else 0.0)
                continue
            call = names[test["entry_point"]]
            results = [call(*args) for args in values.decode(test["inputs"])]
            scores.append(float(results == values.decode(test["outputs"])))
        return scores

    def problems(self, columns):
        assert len(columns["prompts"]) == len(columns["id"])
        answers = columns.get("answer", [""] * len(columns["id"]))
        return [None if len(answer) < 30 else "too long an answer" for answer in answers]


class Slow(Short):
    def problems(self, columns):
        open("started", "w").close()
        time.sleep(0.2)
        return super().problems(columns)


class Local:
    def call_function(self, program, entry_point, list_of_args):
        names = {}
        exec(program, names)
        return [names[entry_point](*args) for args in list_of_args]

    def close(self):
        open("closed", "w").close()
"""
LONG = "1+" * 20 + "1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user with components of their own."""
    (tmp_path / "prepare_parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "prepare_parts", raising=False)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(name: str, source: Path, *overrides: str) -> int:
    fixed = [f"source={source}", "reward={_component_: prepare_parts.Short}", "output=out.jsonl"]
    return sparrow_prepare.main(["--config", f"prepare/{name}", *fixed, *overrides])


def results() -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rows = [json.loads(line) for line in Path("out.jsonl").read_text(encoding="utf-8").splitlines()]
    return rows, json.loads(Path("out.jsonl.manifest.json").read_text(encoding="utf-8"))


def question_of(row: dict[str, Any]) -> str:
    return str(row["prompt"][-1]["content"])


VERL_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
VERL_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'


def verl(question: str, gold: str, index: str) -> dict[str, Any]:
    content = f"{VERL_PREFIX}{question}{VERL_SUFFIX}"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": gold, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def problem(text: str, answer: Any, **more: Any) -> dict[str, Any]:
    return {"problem": text, "answer": answer, **more}


# Per set: where the copy's file lies, its rows, answers that must come out, what is dropped and how often.
MATHEMATICS: dict[str, tuple[str, list[dict[str, Any]], list[str], dict[str, int]]] = {
    "gsm8k": (
        "main/test-00000-of-00001.parquet",
        [
            {"question": "A has {2} pens. How many?", "answer": "2 = <<2=2>>2\n#### 2"},
            {"question": "How many is 1,000 + 200?", "answer": "1,200\n#### $1,200"},
            {"question": "How warm is it?", "answer": "#### 5\n#### -1.50"},
            {"question": "No mark?", "answer": "so 4"},
            {"question": "No number?", "answer": "#### four"},
        ],
        ["2", "1200", "-1.50"],
        {"unusable": 2},
    ),
    "math_500": (
        "test.jsonl",
        [
            problem("$1/2$?", "\\frac{1}{2}", solution="", subject="Algebra", level=1, unique_id="test/algebra/1.json"),
            problem("Long?", LONG, solution="", subject="Algebra", level=5, unique_id="test/algebra/2.json"),
        ],
        ["\\frac{1}{2}"],
        {"gold": 1},
    ),
    "math": (
        "algebra/train-00000-of-00001.parquet",
        [
            {
                "problem": "a?",
                "level": "Level 1",
                "type": "Algebra",
                "solution": "first $\\boxed{0}$, $\\boxed{\\{1\\}}$.",
            },
            {"problem": "b?", "level": "Level 2", "type": "Algebra", "solution": "$\\boxed{\\frac{1}{\\sqrt{2}}}$."},
            {"problem": "c?", "level": "Level 3", "type": "Algebra", "solution": "it is \\boxed{1"},
            {"problem": "d?", "level": "Level 3", "type": "Algebra", "solution": "$\\boxed 7$"},
        ],
        ["\\{1\\}", "\\frac{1}{\\sqrt{2}}", "7"],
        {"unusable": 1},
    ),
    "polaris_53k": (
        "polaris-data-53K.jsonl",
        [
            problem("a?", "3", difficulty="3/8"),
            problem("A ?", " 3", difficulty="3/8"),
            problem("b?", "x", difficulty="0/8"),
        ],
        ["3", "x"],
        {"repeated": 1},
    ),
    "deepscaler": (
        "deepscaler.json",
        [problem("a?", "3", solution=""), problem("b?", "", solution=""), problem("c?", None, solution="")],
        ["3"],
        {"unusable": 2},
    ),
    "dapo_math_17k": (
        "data/dapo-math-17k.parquet",
        [
            verl("a?", "34", "u-1"),
            verl("a?", "34", "u-1"),
            verl("b?", "1", "u-2"),
            verl("b?", "2", "u-3"),
            {**verl("c?", "5", "u-4"), "prompt": [{"content": "c?", "role": "user"}]},
        ],
        ["34"],
        {"repeated": 1, "conflicting": 2, "unusable": 1},
    ),
    "aime24": (
        "data/train-00000-of-00001.parquet",
        [
            problem(f"{answer}?", answer, id=index, year="2024")
            for index, answer in enumerate(("025", "0", "1000", "-1"))
        ],
        ["25", "0"],
        {"unusable": 2},
    ),
    "aime25": (
        "test.jsonl",
        [problem("a?", "070", id="0"), problem("b?", "7.5", id="1"), problem("c?", "336^\\circ", id="2")],
        ["70", "336"],
        {"unusable": 1},
    ),
    "aime26": (
        "data/train-00000-of-00001.parquet",
        [problem("a?", 277, problem_idx=1), problem("b?", 62, problem_idx=2)],
        ["277", "62"],
        {},
    ),
    "amc23": (
        "data/test-00000-of-00001.parquet",
        [{"question": "a?", "answer": 27.0, "id": 0}, {"question": "b?", "answer": 4.5, "id": 1}],
        ["27"],
        {"unusable": 1},
    ),
}


@pytest.mark.parametrize("name", MATHEMATICS)
def test_mathematics(folder: Path, name: str) -> None:
    file, given, answers, dropped = MATHEMATICS[name]
    write(folder / "copy" / file, given)
    assert prepare(name, folder / "copy") == 0
    rows, manifest = results()
    assert [row["answer"] for row in rows] == answers
    assert {key: count for key, count in manifest["counts"].items() if count} == {
        "read": len(given),
        "kept": len(answers),
        **dropped,
    }
    assert {row["source"] for row in rows} == {name} and len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        assert question_of(row).endswith("\n\nPlease reason step by step, and put your final answer within \\boxed{}.")
        assert "Answer:" not in question_of(row)
    data = JsonlPrompts("out.jsonl")
    assert data.size == len(rows) and {"id", "answer", "source", "fingerprint"} <= set(data.example(0).columns)


def test_copies_of_github(folder: Path) -> None:
    """MATH has a pretty-printed file a problem; beside GSM8K's questions lie the same once more."""
    _, given, answers, _ = MATHEMATICS["math"]
    for number, row in enumerate(given):
        file = folder / "MATH" / "train" / "algebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row, indent=4))
    assert prepare("math", folder / "MATH") == 0
    assert [row["answer"] for row in results()[0]] == answers
    for name in ("test", "test_socratic"):
        write(folder / "data" / f"{name}.jsonl", MATHEMATICS["gsm8k"][1])
    assert prepare("gsm8k", folder / "data" / "test.jsonl", "subset=null") == 0
    rows, manifest = results()
    assert len(rows) == len(MATHEMATICS["gsm8k"][2]) and [file["name"] for file in manifest["files"]] == ["test.jsonl"]


def test_columns_that_go_on_and_ids(folder: Path) -> None:
    file, given, _, _ = MATHEMATICS["math_500"]
    write(folder / "copy" / file, given)
    assert prepare("math_500", folder / "copy" / file) == 0
    rows, manifest = results()
    assert {key: rows[0][key] for key in ("id", "subject", "level")} == {
        "id": "test/algebra/1.json",
        "subject": "Algebra",
        "level": 1,
    }
    assert manifest["dropped"] == [{"id": "test/algebra/2.json", "reason": "gold", "detail": "too long an answer"}]


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


def test_every_shipped_config_has_a_test_here() -> None:
    tested = {"taco", "livecodebench", "humaneval_plus", "mbpp_plus", *MATHEMATICS}
    shipped = {config.name for config in registry.configs() if config.recipe == "sparrow_prepare"}
    assert shipped == {f"prepare/{name}" for name in tested}


def copy_of(folder: Path, name: str) -> Path:
    file, given, _, _ = MATHEMATICS[name]
    return write(folder / "copy" / file, given)


def test_training_questions_of_evaluation_sets_are_left_out(folder: Path) -> None:
    evaluation = write(folder / "eval" / "test.jsonl", [problem("Find  $X$ .", "7", id="0")])
    assert prepare("aime25", evaluation) == 0
    Path("out.jsonl").rename("aime25.jsonl")
    write(folder / "plain.jsonl", [{"prompt": "C?"}])
    train = [
        problem("find\\, x.", "7", difficulty="1/8"),
        problem("b?", "1", difficulty=""),
        problem("c?", "1", difficulty=""),
    ]
    write(folder / "train.jsonl", train)
    assert prepare("polaris_53k", folder / "train.jsonl", "exclude=[aime25.jsonl, plain.jsonl]") == 0
    rows, manifest = results()
    assert [row["answer"] for row in rows] == ["1"] and manifest["counts"]["excluded"] == 2


def test_the_same_bytes_again_from_another_folder_and_process(folder: Path) -> None:
    copy_of(folder, "gsm8k")
    assert prepare("gsm8k", folder / "copy") == 0
    first = [Path(name).read_bytes() for name in ("out.jsonl", "out.jsonl.manifest.json")]
    assert json.loads(first[1])["output_sha256"] == hashlib.sha256(first[0]).hexdigest()
    moved = folder / "elsewhere"
    moved.mkdir()
    (folder / "copy").rename(moved / "copy2")
    (moved / "prepare_parts.py").write_text(PARTS)
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_prepare", "--config", "prepare/gsm8k", "source=copy2"]
    command += ["reward={_component_: prepare_parts.Short}", "output=deep/out.jsonl"]
    environment = {**os.environ, "PYTHONHASHSEED": "99"}
    done = subprocess.run(command, cwd=moved, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "5 rows read, 3 kept" in done.stdout and "gsm8k-000003: no ####" in done.stdout
    names = ("out.jsonl", "out.jsonl.manifest.json")
    assert [(moved / "deep" / name).read_bytes() for name in names] == first
    assert sorted(path.name for path in (moved / "deep").iterdir()) == sorted(names)


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs a preparation that must end with one line that has these words, and leave nothing behind."""

    def check(name: str, source: Path, *overrides: str, words: tuple[str, ...]) -> None:
        capsys.readouterr()
        assert prepare(name, source, *overrides) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("error: "), lines
        for word in words:
            assert word in lines[0], lines[0]
        assert not list(folder.glob("out.jsonl*"))

    return check


def test_bad_input_is_one_line_that_names_file_and_key(folder: Path, refused: Callable[..., None]) -> None:
    good = problem("a?", "1", difficulty="1/8")
    file = write(folder / "a.jsonl", [good, {"question": "a?", "answer": "1", "difficulty": ""}])
    refused("polaris_53k", file, words=("a.jsonl, line 2: question: no column 'problem'",))
    file = write(folder / "a.jsonl", [good, {"problem": "a?", "difficulty": ""}])
    refused("polaris_53k", file, words=("a.jsonl, line 2: no column 'answer'",))
    file = write(folder / "a.jsonl", [problem(["a"], "1", difficulty="")])
    refused("polaris_53k", file, words=("line 1: question: 'problem' must hold text, not ['a']",))
    file = write(folder / "a.jsonl", [{"problem": "a?", "answer": "1"}])
    refused("polaris_53k", file, words=("line 1: keep: no column 'difficulty'",))
    file.write_bytes(b"")
    refused("polaris_53k", file, words=("a.jsonl: no rows in it",))
    file.write_bytes(b'{"problem": "\xff"}')
    refused("polaris_53k", file, words=("a.jsonl: cannot be read as UTF-8",))
    (folder / "none").mkdir()
    refused("polaris_53k", folder / "none", words=("none: no data files",))
    refused("polaris_53k", folder / "absent.jsonl", words=("absent.jsonl: no such file or folder",))
    refused("gsm8k", folder / "none", words=("none: name: no folder 'main'",))
    copy_of(folder, "gsm8k")
    refused("gsm8k", folder / "copy", "split=dev", words=("split: no file of split 'dev'",))


def test_bad_settings_are_one_line(folder: Path, refused: Callable[..., None]) -> None:
    file = write(folder / "a.jsonl", [problem("a?", "1", difficulty=""), problem("b?", "1", difficulty="")])
    refused("polaris_53k", file, "template='{quest}'", words=("template: no column 'quest', did you mean",))
    refused("taco", file, "gold.max_tests=0", words=("max_tests: 0 must be at least 1",))
    refused("livecodebench", file, "gold.first_date=2024-8-1", words=("first_date: '2024-8-1' is no day",))
    refused("livecodebench", file, "gold.last_date=20", words=("last_date: 20 is no day; write it like",))
    dates = ("gold.first_date=2025-01-02", "gold.last_date=2025-01-01")
    refused("livecodebench", file, *dates, words=("first_date: 2025-01-02 is after last_date",))
    refused("polaris_53k", file, "limit=0", words=("limit: 0 must be at least 1",))
    refused("polaris_53k", file, "keep.answer=answer", words=("keep: 'answer' is a column that the preparation",))
    refused("polaris_53k", file, "keep.prompts=answer", words=("keep: no column may be called 'prompts'",))
    refused("polaris_53k", file, "id=answer", words=("line 2: id: '1' stands twice",))
    refused("polaris_53k", file, "id=difficulty", words=("line 1: id: 'difficulty' holds no text or integer",))
    refused("polaris_53k", file, "exclude=[b.jsonl]", words=("exclude: b.jsonl: no such file",))
    refused("polaris_53k", file, "system=x", "chat=false", words=("system: has no place",))
    refused("polaris_53k", file, "solutions=1", "reward=null", words=("solutions: 1",))
    refused("polaris_53k", file, f"output={folder}", words=(f"output: {folder} is a folder",))
    refused(
        "polaris_53k", file, "gold.column=difficulty", words=("no example is left: 2 rows read, 0 kept; 2 dropped",)
    )


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"fingerprint": None}, "neither 'fingerprint' nor 'prompt'; there are fingerprint"),
        ({"fingerprint": 3}, "fingerprint: must be text, not 3"),
        ({"prompt": 3}, "the prompt must be text or a list of {role, content} messages, not 3"),
        ({"prompt": [{"role": "user"}]}, "the prompt must be text or a list"),
        ({"prompt": ["a"]}, "the prompt must be text or a list"),
    ],
)
def test_evaluation_sets_that_cannot_be_excluded(folder, refused, row, words) -> None:
    file = write(folder / "a.jsonl", [problem("a?", "1", difficulty="")])
    write(folder / "b.jsonl", [{"fingerprint": None, "prompt": "C?"}, row])
    refused("polaris_53k", file, "exclude=[b.jsonl]", words=(f"exclude: b.jsonl, line 2: {words}",))


def test_days_are_written_as_text_and_other_types_are_named(folder: Path) -> None:
    day = datetime.datetime(2024, 8, 1, 12, 30)
    file = write(folder / "a.parquet", [problem("a?", "1", difficulty=day), problem("b?", "1", difficulty=day)])
    assert prepare("polaris_53k", file) == 0
    assert results()[0][0]["difficulty"] == "2024-08-01T12:30:00"
    file = write(folder / "b.parquet", [problem("a?", "1", difficulty=b"x"), problem("b?", "1", difficulty=None)])
    assert prepare("polaris_53k", file) == 0
    assert results()[1]["dropped"][0]["detail"] == "difficulty: cannot be written as JSON: bytes is no JSON"


def test_ids_under_drop_that_no_row_has_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(folder / "a.jsonl", [problem("a?", "1", difficulty="x"), problem("b?", "2", difficulty="x")])
    assert prepare("polaris_53k", file, "drop={polaris_53k-000001: wrong, polaris-1: wrong}") == 0
    assert "drop: no row has the id 'polaris-1'\n" in capsys.readouterr().out


def test_rows_that_cannot_be_written_are_dropped_and_named(folder: Path) -> None:
    rows = [
        problem("a?", "1", difficulty="x"),
        problem("b \ud800?", "1", difficulty="x"),
        problem("", "1", difficulty=""),
    ]
    file = write(folder / "a.jsonl", [*rows, problem("d?", "1", difficulty=float("nan"))])
    assert prepare("polaris_53k", file, "drop={polaris_53k-000000: it is wrong}", "id=null") == 2
    assert prepare("polaris_53k", file) == 0
    kept, manifest = results()
    assert len(kept) == 1
    assert [drop["id"][-1] for drop in manifest["dropped"]] == ["1", "2", "3"]


def test_listed_ids_text_prompts_system_and_limit(folder: Path) -> None:
    file = write(folder / "a.jsonl", [problem(f"q{i}?", "1", difficulty="x") for i in range(5)])
    more = ["limit=3", "drop={polaris_53k-000001: it is wrong}"]
    assert prepare("polaris_53k", file, "system=Be brief.", *more) == 0
    rows, manifest = results()
    assert [row["id"][-1] for row in rows] == ["0", "2"] and manifest["counts"]["read"] == 3
    assert rows[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert manifest["dropped"] == [{"id": "polaris_53k-000001", "reason": "listed", "detail": "it is wrong"}]
    assert prepare("polaris_53k", file, "chat=false", "template='Q: {question}'", *more) == 0
    assert results()[0][0]["prompt"] == "Q: q0?"


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    file = write(folder / "a.jsonl", [problem(f"q{i}?", "1", difficulty="x") for i in range(256 * 500)])
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_prepare", "--config", "prepare/polaris_53k"]
    command += [f"source={file}", "reward={_component_: prepare_parts.Slow}", "output=out.jsonl"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        while not Path("started").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert not list(folder.glob("out.jsonl*"))
