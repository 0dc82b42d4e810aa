"""Every alarm by injected metrics: when it is raised, when it clears, what follows, what is saved."""

from __future__ import annotations

import math

import pytest

from sparrow.errors import UserError
from sparrow.training.alarms import FIRST_JUDGED, AlarmMonitor, AlarmRule, Alarms

GOOD = {
    "acceptance/p5": 0.95, "acceptance/tau": 0.91, "entropy": 1.0, "completions/clipped_ratio": 0.1, "grad_norm": 1.0,
    "engine/logprob_diff_mean": 0.05, "acceptance/nonfinite": 0.0, "rollout_corr/nonfinite": 0.0, "update/skipped": 0.0,
}  # fmt: skip
BAD = [
    ("p5", {"acceptance/p5": 0.90}),
    ("entropy", {"entropy": 0.29}),
    ("clipped_ratio", {"completions/clipped_ratio": 0.51}),
    ("grad_norm", {"grad_norm": 10.1}),
    ("logprob_diff", {"engine/logprob_diff_mean": 0.51}),
    ("nonfinite", {"acceptance/nonfinite": 1.0}),
    ("nonfinite", {"rollout_corr/nonfinite": 1.0}),
    ("nonfinite", {"loss/nonfinite": 0.001}),
    ("nonfinite", {"update/skipped": 1.0}),
    ("nonfinite", {"distill/skipped": 1.0}),
]


def monitor(**rules: AlarmRule | None) -> AlarmMonitor:
    """Past the steps that the running figures take."""
    made = AlarmMonitor(Alarms(**rules))
    for _ in range(FIRST_JUDGED):
        made.step(GOOD)
    return made


def raised(alarms: AlarmMonitor, metrics: dict[str, float]) -> set[str]:
    found, _ = alarms.step(metrics)
    return {name.removeprefix("alarm/") for name, value in found.items() if value}


@pytest.mark.parametrize(("name", "injected"), BAD)
def test_each_alarm_is_raised_by_its_metric_and_clears(name, injected):
    alarms = monitor(**{name: AlarmRule(patience=2)})
    assert raised(alarms, GOOD | injected) == set(), "patience"
    found, lines = alarms.step(GOOD | injected)
    assert {key for key, value in found.items() if value} == {f"alarm/{name}"}
    assert len(lines) == 1 and lines[0].startswith(f"alarm {name}: ") and "2 steps in a row" in lines[0]
    assert alarms.step(GOOD | injected)[1] == [], "one line when it changes, not one a step"
    assert raised(alarms, GOOD) == {name}, "it clears as patiently as it is raised"
    found, lines = alarms.step(GOOD)
    assert not any(found.values()) and len(lines) == 1 and lines[0].startswith(f"alarm {name} cleared: ")


@pytest.mark.parametrize("name", ["p5", "entropy", "clipped_ratio", "grad_norm", "logprob_diff", "nonfinite"])
def test_the_limit_itself_is_good(name):
    at_limit = {
        "p5": 0.91,
        "entropy": 0.3,
        "clipped_ratio": 0.5,
        "grad_norm": 10.0,
        "logprob_diff": 0.5,
        "nonfinite": 0,
    }
    metric = {alarm: next(iter(injected)) for alarm, injected in reversed(BAD)}[name]
    assert raised(monitor(**{name: AlarmRule(patience=1)}), GOOD | {metric: at_limit[name]}) == set()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["p5", "entropy", "clipped_ratio", "grad_norm", "logprob_diff"])
def test_what_is_not_finite_is_not_good(name, value):
    metric = next(key for alarm, injected in BAD for key in injected if alarm == name)
    harmless = (name == "p5" and value == math.inf) or (
        name in ("clipped_ratio", "logprob_diff") and value == -math.inf
    )
    assert (name in raised(monitor(**{name: AlarmRule(patience=1)}), GOOD | {metric: value})) is not harmless


def test_bad_steps_count_only_in_a_row():
    alarms, low = monitor(), GOOD | {"acceptance/p5": 0.5}
    assert all(raised(alarms, step) == set() for step in (low, low, GOOD, low, low, GOOD))
    assert [raised(alarms, low) for _ in range(3)] == [set(), set(), {"p5"}]


def test_a_step_without_the_metric_is_neither_good_nor_bad():
    alarms = monitor(p5=AlarmRule(patience=2))
    no_op = {"lr": 0.1}
    assert raised(alarms, GOOD | {"acceptance/p5": 0.1}) == raised(alarms, no_op) == set()
    assert raised(alarms, GOOD | {"acceptance/p5": 0.1}) == {"p5"}
    assert raised(alarms, no_op) == {"p5"}


def test_a_limit_in_the_config_goes_before_tau():
    low = GOOD | {"acceptance/p5": 0.85}
    assert raised(monitor(p5=AlarmRule(limit=0.8, patience=1)), low) == set()
    assert raised(monitor(p5=AlarmRule(patience=1)), low) == {"p5"}


def test_a_collapse_does_not_become_its_own_measure():
    alarms = monitor(entropy=AlarmRule(patience=1))
    assert all(raised(alarms, GOOD | {"entropy": 0.1}) == {"entropy"} for _ in range(100))


def test_a_gradient_that_stays_large_is_no_spike():
    alarms = monitor()
    assert raised(alarms, GOOD | {"grad_norm": 50.0}) == {"grad_norm"}
    assert [raised(alarms, GOOD | {"grad_norm": 50.0}) for _ in range(10)][-1] == set()


def test_the_first_steps_are_not_judged_by_a_past_that_is_not_there():
    alarms = AlarmMonitor(Alarms())
    assert all(raised(alarms, GOOD | {"grad_norm": norm}) == set() for norm in (1e-3, 100.0))


def test_actions():
    alarms = monitor(p5=AlarmRule(patience=1, action="dense"), nonfinite=AlarmRule(action="stop"), entropy=None)
    found, lines = alarms.step(GOOD | {"acceptance/p5": 0.1})
    assert alarms.fallback and found["alarm/fallback"] == 1.0 and not alarms.stopped_by
    assert lines[0].endswith("; the next rollouts are dense")
    assert "alarm/entropy" not in found, "turned off"
    alarms.step(GOOD | {"update/skipped": 1.0})
    assert alarms.stopped_by == ["nonfinite"] and not alarms.fallback, "p5 was good in that step"


def test_the_state_goes_on_where_it_was():
    rules = {"p5": AlarmRule(patience=2), "entropy": AlarmRule(patience=1, action="dense")}
    whole, first = monitor(**rules), monitor(**rules)
    for alarms in (whole, first):
        alarms.step(GOOD | {"acceptance/p5": 0.1, "entropy": 0.2})
    second = AlarmMonitor(Alarms(**rules))
    second.load_state_dict(first.state_dict())
    assert second.fallback
    for step in (GOOD | {"acceptance/p5": 0.1}, GOOD | {"entropy": 0.29}, GOOD | {"grad_norm": 11.0}, GOOD):
        assert whole.step(step) == second.step(step)


def test_a_run_that_was_stopped_can_go_on():
    rules = {"p5": AlarmRule(patience=2, action="stop")}
    before, after = monitor(**rules), AlarmMonitor(Alarms(**rules))
    low = GOOD | {"acceptance/p5": 0.1}
    before.step(low)
    before.step(low)
    assert before.stopped_by == ["p5"]
    after.load_state_dict(before.state_dict())
    assert after.stopped_by == []
    assert [bool(raised(after, low)) for _ in range(2)] == [False, True], "and has its patience again"


def test_patience_is_checked():
    with pytest.raises(UserError, match="patience: 0"):
        AlarmRule(patience=0)


@pytest.mark.parametrize(
    ("name", "limit", "words"),
    [
        ("p5", 86.0, "p5.limit 86.0 must be above 0 and at most 1; p5: null turns the alarm off"),
        ("p5", 0.0, "p5.limit 0.0"),
        ("entropy", 1.5, "entropy.limit 1.5 must be above 0 and at most 1"),
        ("clipped_ratio", 1.0, "clipped_ratio.limit 1.0 must be at least 0 and below 1"),
        ("grad_norm", 0.5, "grad_norm.limit 0.5 must be at least 1 and finite"),
        ("logprob_diff", math.inf, "logprob_diff.limit inf must be at least 0 and finite"),
        ("nonfinite", -1.0, "nonfinite.limit -1.0 must be at least 0 and finite"),
        ("p5", math.nan, "p5.limit nan"),
    ],
)
def test_a_limit_that_no_metric_could_pass_is_refused(name, limit, words):
    with pytest.raises(UserError, match=words):
        Alarms(**{name: AlarmRule(limit=limit)})


@pytest.mark.parametrize(("name", "limit"), [("p5", 1.0), ("clipped_ratio", 0.0), ("nonfinite", 0.0)])
def test_the_ends_at_which_an_alarm_can_be_raised_are_allowed(name, limit):
    assert raised(monitor(**{name: AlarmRule(limit=limit, patience=1)}), GOOD | dict(BAD)[name]) == {name}


def test_null_turns_all_alarms_off():
    alarms = AlarmMonitor(None)
    worst = {key: math.nan for _, injected in BAD for key in injected}
    assert alarms.step(worst) == ({"alarm/fallback": 0.0}, []) and alarms.stopped_by == []
