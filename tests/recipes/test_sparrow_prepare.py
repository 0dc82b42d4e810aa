"""Preparing published data sets: every config end to end on rows of our own in the published schema."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sparrow import registry
from sparrow.components.data import JsonlPrompts

from .prepare_sets import MATHEMATICS, PARTS, copy_of, prepare, problem, question_of, results, write


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


def test_every_shipped_config_has_a_test_here() -> None:
    tested = {"taco", "livecodebench", "humaneval_plus", "mbpp_plus", *MATHEMATICS}
    shipped = {config.name for config in registry.configs() if config.recipe == "sparrow_prepare"}
    assert shipped == {f"prepare/{name}" for name in tested}


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
