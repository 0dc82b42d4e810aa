"""What running a program in the sandbox costs, and how many run in a second."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sparrow.components.code_reward import CodeReward
from sparrow.sandbox import Sandbox
from sparrow.sandbox.interpreter import base_interpreter

_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)"
_TELLS_TIME = "import time\nprint(time.monotonic())"
_FUNCTION = "def add(a, b):\n    return a + b"
_TESTS = 10  # of each of the reward's programs


def measure_code(runs: int, workers: list[int]) -> dict[str, Any]:
    """Milliseconds of single runs, split by step, and runs per second by number of workers.

    Args:
        runs: of each kind.
        workers: numbers of programs at a time to try.
    """
    sandbox = Sandbox(timeout=60)
    try:
        single = {
            "isolation": sandbox.describe(),
            "start_sandbox_ms": _median_ms(min(runs, 10), lambda: Sandbox(timeout=60).close()),
            "interpreter_ms": _median_ms(min(runs, 50), _start_interpreter),
            "call_ms": _median_ms(runs, lambda: sandbox.call(_FUNCTION, "add", [1, 2])),
            **_split(sandbox, runs),
        }
    finally:
        sandbox.close()
    return {**single, "runs": runs, "by_workers": [_throughput(count, runs) for count in workers]}


def show_code(result: dict[str, Any]) -> str:
    lines = [
        *result["isolation"],
        f"start of a sandbox {result['start_sandbox_ms']:.0f} ms; for comparison an interpreter without any "
        f"{result['interpreter_ms']:.1f} ms",
        f"a program {result['program_ms']:.1f} ms: {result['to_first_line_ms']:.1f} ms to its first line (hand over, "
        f"namespaces, two forks), {result['to_answer_ms']:.1f} ms from there to the answer (its end, the end of its "
        f"namespaces); {result['cpu_ms']:.1f} ms of CPU; a call {result['call_ms']:.1f} ms",
    ]
    for row in result["by_workers"]:
        lines.append(
            f"{row['workers']} workers: {row['runs_per_s']:.0f} runs/s; {row['programs_per_s']:.1f} programs/s of "
            f"{_TESTS} tests each ({row['tests_per_s']:.0f} tests/s)"
        )
    return "\n".join(lines)


def _split(sandbox: Sandbox, runs: int) -> dict[str, float]:
    """Medians; the program tells when it began, as its clock is this process's."""
    rows = []
    for _ in range(runs):
        start = time.monotonic()
        run = sandbox.run_program(_TELLS_TIME)
        end, began = time.monotonic(), float(run.stdout)
        rows.append((end - start, began - start, end - began, run.cpu_seconds))
    names = ("program_ms", "to_first_line_ms", "to_answer_ms", "cpu_ms")
    return {name: statistics.median(column) * 1e3 for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _throughput(workers: int, runs: int) -> dict[str, Any]:
    sandbox = Sandbox(timeout=60, workers=workers)
    try:
        sandbox.map(sandbox.run_program, ["pass"] * workers * 2)  # starts them all
        with ThreadPoolExecutor(workers) as threads:
            start = time.perf_counter()
            list(threads.map(lambda _: sandbox.run_program(_PROGRAM, "1 2"), range(runs)))
            seconds = time.perf_counter() - start
    finally:
        sandbox.close()
    rewarded = _reward_seconds(workers, max(runs // _TESTS, 1))
    return {
        "workers": workers, "runs_per_s": runs / seconds, "programs_per_s": 1 / rewarded,
        "tests_per_s": _TESTS / rewarded,
    }  # fmt: skip


def _reward_seconds(workers: int, programs: int) -> float:
    """Of one program with all its tests."""
    reward = CodeReward(timeout=60, workers=workers)
    tests = {"style": "stdin", "inputs": ["1 2"] * _TESTS, "outputs": ["3"] * _TESTS}
    completion = f"```python\n{_PROGRAM}\n```"
    try:
        reward([completion] * workers * 2, tests=[tests] * workers * 2)
        start = time.perf_counter()
        rewards = reward([completion] * programs, tests=[tests] * programs)
        assert rewards == [1.0] * programs
        return (time.perf_counter() - start) / programs
    finally:
        reward.close()


def _median_ms(runs: int, action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def _start_interpreter() -> None:
    subprocess.run([base_interpreter(), "-I", "-S", "-c", "pass"], check=True, env={}, stdin=subprocess.DEVNULL)
