"""The mathematics reward: its table of cases, its counts, and what hostile answers do to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.components.math_answer import MAX_ANSWER_CHARS, find_answer, tidy, too_much
from sparrow.components.math_reward import COUNTS, MathReward
from sparrow.components.math_rules import by_numbers
from sparrow.errors import UserError

from .math_cases import BOXED
from .math_collections import COLLECTIONS
from .math_responses import KNOWN_WRONG, WHOLE

FAMILIES = BOXED | COLLECTIONS


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    reward = MathReward(timeout=2.0, budget=60.0)
    yield reward
    reward.close()


def cases() -> list[tuple[str, str, str, int | str]]:
    boxed = [
        (family, rf"Hence \boxed{{{box}}}", gold, want) for family, rows in FAMILIES.items() for box, gold, want in rows
    ]
    return boxed + [(family, text, gold, want) for family, rows in WHOLE.items() for text, gold, want in rows]


def test_the_table_is_as_long_as_promised_and_has_no_case_twice() -> None:
    assert len({(text, gold) for _, text, gold, _ in cases()}) == len(cases()) >= 300
    assert {want for *_, want in cases()} == {0, 1, "none"}


@pytest.fixture(scope="module")
def verdicts(reward: MathReward) -> dict[tuple[str, str], int | str]:
    """Of all cases, in one call each for what has an answer."""
    rows = cases()
    values = reward([text for _, text, _, _ in rows], answer=[gold for _, _, gold, _ in rows])
    assert reward.counts["error"] == 0
    found = [find_answer(text) for _, text, _, _ in rows]
    return {
        (text, gold): "none" if answer is None else int(value)  # type: ignore[arg-type]
        for (_, text, gold, _), value, answer in zip(rows, values, found, strict=True)
    }


@pytest.mark.parametrize("family", [*FAMILIES, *WHOLE])
def test_family(family: str, verdicts: dict[tuple[str, str], int | str]) -> None:
    rows = [case for case in cases() if case[0] == family]
    assert rows
    wrong = [
        f"{text!r:.70} for {gold!r:.40}: {verdicts[text, gold]}"
        for _, text, gold, want in rows
        if verdicts[text, gold] != want
    ]
    assert not wrong, "\n" + "\n".join(wrong)


def test_known_wrong_cases_are_what_the_documents_say(reward: MathReward) -> None:
    values = reward([rf"\boxed{{{box}}}" for box, *_ in KNOWN_WRONG], answer=[gold for _, gold, *_ in KNOWN_WRONG])
    assert values == [float(today) for _, _, today, _ in KNOWN_WRONG]


def test_the_outcomes_are_counted_apart() -> None:
    reward = MathReward(timeout=1.0, budget=20.0, memory_mb=700)
    assert reward.counts == dict.fromkeys(COUNTS, 0)
    completions = [
        r"\boxed{\frac24}",
        r"\boxed{6}",
        "I do not know",
        r"\boxed{\sum_{k=1}^{999999999} \sin(k)^{k}}",
        r"\boxed{5",
    ]
    assert reward(completions, answer=["1/2", "5", "5", "1/2", "5"]) == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert reward.counts == {"correct": 1, "wrong": 1, "no_answer": 2, "timeout": 1, "error": 0}
    assert reward([], answer=[]) == []
    assert reward.counts == dict.fromkeys(COUNTS, 0)
    reward.close()


def test_an_exception_of_the_verifier_is_none_and_counted(reward: MathReward, monkeypatch: pytest.MonkeyPatch) -> None:
    # A verdict of the judge that nobody asks for: the wrong number of arguments raises in the worker.
    whole_map = reward._pool.map
    monkeypatch.setattr(reward._pool, "map", lambda items: whole_map([item[:2] for item in items]))
    assert reward([r"\boxed{\sqrt{9}}"], answer=["2"]) == [None]
    assert reward.counts["error"] == 1


def test_no_text_of_an_answer_buys_that_it_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparrow.components import math_judge

    def fails(gold: Any, answer: Any, **_: Any) -> bool:
        if answer in failing:
            raise TypeError("not comparable")
        return bool(gold == answer)

    monkeypatch.setattr(math_judge, "verify", fails)
    failing = [5]
    assert math_judge.by_mathematics("5", "2") is False
    failing = [5, 2]
    with pytest.raises(TypeError):
        math_judge.by_mathematics("5", "2")


def test_examples_without_a_gold_answer_are_not_applicable(reward: MathReward) -> None:
    assert reward([r"\boxed{1}", r"\boxed{1}", "x"], answer=["1", None, None]) == [1.0, None, None]
    assert sum(reward.counts.values()) == reward.counts["correct"] == 1
    assert reward.problems({"answer": [None, "1", ""]})[:2] == [None, None]
    assert reward(["x", r"\boxed{1}"], tests=[{}, {}]) == [None, None]
    assert sum(reward.counts.values()) == 0
    assert reward.problems({"tests": [{}, {}]}) == [None, None]


def test_gold_answers_are_text_numbers_or_lists_of_these(reward: MathReward) -> None:
    golds: list[Any] = [7, 0.5, ["7", r"\text{seven}"], 1e-07, -3]
    texts = ["7", "1/2", "seven", "10^{-7}", "−3"]
    assert reward([rf"\boxed{{{text}}}" for text in texts], answer=golds) == [1.0] * 5
    assert reward([r"\boxed{8}"], answer=[["7", "8"]]) == [1.0]
    for gold in (True, "", [], {"a": 1}, float("inf")):
        with pytest.raises(UserError, match="index 1"):
            reward(["1", "2"], answer=["1", gold])


def test_problems_name_gold_answers_that_cannot_be_used(reward: MathReward) -> None:
    bad: list[Any] = ["", [], r"\frac{", r"x \equiv", ["1", r"\sqrt{"], float("nan"), "(" * 60 + "1" + ")" * 60]
    good: list[Any] = [
        "1/2",
        7,
        r"\text{(A)}",
        "Evelyn",
        "3:30",
        "101_2",
        r"5\text{ cm}",
        ["1", "2"],
        r"[0,1)\cup(1,2]",
    ]
    found = reward.problems({"answer": bad + good, "id": list(range(len(bad + good)))})
    assert [reason is None for reason in found] == [False] * len(bad) + [True] * len(good)
    assert r"\\frac{" in str(found[2]) and "parsed" in str(found[2])


def test_usable_gold_answers_score_against_themselves(reward: MathReward) -> None:
    golds = sorted({gold for _, _, gold, _ in cases()})
    usable = [gold for gold, reason in zip(golds, reward.problems({"answer": golds}), strict=True) if reason is None]
    assert len(usable) >= len(golds) - 1
    assert reward([rf"\boxed{{{gold}}}" for gold in usable], answer=usable) == [1.0] * len(usable)


def test_answers_of_the_same_value_vote_together(reward: MathReward) -> None:
    groups = [
        [r"\boxed{0.5}", r"\boxed{\frac12}", "The answer is 2/4.", r"\boxed{x = 1/2}"],
        [r"\boxed{2\sqrt2}", r"\boxed{\sqrt{8}}"],
        [r"\boxed{1,2}", r"\boxed{2, 1}"],
        [r"\boxed{\text{Evelyn}}", r"\boxed{evelyn}"],
        [r"\boxed{7\text{ cm}}", r"\boxed{7}", r"\boxed{007}"],
    ]
    forms = [set(reward.answers(group)) for group in groups]
    assert [len(form) for form in forms] == [1] * len(groups)
    assert len(set.union(*forms)) == len(groups)
    assert reward.answers(["no idea", r"\boxed{9^{9^{9^9}}}"])[0] is None


def test_a_truncated_response_has_an_answer_only_in_a_box() -> None:
    assert find_answer("we get 3 and so", truncated=True) is None
    assert find_answer("we get 3 and so") == "3"
    assert find_answer(r"\boxed{3} and so", truncated=True) == "3"


def test_only_the_end_of_a_response_and_a_short_answer_are_read(reward: MathReward) -> None:
    padding = "word " * 10_000
    assert reward([padding + r"\boxed{5}", r"\boxed{5}" + padding], answer=["5", "5"]) == [1.0, 0.0]
    long_sum = "+".join(["1"] * MAX_ANSWER_CHARS)
    assert reward([rf"\boxed{{{long_sum}}}"], answer=[str(MAX_ANSWER_CHARS)]) == [0.0]
    assert reward.counts["wrong"] == 1


def test_length_and_depth_are_those_after_unicode_is_normalised() -> None:
    assert too_much("\ufdfa" * 100) and not too_much("\ufdfa" * 10)
    assert too_much("（" * 50 + "1" + "）" * 50)
    assert not too_much("１" * MAX_ANSWER_CHARS)


_INTEGERS = st.integers(-(10**6), 10**6)
_PLAIN = st.one_of(
    _INTEGERS.map(str),
    _INTEGERS.map(lambda value: f"{value:,}"),
    st.decimals(-1000, 1000, places=3).map(lambda value: f"{value:f}"),
    st.decimals(-1, 1, places=8).map(lambda value: f"{value:f}"),
    st.tuples(_INTEGERS, st.integers(1, 50)).map(lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"),
    st.tuples(st.integers(-9, 9), st.integers(1, 9)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
    st.sampled_from(["0.5", "0.50", ".5", "1/2", r"\dfrac{1}{2}", "0.333333", "1/3", "-0", "0.0", "00", "+1", "1.0"]),
)


@settings(max_examples=150)
@given(_PLAIN, _PLAIN, st.booleans())
def test_the_fast_path_never_disagrees_with_mathematics(answer: str, gold: str, same: bool) -> None:
    from sparrow.components.math_judge import by_mathematics

    ours, theirs = tidy(answer), tidy(answer if same else gold)
    quick = by_numbers(ours, theirs)
    assert quick is None or quick == by_mathematics(ours, theirs)


@settings(max_examples=300)
@given(st.text(alphabet=r"\boxedfrac{}<>/thinkanswer is:0123 ,.$#", max_size=80), st.booleans())
def test_any_text_has_an_answer_or_none(text: str, truncated: bool) -> None:
    answer = find_answer(text, truncated)
    assert answer is None or answer.strip()


@pytest.mark.parametrize("answer", ["i < 5", r"i \le 5", "(i, 5)", r"\max(i, 2)", "2i > 1"])
def test_an_order_of_what_may_be_imaginary_is_wrong_and_no_error(answer: str, reward: MathReward) -> None:
    assert reward([f"\\boxed{{{answer}}}"], answer=["5"]) == [0.0]
    assert reward.counts["error"] == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{3} \boxed 5.", "5"), (r"\boxed 5 \boxed{3}", "3"), (r"\boxed{a \boxed 5}", r"a \boxed 5"),
        (r"\boxed 5 \boxed{", None), (r"\boxed{2} \boxed", None), (r"{ \boxed{4} \boxed 7 }", "7"),
    ],
)  # fmt: skip
def test_boxes_with_and_without_braces(text: str, answer: str | None) -> None:
    assert find_answer(text) == answer
