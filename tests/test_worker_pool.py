"""Killable workers: what an item may do to itself, and what must not come of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparrow.errors import UserError
from sparrow.worker_pool import WorkerPool, WorkersLostError
from sparrow.worker_process import Template

FUNCTION = "pool_functions.act"


@pytest.fixture(autouse=True)
def _functions_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(FUNCTION, timeout=2.0, memory_mb=512)
    yield pool
    pool.close()


def kinds(pool: WorkerPool, *items: Any) -> list[str]:
    return [outcome.kind for outcome in pool.map(items)]


def wait_until_gone(pids: list[int]) -> None:
    for _ in range(600):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {[pid for pid in pids if psutil.pid_exists(pid)]}")


def test_results_come_back_in_order(pool: WorkerPool) -> None:
    items = [["echo", value] for value in ([1, "½", None], {"a": 1.5}, "\ud800", *range(200))]
    assert [outcome.value for outcome in pool.map(items)] == [value for _, value in items]
    assert pool.map([]) == []


def test_large_items_pass(pool: WorkerPool) -> None:
    text = "x" * 900_000
    assert pool.map([["echo", text]])[0].value == text


@pytest.mark.parametrize("what", ["spin", "power"])
def test_an_item_that_hangs_is_a_timeout_and_its_neighbours_are_done(pool: WorkerPool, what: str) -> None:
    assert kinds(pool, ["echo", 1], [what, None], ["echo", 2]) == ["done", "timeout", "done"]


def test_an_item_that_sleeps_is_a_timeout_too() -> None:
    pool = WorkerPool(FUNCTION, timeout=0.1)
    assert kinds(pool, ["sleep", 300], ["echo", 2]) == ["timeout", "done"]
    pool.close()


def test_time_is_cpu_time(pool: WorkerPool) -> None:
    assert kinds(pool, ["sleep", 4]) == ["done"]  # twice its CPU seconds


def test_memory_is_an_outcome_of_its_own(pool: WorkerPool) -> None:
    assert kinds(pool, ["echo", 1], ["memory", 4000], ["memory", 10]) == ["done", "memory", "done"]


def test_an_exception_is_an_error_that_says_what_it_was(pool: WorkerPool) -> None:
    outcome = pool.map([["raise", "no such set"]])[0]
    assert (outcome.kind, outcome.detail) == ("error", "ValueError: no such set")


@pytest.mark.parametrize("what", ["die", "segfault"])
def test_an_item_that_kills_every_worker_is_to_blame(pool: WorkerPool, what: str) -> None:
    assert kinds(pool, [what, None], ["echo", 1]) == ["memory", "done"]


def test_an_item_whose_worker_died_gets_another_try(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.map([["die_once", str(tmp_path / "mark")]])[0].value == "survived"


def test_a_slow_item_is_tried_again_with_the_whole_timeout() -> None:
    pool = WorkerPool(FUNCTION, workers=1, timeout=20.0, budget=1.0)
    # A share of 0.1 s each at first.
    outcomes = pool.map([["work", 0.5], *[["echo", 1]] * 4])
    assert [outcome.kind for outcome in outcomes] == ["done"] * 5
    pool.close()


def test_hostile_items_exhaust_the_budget_but_starve_nobody() -> None:
    pool = WorkerPool(FUNCTION, timeout=0.5, budget=2.0)
    results: list[list[str]] = []
    items = [["spin", None]] * 20 + [["echo", 1]] * 3
    runner = threading.Thread(target=lambda: results.append(kinds(pool, *items)), daemon=True)
    runner.start()
    runner.join(timeout=120)
    assert results == [["timeout"] * 20 + ["done"] * 3], "it stalled, or starved an ordinary item"
    pool.close()


def test_warm_up_is_done_before_the_workers_are_forked() -> None:
    pool = WorkerPool(FUNCTION, warm_up=[["echo", 1], ["remember", "seen"]])
    assert [outcome.value for outcome in pool.map([["remembered", None]] * 4)] == [["seen"]] * 4
    pool.close()


def test_workers_are_recycled() -> None:
    pool = WorkerPool(FUNCTION, workers=1, recycle=3)
    pids = [outcome.value for outcome in pool.map([["pid", None]] * 9)]
    assert [len(set(pids[start : start + 3])) for start in (0, 3, 6)] == [1, 1, 1]
    assert len(set(pids)) == 3
    pool.close()


def test_workers_stay_between_calls_and_end_with_close(pool: WorkerPool) -> None:
    first = {outcome.value for outcome in pool.map([["pid", None]] * 50)}
    assert {outcome.value for outcome in pool.map([["pid", None]] * 50)} <= first
    pool.close()
    wait_until_gone(list(first))
    assert kinds(pool, ["echo", 1]) == ["done"]


def test_it_works_off_the_main_thread_and_from_several_at_once(pool: WorkerPool) -> None:
    results: dict[int, list[Any]] = {}

    def call(number: int) -> None:
        results[number] = [outcome.value for outcome in pool.map([["echo", [number, item]] for item in range(50)])]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[number, item] for item in range(50)] for number in range(4)}


def test_a_lost_template_is_an_error_of_its_items_and_the_call_goes_on(pool: WorkerPool) -> None:
    found = kinds(pool, ["kill_template", None], *[["echo", 1]] * 20)
    assert found.count("done") >= 19  # a neighbour may have been under way
    assert found[0] == "error"


def test_a_function_that_cannot_be_loaded_is_an_exception_not_a_zero() -> None:
    with pytest.raises(WorkersLostError, match="no_such_module"):
        WorkerPool("no_such_module.act").map([1])


def test_workers_print_nowhere_and_see_no_keys(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    values = [outcome.value for outcome in pool.map([["print", "noise"], ["environment", "SECRET_TOKEN"]])]
    assert values == ["printed", None]
    assert "noise" not in "".join(capfd.readouterr())


def test_workers_do_not_load_torch(pool: WorkerPool) -> None:
    assert [outcome.value for outcome in pool.map([["modules", "torch"], ["modules", "json"]])] == [False, True]


PARENT = """
import os, sys, time
sys.path.insert(0, {tests!r})
from sparrow.worker_pool import WorkerPool
pool = WorkerPool("pool_functions.act", timeout=300.0, budget=300.0)
pids = [outcome.value for outcome in pool.map([["pid", None]] * 40)]
template = pool._template._process.pid
if {fork}:
    if os.fork() == 0:
        time.sleep(120)  # holds a copy of the control socket
        os._exit(0)
print(template, *set(pids), flush=True)
pool.map([["spin", None], ["spin", None]])
"""


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_killed_parent(how: signal.Signals, fork: bool) -> None:
    script = PARENT.format(tests=str(Path(__file__).parent), fork=fork)
    parent = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    family = psutil.Process(pids[0]).children()
    assert family
    copies = [child for child in psutil.Process(parent.pid).children() if child.pid != pids[0]]
    os.kill(parent.pid, how)
    parent.wait(timeout=60)
    wait_until_gone([*pids, *(child.pid for child in family)])
    for copy in copies:
        copy.kill()
    assert bool(copies) == fork


@pytest.mark.parametrize("limit", [{"workers": 0}, {"timeout": -1.0}, {"budget": float("nan")}, {"memory_mb": 0}])
def test_limits_are_checked(limit: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(limit))):
        WorkerPool(FUNCTION, **limit)


def test_an_interrupt_while_a_worker_is_forked_leaves_nothing_for_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = WorkerPool(FUNCTION, workers=2, recycle=2)
    pool.map([["echo", 1]])
    pool._idle.pop().socket.close()  # so that one has to be forked
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Template, "_reply", _interrupted)
        pool.map([["echo", 1]] * 4)
    assert kinds(pool, *[["echo", 1]] * 50) == ["done"] * 50
    pool.close()


def _interrupted(self: Template) -> int:
    raise KeyboardInterrupt


def test_a_pool_is_of_no_use_in_a_fork(pool: WorkerPool) -> None:
    item = ["echo", 1]
    before = pool.map([item])
    child = os.fork()
    if child == 0:
        try:
            pool.close()
            pool.map([item])
        except RuntimeError as error:
            os._exit(0 if "after a fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.map([item]) == before
