"""Types that JSON loses, put back by example: MBPP+ has its inputs as JSON, its assertions have them as Python."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any


def example_arguments(assertions: str, function: str) -> list[list[Any]]:
    """The arguments of each call of the function in lines that begin with `assert`, where they are literals."""
    lines = [line.strip() for line in assertions.splitlines()]
    return [call for line in lines if line.startswith("assert") for call in _calls(line, function)]


def _calls(line: str, function: str) -> Iterator[list[Any]]:
    try:
        tree = ast.parse(line)
    # No Python after all; a null character; nested too deep, of which the parser says MemoryError from some depth on.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            try:
                yield [ast.literal_eval(argument) for argument in node.args]
            except (
                ValueError,
                TypeError,
                RecursionError,
                MemoryError,
            ):  # a call with something else than literals is no example
                continue


def typed_arguments(arguments: Sequence[Any], examples: Sequence[Sequence[Any]]) -> list[Any]:
    """The arguments with the types of the examples' in the same place.

    A list becomes a tuple or set where the examples have one, at any depth, and text a number. A list within that no
    example has there is like the one around it.
    """
    return [
        _like(value, [call[index] for call in examples if index < len(call)]) for index, value in enumerate(arguments)
    ]


def _like(value: Any, examples: Sequence[Any]) -> Any:
    if isinstance(value, list):
        example = next((example for example in examples if isinstance(example, list | tuple | set)), None)
        if example is None:
            return value
        if isinstance(example, set) and any(isinstance(item, list | dict) for item in value):
            return value  # no set can hold them
        within = [item for outer in examples if isinstance(outer, list | tuple | set) for item in outer]
        return type(example)(_like(item, [*within, example]) for item in value)
    if isinstance(value, dict):
        dicts = [example for example in examples if isinstance(example, dict)]
        keys, values = [key for one in dicts for key in one], [item for one in dicts for item in one.values()]
        return {_like(key, keys): _like(item, values) for key, item in value.items()}
    numbers = [example for example in examples if isinstance(example, int | float | complex)]
    if isinstance(value, str) and numbers and len(numbers) == len(examples):
        return _number(value, any(isinstance(example, complex) for example in numbers))
    return value


def _number(text: str, is_complex: bool) -> Any:
    try:
        number = complex(text)
    except ValueError:
        return text
    if is_complex or number.imag:
        return number
    return int(number.real) if number.real.is_integer() else number.real
