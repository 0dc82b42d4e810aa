"""The reward for programs: the share of tests that a program passes, or whether it passes them all.

Programs are untrusted. They run in `sparrow.sandbox`; what a test expects stays in this process and is compared here,
so that all a program can do to score is to give the right outputs. docs/tasks.md says what contains them.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sparrow.components.code_tests import CodeTests, is_empty, passes, read_tests
from sparrow.errors import UserError
from sparrow.sandbox import Sandbox, SandboxError

OUTCOMES = ("passed", "failed", "no_answer", "timeout", "error")
Outcome = Literal["passed", "failed", "no_answer", "timeout", "error"]
_TIMEOUTS = 2  # after so many the rest of a program's tests are taken for timed out
# Possessive: what overlaps is not to be tried again from every position of a long line.
_OPENING = re.compile(r"(```++)[ \t]*+([\w+-]*+)[^`]*+")
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True)
class _Verdict:
    outcome: Outcome
    reward: float | None


class CodeReward:
    """Runs the program of each response against the example's tests (`tests`; None, or no such column: not applicable).

    Outcomes, in `counts` after each call: "passed" (every test), "failed" (a wrong output, an exception, too much
    memory or output), "timeout" (as failed, because of the time), "no_answer" (no program in the response), and
    "error" (the sandbox failed: the reward is None).

    Args:
        mode: "all": 1.0 if every test passes, else 0.0, and the first failure ends it; "fraction": the share of tests
            that pass, of those with an empty expected output counting only the failed ones.
        timeout: seconds of the clock for each test.
        total_timeout: of the clock for all tests of a program together; None: 4 · timeout. A test begins only where a
            whole `timeout` is left of it, and the others are taken for timed out.
        memory_mb: of a program, see `sparrow.sandbox.limits`.
        max_tests: of an example that has more, so many are run, evenly spaced from the first to the last; None runs
            all.
        workers: programs that run at a time.
        weight: factor in the sum of rewards.

    Raises:
        UserError: this machine cannot isolate programs; an argument out of its range.
    """

    def __init__(
        self,
        mode: Literal["all", "fraction"] = "all",
        timeout: float = 6.0,
        total_timeout: float | None = None,
        memory_mb: int = 1024,
        max_tests: int | None = 32,
        workers: int = 4,
        weight: float = 1.0,
    ) -> None:
        if mode not in ("all", "fraction"):
            raise UserError(f"mode must be 'all' or 'fraction', got {mode!r}")
        if max_tests is not None and max_tests < 1:
            raise UserError(f"max_tests must be at least 1, got {max_tests}")
        total_timeout = 4 * timeout if total_timeout is None else total_timeout
        if not total_timeout >= timeout:
            raise UserError(f"total_timeout must be at least timeout, {timeout:g}, got {total_timeout:g}")
        self.name, self.weight = "code", weight
        self.counts: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
        self._mode, self._max_tests = mode, max_tests
        self._latest_start = total_timeout - timeout
        self._sandbox = Sandbox(timeout=timeout, memory_mb=memory_mb, workers=workers)

    def __call__(self, completions: list[str], /, **columns: list[Any]) -> list[float | None]:
        rows = list(zip(completions, columns.get("tests", [None] * len(completions)), strict=True))
        verdicts = iter(self._sandbox.map(self._judge, [row for row in rows if row[1] is not None]))
        self.counts = dict.fromkeys(OUTCOMES, 0)
        rewards: list[float | None] = []
        for _, tests in rows:
            verdict = next(verdicts) if tests is not None else None
            rewards.append(verdict and verdict.reward)
            if verdict:
                self.counts[verdict.outcome] += 1
        return rewards

    def problems(self, columns: dict[str, list[Any]]) -> list[str | None]:
        """Per example why its tests cannot be used; None too where it has none."""
        count = max(map(len, columns.values()), default=0)
        return [None if tests is None else _problem(tests) for tests in columns.get("tests", [None] * count)]

    def close(self) -> None:
        self._sandbox.close()

    def describe(self) -> list[str]:
        """What contains programs on this machine, in lines for a log."""
        return self._sandbox.describe()

    def _judge(self, item: tuple[str, Any]) -> _Verdict:
        completion, column = item
        program = extract_program(completion)
        if program is None:
            return _Verdict("no_answer", 0.0)
        try:
            return self._test(program, read_tests(column).spread(self._max_tests))
        except (SandboxError, ValueError):  # tests that cannot be used are the data's fault, not the answer's
            return _Verdict("error", None)

    def _test(self, program: str, tests: CodeTests) -> _Verdict:
        passed, passed_by_nothing, timeouts, spent = 0, 0, 0, 0.0
        for input_, output in zip(tests.inputs, tests.outputs, strict=True):
            if spent > self._latest_start:
                timeouts += 1
                break
            start = time.monotonic()
            given = self._run(program, tests.entry_point, input_)
            spent += time.monotonic() - start
            if passes(given, output, tests.tolerance):
                passed += 1
                passed_by_nothing += is_empty(output)
                continue
            timeouts += getattr(given, "status", None) == "timeout"
            if self._mode == "all" or timeouts == _TIMEOUTS:
                break
        complete = passed == len(tests.inputs)
        outcome: Outcome = "passed" if complete else "timeout" if timeouts else "failed"
        if complete or self._mode == "all":
            return _Verdict(outcome, float(complete))
        return _Verdict(outcome, (passed - passed_by_nothing) / (len(tests.inputs) - passed_by_nothing))

    def _run(self, program: str, entry_point: str | None, input_: Any) -> Any:
        if entry_point is None:
            return self._sandbox.run_program(program, input_)
        return self._sandbox.call(program, entry_point, input_)


def extract_program(completion: str) -> str | None:
    """The last closed code block marked as Python, else the last without a mark; None where there is neither.

    Only what follows the last `</think>` counts, and nothing within a thought that was not ended. A block that is not
    closed is a response that was cut off: no answer.
    """
    answer = completion.rpartition("</think>")[2]
    if "<think>" in answer:
        return None
    blocks = list(_blocks(answer))
    for marks in (_PYTHON, ("",)):
        chosen = [code for mark, code in blocks if mark in marks]
        if chosen:
            return textwrap.dedent(chosen[-1])
    return None


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Mark and content of each closed code block."""
    fence, mark = "", ""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not fence:
            if opening := _OPENING.fullmatch(bare):
                fence, mark, lines = opening[1], opening[2].lower(), []
        elif bare.startswith(fence) and not bare.strip("`"):
            yield mark, "".join(lines)
            fence = ""
        else:
            lines.append(line)


def _problem(column: Any) -> str | None:
    try:
        read_tests(column)
    except ValueError as error:
        return str(error)
    return None
