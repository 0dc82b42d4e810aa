"""Copies of published data sets in small, and a preparation of one, for the tests of sparrow_prepare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

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


def copy_of(folder: Path, name: str) -> Path:
    file, given, _, _ = MATHEMATICS[name]
    return write(folder / "copy" / file, given)
