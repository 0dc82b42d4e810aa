from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparrow.errors import UserError
from sparrow.training.run_state import (
    BEST,
    MARKER,
    KeepBest,
    latest_run_state,
    own_settings,
    resolve_resume,
    save_run_state,
    would_be_kept,
)


def write_text(text: str):
    def write(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state").write_text(text)

    return write


def save(directory: Path, step: int, text: str = "content", keep_last: int = 3) -> Path:
    return save_run_state(directory, step, write_text(text), keep_last)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_save_stands_under_its_step(tmp_path):
    path = save(tmp_path / "new", 4, "four")
    assert path == tmp_path / "new" / "step_000004"
    assert (path / "model" / "weights").read_text() == "four"
    assert latest_run_state(tmp_path / "new") == path
    assert names(tmp_path / "new") == ["step_000004"]


def test_the_last_saves_are_kept(tmp_path):
    for step in (2, 4, 999_998, 1_000_000):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["step_1000000", "step_999998"]
    assert latest_run_state(tmp_path) == tmp_path / "step_1000000"
    save(tmp_path, 1_000_002, keep_last=1)
    assert names(tmp_path) == ["step_1000002"]


def test_only_complete_saves_count_towards_keep_last(tmp_path):
    save(tmp_path, 1)
    shutil.copytree(tmp_path / "step_000001", tmp_path / "step_000002")
    (tmp_path / "step_000002" / MARKER).unlink()
    save(tmp_path, 3, keep_last=2)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003"]


def test_after_going_back_the_abandoned_later_saves_do_not_count(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    save(tmp_path, 15, keep_last=2)
    assert latest_run_state(tmp_path) == tmp_path / "step_000015"
    assert names(tmp_path) == ["step_000015", "step_000030"]


def test_a_save_of_the_same_step_replaces(tmp_path):
    save(tmp_path, 1, "old")
    path = save(tmp_path, 1, "new")
    assert (path / "state").read_text() == "new"
    assert names(tmp_path) == ["step_000001"]


def test_a_damaged_save_of_the_same_step_is_replaced(tmp_path):
    (save(tmp_path, 1) / "state").unlink()
    assert (save(tmp_path, 1, "new") / "state").read_text() == "new"
    assert names(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("damage", ["no marker", "empty marker", "truncated file", "missing file"])
def test_damaged_saves_are_passed_over(tmp_path, damage):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    if damage == "no marker":
        (bad / MARKER).unlink()
    elif damage == "empty marker":
        (bad / MARKER).write_text("")
    elif damage == "truncated file":
        os.truncate(bad / "model" / "weights", 3)
    else:
        (bad / "state").unlink()
    assert latest_run_state(tmp_path) == good
    with pytest.raises(UserError, match=f"{bad} is no complete run state.*{good}"):
        resolve_resume(bad, tmp_path)


def test_a_failing_write_leaves_the_former_save(tmp_path):
    good = save(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "state").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_run_state(tmp_path, 2, fail, keep_last=1)
    assert latest_run_state(tmp_path) == good
    save(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step_000003"]


KILLED_WHILE_WRITING = """
import sys
from pathlib import Path
from sparrow.training.run_state import save_run_state

def write(folder):
    (folder / "state").write_text("half of it")
    print("writing", flush=True)
    sys.stdin.read()

save_run_state(Path(sys.argv[1]), 2, write, keep_last=1)
"""

KILLED_AT_RENAME = """
import os, signal, sys
from pathlib import Path
from sparrow.training import run_state

renames, real_rename = [], os.rename

def rename(source, target):
    if len(renames) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    renames.append(target)
    real_rename(source, target)

os.rename = rename
run_state.save_run_state(Path(sys.argv[1]), 1, lambda folder: (folder / "state").write_text("new"), keep_last=1)
"""


def test_a_process_killed_while_writing(tmp_path):
    good = save(tmp_path, 1)
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert names(tmp_path) == ["step_000001", "step_000002.tmp"]
    assert latest_run_state(tmp_path) == good
    assert resolve_resume("auto", tmp_path) == good
    save(tmp_path, 2, "whole", keep_last=1)
    assert names(tmp_path) == ["step_000002"]


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_process_killed_while_replacing_the_only_save(tmp_path, renames):
    save(tmp_path, 1, "old", keep_last=1)
    process = subprocess.run([sys.executable, "-c", KILLED_AT_RENAME, str(tmp_path), str(renames)], check=False)
    assert process.returncode == -signal.SIGKILL
    newest = latest_run_state(tmp_path)
    assert newest is not None
    assert (newest / "state").read_text() == ("new" if renames == 2 else "old")
    save(tmp_path, 1, "next", keep_last=1)
    assert names(tmp_path) == ["step_000001"]


def test_resolving(tmp_path):
    assert resolve_resume(None, tmp_path) is None
    assert resolve_resume("auto", tmp_path / "nowhere") is None
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    assert resolve_resume("auto", tmp_path) == second
    assert resolve_resume(str(first), tmp_path) == first
    with pytest.raises(UserError, match="nowhere is no complete run state"):
        resolve_resume("nowhere", tmp_path)


def test_keep_last_below_one_is_refused(tmp_path):
    with pytest.raises(UserError, match="keep_last must be at least 1, not 0"):
        save(tmp_path, 1, keep_last=0)


def scored(directory: Path, step: int, value: float | None, count: int = 1, keep_last: int = 1) -> None:
    save_run_state(directory, step, write_text("content"), keep_last, KeepBest("val", count), value)


def test_the_best_save_stays_and_a_link_names_it(tmp_path):
    for step, value in enumerate([0.1, 0.5, 0.3, None, float("nan"), 0.5], start=1):
        scored(tmp_path, step, value)
    assert names(tmp_path) == [BEST, "step_000002", "step_000006"], "of equal ones the older stays"
    assert os.readlink(tmp_path / BEST) == "step_000002"
    assert (resolve_resume(tmp_path / BEST, tmp_path) / "state").read_text() == "content"
    assert latest_run_state(tmp_path) == tmp_path / "step_000006"
    scored(tmp_path, 7, 0.6)
    assert names(tmp_path) == [BEST, "step_000007"]
    assert os.readlink(tmp_path / BEST) == "step_000007"


def test_several_best_saves(tmp_path):
    for step, value in enumerate([0.4, 0.1, 0.5, 0.2], start=1):
        scored(tmp_path, step, value, count=2)
    assert names(tmp_path) == [BEST, "step_000001", "step_000003", "step_000004"]
    assert os.readlink(tmp_path / BEST) == "step_000003"


def test_which_value_is_worth_a_save(tmp_path):
    best = KeepBest("val", 2)
    assert would_be_kept(tmp_path, best, -1.0), "there is none yet"
    scored(tmp_path, 1, 0.4, count=2)
    assert would_be_kept(tmp_path, best, 0.1)
    scored(tmp_path, 2, 0.2, count=2)
    assert [would_be_kept(tmp_path, best, value) for value in (0.1, 0.2, 0.3, None, float("nan"))] == [
        False, False, True, False, False,
    ]  # fmt: skip
    assert would_be_kept(tmp_path, KeepBest("other", 1), 0.0), "values of another metric do not count"


def test_without_best_saves_the_link_goes(tmp_path):
    scored(tmp_path, 1, 0.4)
    save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_000002"]


KILLED_WHILE_PRUNING = """
import os, signal, sys
from pathlib import Path
from sparrow.training import run_state

def discard(save):
    os.kill(os.getpid(), signal.SIGKILL)

run_state._discard = discard
write = lambda folder: (folder / "state").write_text("new")
run_state.save_run_state(Path(sys.argv[1]), 2, write, 1, run_state.KeepBest("val", 1), 0.9)
"""


def test_the_link_names_a_complete_save_also_where_pruning_is_cut_short(tmp_path):
    scored(tmp_path, 1, 0.4)
    process = subprocess.run([sys.executable, "-c", KILLED_WHILE_PRUNING, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    assert names(tmp_path) == [BEST, "step_000001", "step_000002"]
    assert (resolve_resume(tmp_path / BEST, tmp_path) / "state").read_text() == "new"


def test_an_optimizer_keeps_its_own_settings():
    weight = torch.nn.Parameter(torch.ones(3))
    saved = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    weight.sum().backward()
    saved.step()
    optimizer = torch.optim.AdamW([weight], lr=0.2, weight_decay=0.0)
    with own_settings(optimizer):
        optimizer.load_state_dict(saved.state_dict())
    assert [optimizer.param_groups[0][key] for key in ("lr", "weight_decay")] == [0.2, 0.0]
    assert torch.equal(optimizer.state[weight]["exp_avg"], saved.state[weight]["exp_avg"])
