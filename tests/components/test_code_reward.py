"""The code reward: which programs score, and that none scores without the right outputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from sparrow.components.code_reward import CodeReward, extract_program
from sparrow.components.code_tests import passes, read_tests
from sparrow.components.math_reward import MathReward
from sparrow.errors import UserError
from sparrow.sandbox import Failure, ProgramRun

SUM = {"style": "stdin", "inputs": ["1 2\n", "3 4\n", "5 6\n", "-1 1\n"], "outputs": ["3\n", "7", " 11 \n\n", "0"]}
ADD = {"style": "call", "entry_point": "add", "inputs": [[1, 2], [3, 4], [5, 6], [-1, 1]], "outputs": [3, 7, 11, 0]}
READS = "print(sum(map(int, input().split())))"
ADDS = "def add(a, b):\n    return a + b"


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    opened = CodeReward(timeout=60, memory_mb=256, workers=2)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def fraction() -> Iterator[CodeReward]:
    opened = CodeReward(mode="fraction", timeout=60, memory_mb=256, workers=2)
    yield opened
    opened.close()


def fenced(program: str) -> str:
    return f"Here it is:\n```python\n{program}\n```\n"


def test_all_or_nothing(reward: CodeReward) -> None:
    completions = [fenced(READS), fenced("print(3)"), "no program", fenced(ADDS), fenced("def add(a, b): return 3")]
    assert reward(completions, tests=[SUM, SUM, SUM, ADD, ADD]) == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert reward.counts == {"passed": 2, "failed": 2, "no_answer": 1, "timeout": 0, "error": 0}


def test_fraction(fraction: CodeReward) -> None:
    completions = [
        fenced(READS),
        fenced("print(3)"),
        fenced("def add(a, b):\n    return a + b if a < 4 else 1 / 0"),
        "",
    ]
    assert fraction(completions, tests=[SUM, SUM, ADD, ADD]) == [1.0, 0.25, 0.75, 0.0]
    assert fraction.counts == {"passed": 1, "failed": 2, "no_answer": 1, "timeout": 0, "error": 0}


def test_time_outs_score_nothing_and_are_counted() -> None:
    hasty = CodeReward(mode="fraction", timeout=1, memory_mb=256)
    try:
        program = "a, b = map(int, input().split())\nwhile a == 3 or a == 5: pass\nprint(a + b)"
        assert hasty([fenced(program)], tests=[SUM]) == [0.25], "given up at the second time-out"
        assert hasty.counts == {"passed": 0, "failed": 0, "no_answer": 0, "timeout": 1, "error": 0}
    finally:
        hasty.close()


def test_unusable_tests_are_an_error_and_no_reward(reward: CodeReward) -> None:
    assert reward([fenced(READS)], tests=[{}]) == [None]
    assert reward.counts["error"] == 1


def test_examples_without_tests_are_not_applicable(reward: CodeReward) -> None:
    assert reward([fenced(READS), fenced(READS), "x"], tests=[None, SUM, None]) == [None, 1.0, None]
    assert sum(reward.counts.values()) == reward.counts["passed"] == 1
    assert reward.problems({"tests": [None, {}]})[0] is None
    assert reward([fenced(READS)], answer=["y"]) == [None]
    assert set(reward.counts.values()) == {0}
    assert reward.problems({"answer": ["y", "z"]}) == [None, None]


def test_a_batch_of_mathematics_and_code(reward: CodeReward) -> None:
    mathematics = MathReward(workers=1)
    completions = [fenced(READS), r"\boxed{2}", fenced("print(3)"), r"\boxed{3}"]
    columns: dict[str, list[Any]] = {"tests": [SUM, None, SUM, None], "answer": [None, "2", None, "2"]}
    try:
        assert reward.problems(columns) == mathematics.problems(columns) == [None] * 4
        assert reward(completions, **columns) == [1.0, None, 0.0, None]
        assert mathematics(completions, **columns) == [None, 1.0, None, 0.0]
        assert mathematics.counts["error"] == reward.counts["error"] == 0
    finally:
        mathematics.close()


def test_tests_that_expect_nothing_give_no_share(fraction: CodeReward) -> None:
    tests = {"style": "stdin", "inputs": ["a", "b", "c"], "outputs": ["", "", "x"]}
    says_x = "print('x')"
    right = "if input() == 'c': print('x')"
    assert fraction([fenced("pass"), fenced(says_x), fenced(right)], tests=[tests] * 3) == [0.0, 1 / 3, 1.0]


def test_all_tests_of_a_program_share_a_budget() -> None:
    hasty = CodeReward(mode="fraction", timeout=30, total_timeout=31.5, memory_mb=256, workers=1)
    try:
        tests = {"style": "stdin", "inputs": ["1"] * 6, "outputs": ["1"] * 6}
        slow = "import time\ntime.sleep(1.6)\nprint(1)"  # each far below its own limit
        assert hasty([fenced(slow)], tests=[tests]) == [1 / 6]
        assert hasty.counts["timeout"] == 1
    finally:
        hasty.close()


def test_no_completions(reward: CodeReward) -> None:
    assert reward([], tests=[]) == []
    assert set(reward.counts.values()) == {0}


# Each tries to score without computing the outputs.
CHEATS = {
    "exits 0": "import sys\nsys.exit(0)",
    "exits 0 at once": "import os\nos._exit(0)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "is equal to everything": """
class Any:
    def __eq__(self, other): return True
    __hash__ = None
    def __repr__(self): return "3"
def add(a, b): return Any()
""",
    "an integer that is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return Any(5)
print(Any(5))
""",
    "a text that is equal to everything": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def add(a, b): return Any("3")
""",
    "writes a result of its own": """
import os
os.write(3, b'{"value": 3}')
os.write(1, b"3")
os._exit(0)
""",
    "says that it passed": """
import os
for number in range(16):
    for text in (b'{"passed": true}', b'{"value": true}', b"ok", b'{"ended_by": "itself", "code": 0}'):
        try:
            os.write(number, text)
        except OSError:
            pass
os._exit(0)
""",
    "replaces what encodes and compares": """
import builtins, json, sys
for module in list(sys.modules.values()):
    for name in ("encode", "decode", "passes", "_same", "dumps", "_call", "_end"):
        if hasattr(module, name):
            setattr(module, name, lambda *a, **k: '{"value": true}')
builtins.isinstance = lambda *a: True
builtins.all = builtins.any = lambda *a: True
def add(a, b): return True
""",
    "leaves at the end by atexit": """
import atexit, os
atexit.register(lambda: os._exit(0))
def add(a, b): return None
""",
    "looks for the outputs in frames, objects and descriptors": """
import gc, os, sys
found = []
frame = sys._getframe()
while frame:
    found += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
found += gc.get_objects()
outputs = [item["outputs"] for item in found if isinstance(item, dict) and "outputs" in item]
for number in range(16):
    try:
        text = os.pread(number, 1 << 20, 0)
        if b"outputs" in text:
            outputs.append(text)
    except OSError:
        pass
print(outputs[0][0] if outputs else "nothing")
def add(a, b): return outputs[0][0] if outputs else None
""",
    "catches the interpreter's end": """
class Ends:
    def __del__(self): raise SystemExit(0)
x = Ends()
def add(a, b): raise SystemExit(0)
""",
    "leaves something for the next test": """
import os
def add(a, b):
    path = "last"
    if os.path.exists(path): return int(open(path).read())
    open(path, "w").write("3")
    return 3
""",
    "takes too much memory": "def add(a, b): return len(bytearray(1 << 30))\nx = bytearray(1 << 30)",
    "prints all possible outputs": "print(*range(-100, 100))\ndef add(a, b): return list(range(100))",
}


@pytest.mark.parametrize("tests", [SUM, ADD], ids=["stdin", "call"])
def test_no_cheat_scores(tests: dict[str, Any], reward: CodeReward) -> None:
    completions = [fenced(program) for program in CHEATS.values()]
    rewards = reward(completions, tests=[tests] * len(completions))
    assert dict(zip(CHEATS, rewards, strict=True)) == dict.fromkeys(CHEATS, 0.0)
    assert reward.counts["failed"] == len(CHEATS), "no cheat is taken for a failure of the sandbox"


def test_the_search_for_outputs_finds_what_is_there(reward: CodeReward) -> None:
    """The same search, for the input: a search that finds nothing must be able to find something."""
    program = CHEATS["looks for the outputs in frames, objects and descriptors"].replace("outputs", "arguments")
    tests = {"style": "call", "entry_point": "add", "inputs": [[7, 8]], "outputs": [7]}
    assert reward([fenced(program)], tests=[tests]) == [1.0]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\n```Python3\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```\na\n```\nor\n```\nb\n```", "b\n"),
        ("```cpp\na\n```", None),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\na\n```</think>nothing", None),
        ("<think>```python\na\n```", None),
        ("  ```python\n  a\n    b\n  ```", "a\n  b\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("print(1)", None),
        ("", None),
        ("``` ``` ```", None),
        ("```" * 50_000, None),
        ("```" + " " * 2_000_000 + "`", None),
        ("```" + "a" * 2_000_000 + "`", None),
        ("```python\n" * 50_000, None),
    ],
)
def test_extraction(completion: str, program: str | None) -> None:
    assert extract_program(completion) == program


def run(stdout: str, status: Any = "exited") -> ProgramRun:
    return ProgramRun(status, 0, stdout, "", 0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "expected", "tolerance", "same"),
    [
        (run("1 2\n\n3"), "1\n2 3\n", 0, True),
        (run("1.0"), "1", 0, False),
        (run("1.0"), "1", 1e-6, True),
        (run("1000001"), "1000000", 1e-5, True),
        (run("nan"), "1", 1e9, False),
        (run("1_0"), "10.0", 1e-6, False),
        (run("٣"), "3", 1e-6, False),
        (run("+.5e1 -5. 1E-07"), "5 -5 1e-7", 1e-6, True),
        (run("infinity"), "inf", 1e-6, False),
        (run("inf"), "1e400", 1e-6, False),
        (run("1_0"), "10", 0, False),
        (run("x"), "X", 1e-6, False),
        (run("1", "failed"), "1", 0, False),
        (run("1", "output"), "1", 0, False),
        (run(""), "", 0, True),
        (Failure("failed", ""), None, 0, False),
        (True, 1, 0, True),
        (1, 1.0, 0, True),
        ("1", 1, 0, False),
        ((1, [2]), [1, (2,)], 0, True),
        ([1, 2], [1, 2, 3], 0, False),
        ({1, 2}, [1, 2], 0, False),
        ({1, 2}, {2, 1}, 0, True),
        ({"a": (1,)}, {"a": [1]}, 0, True),
        ({"a": 1}, {"b": 1}, 0, False),
        (float("nan"), float("nan"), 0, True),
        ([0.1 + 0.2], [0.3], 0, False),
        ([0.1 + 0.2], [0.3], 1e-9, True),
        (10**400, 1.5, 1e-6, False),
        (True, 1.0000001, 1e-3, False),
        (float("inf"), float("inf"), 1e-3, True),
        (float("inf"), 1.0, 1e-3, False),
        (None, None, 0, True),
        (None, 0, 0, False),
    ],
)
def test_comparison(given: Any, expected: Any, tolerance: float, same: bool) -> None:
    assert passes(given, expected, tolerance) is same


def test_comparison_of_what_is_nested_too_deep() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert not passes(deep, [[1]], 0)
    assert not passes(deep, deep, 0), "given up, not crashed"


def test_problems(reward: CodeReward) -> None:
    broken: dict[str, Any] = {
        "tests must be an object, not a str": "x",
        "tests has an unknown key 'input'; there are": {**SUM, "input": 1},
        "tests.style must be 'stdin' or 'call', not None": {},
        "must be lists of the same length": {**SUM, "outputs": ["1"]},
        "and not empty": {**SUM, "inputs": [], "outputs": []},
        "must be text in the style 'stdin'": {**SUM, "outputs": [1, 2, 3, 4]},
        "entry_point is for the style 'call'": {**SUM, "entry_point": "f"},
        "entry_point must name a function, not 'a-b'": {**ADD, "entry_point": "a-b"},
        "entry_point must name a function, not None": {**ADD, "entry_point": None},
        "must be lists of arguments": {**ADD, "inputs": [1, 2, 3, 4]},
        "tolerance must be a number of at least 0, not -1": {**ADD, "tolerance": -1},
        "tolerance must be a number of at least 0, not nan": {**ADD, "tolerance": float("nan")},
        "a value cannot be read": {**ADD, "outputs": [{"!set": 1}, 1, 1, 1]},
        "every expected output is empty": {**ADD, "outputs": [None] * 4},
        "that a program that does nothing would pass": {**SUM, "outputs": ["", "\n", " ", ""]},
    }
    problems = reward.problems({"tests": [SUM, ADD, *broken.values()]})
    assert problems[:2] == [None, None]
    for wanted, problem in zip(broken, problems[2:], strict=True):
        assert problem is not None and wanted in problem


@pytest.mark.parametrize(("count", "last"), list(itertools.product((1, 2, 3, 7), (0, 1, 6, 99))))
def test_spread_takes_first_and_last(count: int, last: int) -> None:
    numbers = [str(number) for number in range(last + 1)]
    tests = read_tests({"style": "stdin", "inputs": numbers, "outputs": ["x"] * (last + 1)})
    inputs = tests.spread(count).inputs
    assert len(set(inputs)) == len(inputs) == min(count, last + 1)
    assert inputs[0] == "0" and (count == 1 or inputs[-1] == str(last))


def test_spread_keeps_a_test_that_expects_something() -> None:
    tests = read_tests({"style": "stdin", "inputs": list("abcd"), "outputs": ["", "", "x", ""]})
    assert tests.spread(2).outputs == ["", "x"]
    assert tests.spread(1).inputs == ["c"]


def test_max_tests_bounds_the_runs() -> None:
    first_only = CodeReward(timeout=60, memory_mb=256, max_tests=1, workers=1)
    try:
        assert first_only([fenced("print(3)")], tests=[SUM]) == [1.0]
    finally:
        first_only.close()


@pytest.mark.parametrize(
    "argument", [{"mode": "some"}, {"max_tests": 0}, {"timeout": -1}, {"workers": 0}, {"total_timeout": 5}]
)
def test_arguments_out_of_range(argument: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        CodeReward(**argument)
