"""When two prompts are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.data import Example
from sparrow.components.duplicates import find_duplicates, fingerprint, gold_text, normalised, prompt_text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$.", "find x ."),
        ("a\\, b\\;c\\:d\\!e\\ f~g", "abcdefg"),
        ("caf\u00e9", "cafe\u0301"),
        ("STRASSE", "stra\u00dfe"),
        ("a\u00a0b\u2003c\n", "abc"),
    ],
)
def test_case_spacing_and_composition_do_not_count(one: str, other: str) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(("one", "other"), [("x+1", "x-1"), ("x^2", "x_2"), ("x\u00b2", "x2"), ("\\frac12", "frac12")])
def test_what_is_another_question(one: str, other: str) -> None:
    assert fingerprint(one) != fingerprint(other)


WORDS = st.text("abX1+=^{}(Äßé汉", max_size=20)


@given(
    st.lists(WORDS, max_size=5),
    st.lists(st.sampled_from([" ", "\n", "$", "\\,", "\u3000", "~"]), min_size=5, max_size=5),
)
def test_spacing_anywhere_does_not_count(words: list[str], spacing: list[str]) -> None:
    spaced = "".join(word + space for word, space in zip(words, spacing, strict=False))
    assert normalised(spaced) == normalised("".join(words))
    assert normalised(spaced.upper()) == normalised(spaced.upper().lower())


def test_the_fingerprint_does_not_change_with_versions() -> None:
    assert fingerprint("Find $x$.") == "ade87c858793cc3e"
    assert fingerprint("\ud800")  # half a character, as JSON can spell it


def test_all_messages_count() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt_text(messages) == "a\nb" and prompt_text("c") == "c"


def test_golds_are_compared_as_text_and_their_absence_is_no_conflict() -> None:
    assert gold_text({"answer": " 1 "}) == gold_text({"answer": "1", "level": 2})
    assert gold_text({"answer": None, "level": 1}) == gold_text({}) == ""
    assert gold_text({"tests": {"b": 1, "a": 2}}) == gold_text({"tests": {"a": 2, "b": 1}})
    found = find_duplicates([Example("a"), Example("A"), Example("b", {"answer": 1}), Example("b", {"answer": "1"})])
    assert (found.repeated, found.conflicting) == ({1}, {2, 3})
