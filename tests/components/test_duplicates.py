"""When two prompts are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.data import Example
from sparrow.components.duplicates import find_duplicates, fingerprint, gold_text, normalised, prompt_text
from sparrow.errors import UserError


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Find $x$.", "find x ."),
        ("a\\, b\\;c\\:d\\!e\\ f~g", "a b c de f g"),
        ("the $n$th of ( 1 , 2 )", "the nth of (1,2)"),
        ("caf\u00e9", "cafe\u0301"),
        ("STRASSE", "stra\u00dfe"),
        ("a\u00a0b\u2003c\n", "a b c"),
    ],
)
def test_case_spacing_and_composition_do_not_count(one: str, other: str) -> None:
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x+1", "x-1"),
        ("x^2", "x_2"),
        ("x\u00b2", "x2"),
        ("\\frac12", "frac12"),
        ("Add 1 2", "Add 12"),
        ("1\\,2", "12"),
        ("1~2", "12"),
        ("now here", "nowhere"),
    ],
)
def test_what_is_another_question(one: str, other: str) -> None:
    assert fingerprint(one) != fingerprint(other)


PIECES = st.sampled_from(["a", "X", "1", "+", "^", "{", "Ä", "ß", "汉", "_"])
SPACES = st.sampled_from([" ", "\n", "\\,", "\u3000", "~", " $ ", "$ \\!"])


@given(st.lists(st.tuples(PIECES, SPACES, SPACES), max_size=6))
def test_which_space_it_is_does_not_count(parts: list[tuple[str, str, str]]) -> None:
    """Beside what is neither letter nor digit, not even whether there is one."""
    one = "".join(piece + space for piece, space, _ in parts)
    other = "".join(space + piece for piece, _, space in parts)
    assert normalised(one) == normalised(other)
    marked = "".join(f"({piece}){space}" for piece, space, _ in parts)
    assert normalised(marked) == normalised("".join(f"({piece})" for piece, _, _ in parts))
    assert normalised(one.upper()) == normalised(one.upper().lower())


def test_the_fingerprint_does_not_change_with_versions() -> None:
    assert fingerprint("Find $x$.") == "5691652bb2733b8b"
    assert fingerprint("\ud800")  # half a character, as JSON can spell it


def test_all_messages_count() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert prompt_text(messages) == "a\nb" and prompt_text("c") == "c"


def test_golds_are_compared_as_text_and_their_absence_is_no_conflict() -> None:
    assert gold_text({"answer": " 1 "}) == gold_text({"answer": "1", "level": 2})
    assert gold_text({"answer": None, "level": 1}) == gold_text({}) == ""
    assert gold_text({"tests": {"b": 1, "a": 2}}) == gold_text({"tests": {"a": 2, "b": 1}})
    found = find_duplicates([Example("a"), Example("A"), Example("b", {"answer": 1}), Example("b", {"answer": "2"})])
    assert (found.repeated, found.conflicting) == ({1}, {2, 3})


def test_a_number_and_its_text_are_one_gold() -> None:
    assert gold_text({"answer": 2}) == gold_text({"answer": " 2"}) == gold_text({"answer": 2.0})
    assert gold_text({"answer": 2}) == gold_text({"ground_truth": "2"}) != gold_text({"answer": 2.5})
    examples = [Example("b", {"answer": 1}), Example("b", {"answer": "1"})]
    assert find_duplicates(examples).repeated == {1}


def test_the_gold_column_can_have_another_name() -> None:
    examples = [Example("b", {"label": 1}), Example("b", {"label": 2})]
    assert find_duplicates(examples).repeated == {1}
    assert find_duplicates(examples, "label").conflicting == {0, 1}
    assert find_duplicates([Example("b", {"ground_truth": n}) for n in (1, 2)]).conflicting == {0, 1}
    with pytest.raises(UserError, match="gold: no column 'lable' goes on to the rewards; there are label"):
        find_duplicates(examples, "lable")
