"""The tests of published code data sets, in one form: TACO, LiveCodeBench, HumanEval+ and MBPP+."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Protocol

from sparrow.components.argument_types import example_arguments, typed_arguments
from sparrow.components.gold import Gold, OutsideDates, UnusableGold
from sparrow.components.row_fields import lookup
from sparrow.components.text_pickle import decode_text
from sparrow.errors import UserError
from sparrow.sandbox.inside.values import encode

# What EvalPlus allows where the expected value is a float and the task says nothing.
_FLOAT_TOLERANCE = 1e-6


class TacoTests:
    """TACO's `input_output`: JSON text with `inputs`, `outputs` and, for functions, `fn_name`.

    Expected values of functions stand in a list of one, as in APPS; where all of a task do, they are taken out of it.

    Args:
        max_tests: the first so many; None takes all.
    """

    def __init__(self, max_tests: int | None = None) -> None:
        self._max_tests = _at_least_one(max_tests)

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        content = _json(lookup(row, "input_output", where), "input_output")
        if not isinstance(content, dict):
            raise UnusableGold("input_output: no JSON object")
        inputs, outputs = _pairs(content.get("inputs"), content.get("outputs"), None)
        name, starter = content.get("fn_name"), lookup(row, "starter_code?", where)
        solutions = _json(lookup(row, "solutions?", where) or "[]", "solutions")
        programs = tuple(text for text in solutions if isinstance(text, str)) if isinstance(solutions, list) else ()
        if name:
            if not all(isinstance(arguments, list) for arguments in inputs):
                raise UnusableGold("inputs: the arguments of a function must be a list")
            if all(isinstance(value, list) and len(value) == 1 for value in outputs):
                outputs = [value[0] for value in outputs]
        inputs, outputs = inputs[: self._max_tests], outputs[: self._max_tests]
        if name:
            return _call(str(name), inputs, outputs, starter, programs)
        return _stdin([_lines(text) for text in inputs], [_lines(text) for text in outputs], starter, programs)


class LiveCodeBenchTests:
    """LiveCodeBench's public and private tests, on standard input or as calls of a method.

    Args:
        first_date, last_date: contests from and to these days, `2024-08-01`; the others are left out.
        max_tests: the first so many; None takes all.
    """

    def __init__(self, first_date: Any = None, last_date: Any = None, max_tests: int | None = None) -> None:
        self._first, self._last = _day("first_date", first_date, date.min), _day("last_date", last_date, date.max)
        if self._first > self._last:
            raise UserError(f"first_date: {first_date} is after last_date, {last_date}")
        self._max_tests = _at_least_one(max_tests)

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        day = _contest_day(lookup(row, "contest_date", where))
        if not self._first <= day <= self._last:
            raise OutsideDates(f"a contest of {day}, outside of first_date and last_date")
        public = _cases(_json(lookup(row, "public_test_cases", where), "public_test_cases"))
        private = _cases(_private(lookup(row, "private_test_cases", where)))
        cases = public + private
        inputs, outputs = _pairs(
            [case.get("input") for case in cases], [case.get("output") for case in cases], self._max_tests
        )
        styles = {case.get("testtype") for case in cases}
        starter = lookup(row, "starter_code?", where)
        if styles == {"stdin"}:
            return _stdin(inputs, outputs, starter, ())
        if styles != {"functional"}:
            raise UnusableGold(f"testtype: {sorted(map(str, styles))} is neither stdin nor functional")
        metadata = _json(lookup(row, "metadata", where), "metadata")
        name = metadata.get("func_name") if isinstance(metadata, dict) else None
        if not isinstance(name, str):
            raise UnusableGold("metadata: no func_name")
        arguments = [[_json(line, "input") for line in str(text).split("\n") if line.strip()] for text in inputs]
        return _call(name, arguments, [_json(text, "output") for text in outputs], starter, ())


class Solver(Protocol):
    """Runs the data set's own programs where they can do no harm: `sparrow.sandbox.Sandbox`."""

    def call_function(self, program: str, entry_point: str, list_of_args: Sequence[Sequence[Any]]) -> Sequence[Any]:
        """The value of the function for each list of arguments; where there is none, an object that says why."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class EvalPlusTests:
    """HumanEval+ and MBPP+ as EvalPlus releases them: inputs, and a canonical solution that says what is expected.

    Types that JSON has no form for are put back from the assertions in the prompt (`components/argument_types.py`), and
    written as `sparrow.sandbox.inside.values` does.

    Args:
        solver: runs it.
        skip: entry point -> why its task is left out: those that EvalPlus judges by a rule of its own.
    """

    def __init__(self, solver: Solver, skip: dict[str, str] | None = None) -> None:
        self._solver, self._skip = solver, skip or {}

    def __call__(self, row: Mapping[str, Any], where: str) -> Gold:
        prompt, solution, name = (
            str(lookup(row, key, where)) for key in ("prompt", "canonical_solution", "entry_point")
        )
        if name in self._skip:
            raise UnusableGold(self._skip[name])
        inputs = [*(lookup(row, "base_input", where) or []), *(lookup(row, "plus_input?", where) or [])]
        if not inputs or not all(isinstance(arguments, list) for arguments in inputs):
            raise UnusableGold("base_input, plus_input: no list of lists of arguments")
        examples = example_arguments(f"{lookup(row, 'assertion?', where) or ''}\n{prompt}", name)
        if examples:
            inputs = [typed_arguments(arguments, examples) for arguments in inputs]
        outputs = self._solver.call_function(prompt + solution, name, inputs)
        tolerance = float(lookup(row, "atol?", where) or 0)
        if not tolerance and any(map(_has_float, outputs)):
            tolerance = _FLOAT_TOLERANCE
        return _call(name, inputs, outputs, prompt, (prompt + solution,), tolerance)

    def close(self) -> None:
        self._solver.close()


def _call(
    name: str,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    starter: str | None,
    solutions: tuple[str, ...],
    tolerance: float = 0.0,
) -> Gold:
    given, expected = ([_encoded(value) for value in values] for values in (inputs, outputs))
    tests: dict[str, Any] = {"style": "call", "entry_point": name, "inputs": given, "outputs": expected}
    if tolerance:
        tests["tolerance"] = tolerance
    fields = {"entry_point": name, "starter_code": starter or f"def {name}(...):"}
    return Gold({"tests": tests} | ({"starter_code": starter} if starter else {}), fields, solutions)


def _stdin(inputs: list[str], outputs: list[str], starter: str | None, solutions: tuple[str, ...]) -> Gold:
    if not all(isinstance(text, str) for text in [*inputs, *outputs]):
        raise UnusableGold("tests: input and output must be text")
    tests = {"style": "stdin", "inputs": inputs, "outputs": outputs}
    return Gold({"tests": tests} | ({"starter_code": starter} if starter else {}), {}, solutions)


def _pairs(inputs: Any, outputs: Any, most: int | None) -> tuple[list[Any], list[Any]]:
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise UnusableGold("no tests, or not as many inputs as outputs")
    return inputs[:most], outputs[:most]


def _at_least_one(max_tests: int | None) -> int | None:
    if max_tests is not None and max_tests < 1:
        raise UserError(f"max_tests: {max_tests} must be at least 1")
    return max_tests


def _day(key: str, given: Any, otherwise: date) -> date:
    """A day without quotes is one already for YAML."""
    try:
        return date.fromisoformat(str(given)) if given is not None else otherwise
    except ValueError:
        raise UserError(f"{key}: {given!r} is no day; write it like 2024-08-01") from None


def _contest_day(value: Any) -> date:
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError:
        raise UnusableGold(f"contest_date: no day: {value!r:.40}") from None


def _lines(value: Any) -> Any:
    """Some tasks give their input as a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return value


def _cases(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(case, dict) for case in value):
        raise UnusableGold("test cases: no list of objects")
    return value


def _private(value: Any) -> Any:
    """Plain JSON in some copies."""
    if isinstance(value, str) and not value.lstrip().startswith("["):
        try:
            value = decode_text(value)
        except ValueError as error:
            raise UnusableGold(f"private_test_cases: {error}") from error
    return _json(value, "private_test_cases")


def _json(value: Any, name: str) -> Any:
    """Columns that hold JSON as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    # ValueError: also an integer with more digits than Python parses. RecursionError: nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise UnusableGold(f"{name}: not valid JSON: {str(error)[:80]}") from error


def _encoded(value: Any) -> Any:
    """As JSON, by `sparrow.sandbox.inside.values`; UnusableGold also for what stands where a value is missing."""
    try:
        return encode(value)
    except (TypeError, RecursionError) as error:
        raise UnusableGold(f"no value to compare: {value!r:.100}") from error


def _has_float(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_float, value))
    return isinstance(value, float)
