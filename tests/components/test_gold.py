"""Gold answers of worked solutions, and pickles that are read without being run."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.gold import BoxedAnswer, ColumnAnswer, HashAnswer, IntegerAnswer, UnusableGold, last_boxed
from sparrow.components.gold_tests import TacoTests
from sparrow.components.text_pickle import decode_text
from sparrow.errors import UserError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{\\sqrt{2}}}.", "\\frac{1}{\\sqrt{2}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{ \\text{a} }", "\\text{a}"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed {4}", "4"),
        ("$\\boxed 5$", "5"),
        ("\\fbox{6}", "6"),
        ("\\boxed{1} and \\boxed{2", None),
        ("\\boxed{1\\}", None),
        ("\\boxed{}", ""),
        ("\\boxed", None),
        ("none", None),
    ],
)
def test_the_last_box(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


BRACED = st.recursive(
    st.text("ab\\ ", max_size=3).map(lambda text: text.replace("\\", "\\{")),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
)


@given(BRACED, st.text("ab$ .", max_size=5))
def test_whatever_is_balanced_comes_out(content: str, after: str) -> None:
    assert last_boxed(f"so \\boxed{{{content}}}{after}") == content.strip()


@pytest.mark.parametrize(
    ("given", "answer"),
    [("025", "25"), ("-0", "0"), (" 7 ", "7"), (8, "8"), (9.0, "9"), ("10.00", "10"), ("+3", "3"), ("000", "0")],
)
def test_integers(given: Any, answer: str) -> None:
    assert IntegerAnswer("a")({"a": given}, "row 1").columns == {"answer": answer}


@pytest.mark.parametrize(
    "given", ["", " ", None, True, "1/2", "1e3", "1 000", "nan", float("nan"), 2.5, [1], "9" * 200]
)
def test_what_is_no_integer(given: Any) -> None:
    with pytest.raises(UnusableGold):
        IntegerAnswer("a")({"a": given}, "row 1")


def test_bounds_of_integers_are_inclusive() -> None:
    extractor = IntegerAnswer("a", 0, 999)
    assert [extractor({"a": value}, "").columns["answer"] for value in ("000", "999")] == ["0", "999"]
    for value in ("-1", "1000"):
        with pytest.raises(UnusableGold, match=f"{value} is not within 0 and 999"):
            extractor({"a": value}, "")


@pytest.mark.parametrize("extractor", [ColumnAnswer("b"), HashAnswer("b"), BoxedAnswer("b"), IntegerAnswer("b")])
def test_a_column_that_is_missing_is_the_configs_fault(extractor: Any) -> None:
    with pytest.raises(UserError, match="row 1: no column 'b'; there are 'a'"):
        extractor({"a": "1"}, "row 1")
    for nothing in (None, "", [], {}, True):
        with pytest.raises(UnusableGold):
            extractor({"b": nothing}, "row 1")


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


class Runs:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("text", ["", '[{"input": "1\\n"}]', "Grüße \U0001f600", "x" * 100_000])
def test_pickled_text_of_every_protocol_is_read(protocol: int, text: str) -> None:
    assert decode_text(packed(pickle.dumps(text, protocol))) == text


def hostile(folder: Path) -> list[bytes]:
    """Pickles that would leave a file `harmed` if they were run, and some that are no pickle of one text."""
    touch = f"touch {folder / 'harmed'}"
    return [
        pickle.dumps(Runs(os.system, touch)),
        pickle.dumps(["text", Runs(os.system, touch)]),
        pickle.dumps(Runs(eval, f"open({str(folder / 'harmed')!r}, 'w')")),
        f"cos\nsystem\n(S'{touch}'\ntR.".encode(),
        pickle.dumps("text")[:-1] + pickle.dumps(Runs(os.system, touch), 2)[2:],
        pickle.dumps(["text"]),
        pickle.dumps(("a", "b")),
        pickle.dumps(b"text"),
        pickle.dumps(1),
        pickle.dumps(None),
        pickle.dumps("text")[:-1],
        b"",
        b"]" * 10,
        b"\x80\x04\x8d" + b"\xff" * 8,
    ]


@pytest.mark.parametrize("index", range(14))
def test_no_other_pickle_is_read_or_run(tmp_path: Path, index: int) -> None:
    with pytest.raises(ValueError):
        decode_text(packed(hostile(tmp_path)[index]))
    assert not list(tmp_path.iterdir())


def test_what_is_packed_wrongly_or_too_large() -> None:
    good = packed(pickle.dumps("text"))
    for encoded in ("!", good[:-4], base64.b64encode(b"no zlib").decode(), good + "é"):
        with pytest.raises(ValueError):
            decode_text(encoded)
    bomb = packed(pickle.dumps("a" * 1_000_000))
    assert len(bomb) < 10_000
    with pytest.raises(ValueError, match="above 1000 bytes"):
        decode_text(bomb, max_bytes=1000)


def test_taco_outputs_are_unwrapped_only_where_all_of_the_task_are_lists_of_one() -> None:
    content = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[1], [2], [1, 3]]}
    gold = TacoTests(max_tests=2)({"input_output": json.dumps(content)}, "row 1")
    assert gold.columns["tests"]["outputs"] == [[1], [2]]
