"""Types of arguments, put back from assertions as MBPP+ has them."""

from __future__ import annotations

from typing import Any

import pytest

from sparrow.components.argument_types import example_arguments, typed_arguments


@pytest.mark.parametrize(
    ("assertion", "given", "typed"),
    [
        ("assert set(f((3, 4),(5, 7))) == set((4,))", [[1], [2, 3]], [(1,), (2, 3)]),
        ("assert f([(1, 2), (3, 4)]) == 3", [[[1, 2], [3]]], [[(1, 2), (3,)]]),
        ("assert f([[1, 2], [3]]) == 3", [[[1, 2]]], [[[1, 2]]]),
        ("assert f((4, (7, (2, 4)), 6)) == 1", [[1, [2, [3, [4]]]]], [(1, (2, (3, (4,))))]),
        ("assert f([(1, 'a'), 'b'], 2) == 1", [["x", [1, "y"]], 3], [["x", (1, "y")], 3]),
        ("assert f(0, 1j) == 1.5", ["1.5", "2+1j"], [1.5, 2 + 1j]),
        ("assert f({1: (2, 3)}) == 1", [{"4": [5]}], [{4: (5,)}]),
        ("assert f('a') == 1", ["12"], ["12"]),
        ("assert f({1, 2}) == 1", [[3, 3]], [{3}]),
        ("assert f({1, 2}) == 1", [[[3]]], [[[3]]]),
        ("assert f([]) == 1", [[[1], "a"]], [[[1], "a"]]),
        ("assert f(1) == 1", [[1]], [[1]]),
    ],
)
def test_arguments_are_like_the_examples(assertion: str, given: list[Any], typed: list[Any]) -> None:
    examples = example_arguments(f'"""\nWrite it.\n{assertion}\n"""\n', "f")
    assert len(examples) == 1
    result = typed_arguments(given, examples)
    assert repr(result) == repr(typed)


def test_only_literal_calls_of_the_function_are_examples() -> None:
    lines = [
        "assert f(1) == g((2,))",
        "assert f(x) == 1",
        "assert f(",
        "assert f({[]: 1})",
        "assert f(\0)",
        "assert " + "(" * 300 + "f(1)",
        "assert f(" + "-" * 200_000 + "1)",
        "f((3,))",
        "  assert h.f(4)",
        "assert f(5) == f(6)",
    ]
    assert example_arguments("\n".join(lines), "f") == [[1], [5], [6]]
    assert typed_arguments([[1]], []) == [[1]]
