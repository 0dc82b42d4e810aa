"""Alarms in the loop: a run that stops itself, and one that falls back to dense rollouts."""

from __future__ import annotations

import os
import subprocess
import sys

from sparrow.launch import EXIT_ALARM
from sparrow.recipes import sparrow_grpo
from sparrow.training.run_state import latest_run_state

from .conftest import metrics

FOUR_PAGES = [
    "kv_cache.budget={_component_: sparrow.components.budget.FixedBudget, pages: 4}",
    "alarms.p5.patience=2",
    "validation=null",
    "steps=6",
]


def test_four_pages_trip_the_alarm_and_the_run_stops_with_a_save(arguments, tmp_path, capsys):
    assert sparrow_grpo.main(arguments(*FOUR_PAGES, "alarms.p5.action=stop")) == EXIT_ALARM == 3
    printed, errors = capsys.readouterr()
    assert "reward   0." in printed and f"picture  {tmp_path / 'run' / 'run.png'}" in printed
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000
    assert "step 2: alarm p5: 0." in errors and "error: alarm p5 stopped the run after step 2" in errors
    rows = metrics(tmp_path / "run")
    assert [row["alarm/p5"] for row in rows] == [0.0, 1.0]
    save = latest_run_state(tmp_path / "run" / "checkpoints")
    assert save is not None and save.name == "step_000002"
    # Whoever resumes it wants to go on: with a budget that holds, it does.
    going_on = ["validation=null", "steps=3", "resume=auto", "alarms.p5.action=stop", "alarms.p5.limit=0.5"]
    assert sparrow_grpo.main(arguments(*going_on)) == 0
    assert metrics(tmp_path / "run")[-1]["alarm/p5"] == 0.0


def test_all_alarms_off(grpo):
    rows = grpo(*[override for override in FOUR_PAGES if "alarms" not in override], "steps=3", "alarms=null")
    assert all([key for key in row if key.startswith("alarm/")] == ["alarm/fallback"] for row in rows)


def test_several_processes_stop_together(arguments, tmp_path):
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_grpo"]
    stopping = arguments(*FOUR_PAGES, "alarms.p5.action=stop")
    done = subprocess.run(
        [*command, *stopping], capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == EXIT_ALARM, done.stderr
    assert done.stderr.count("error: alarm p5 stopped the run") == 1 and "Traceback" not in done.stderr
    assert latest_run_state(tmp_path / "run" / "checkpoints") is not None


def test_dense_rollouts_until_the_alarm_clears(grpo, capsys):
    lora = "distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001, rank: 4}"
    rows = grpo(*FOUR_PAGES, "alarms.p5.action=dense", lora)
    assert [row["alarm/fallback"] for row in rows] == [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], "two bad, two dense, two bad"
    for number, row in enumerate(rows):
        dense = number in (2, 3)
        assert (row["budget/kv_read_ratio"] == 1.0) is dense
        assert (row["acceptance/p5"] > 0.999) is dense, "the adapter is off as well"
        assert ("distill/kl" in row) is not dense
    assert "step 4: alarm p5 cleared: 1 " in capsys.readouterr().err
