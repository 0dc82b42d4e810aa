"""Checks plain data, as YAML holds it, against type annotations, and converts it to what the annotations say.

All problems are collected, each with the dotted key it is about, so that a user mends a config in one round.
"""

from __future__ import annotations

import inspect
from collections import abc
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sparrow.errors import UserError
from sparrow.instantiate import Component, Positional, locate
from sparrow.registry import did_you_mean

COMPONENT_KEY = "_component_"
REQUIRED = "???"
_PLAIN = (bool, int, float, str, NoneType)
_LISTS = (list, tuple, abc.Sequence, abc.Iterable, abc.Collection)
_DICTS = (dict, abc.Mapping, abc.MutableMapping)
_UNCHECKED = (Any, object, inspect.Parameter.empty)


@dataclass(frozen=True)
class Problem:
    key: str
    message: str


@dataclass
class Checker:
    """Converts values by annotation; what does not fit is added to `problems` and yields None."""

    problems: list[Problem] = field(default_factory=list)

    def value(self, value: Any, annotation: Any, key: str) -> Any:
        """The value as the annotation wants it (int becomes float, list becomes tuple, node becomes Component)."""
        origin, arguments = get_origin(annotation), get_args(annotation)
        if value == REQUIRED:
            return self._reject(key, "must be given (the config leaves it open with ???)")
        if origin is Annotated:
            return self._annotated(value, arguments, key)
        if origin in (Union, UnionType):
            return self._union(value, annotation, key)
        if annotation is Component or _is_component(value):
            return self._component(value, annotation, key)
        if origin is Literal:
            return value if _is_one_of(value, arguments) else self._mismatch(value, annotation, key)
        if (origin or annotation) in _LISTS:
            return self._list(value, annotation, key)
        if (origin or annotation) in _DICTS:
            return self._dict(value, annotation, key)
        if is_dataclass(annotation):
            return self.schema(value, annotation, key)
        return self._plain(value, annotation, key)

    def schema(self, node: Any, schema: Any, key: str = "") -> Any:
        """An instance of the dataclass `schema` from a dict with exactly its fields."""
        if not isinstance(node, dict):
            return self._mismatch(node, schema, key)
        hints = get_type_hints(schema, include_extras=True)
        optional = {f.name for f in fields(schema) if f.default is not MISSING or f.default_factory is not MISSING}
        known = [f.name for f in fields(schema) if f.init]
        before = len(self.problems)
        self._names(node, known, [name for name in known if name not in optional], key)
        values = {name: self.value(node[name], hints[name], _join(key, name)) for name in known if name in node}
        if len(self.problems) > before:
            return None
        try:
            return schema(**values)
        except UserError as error:  # from a check of several fields in the schema's __post_init__
            return self._reject(key, str(error))

    def component(self, node: Any, key: str, positional: int = 0) -> Component | None:
        """A Component from a node, checked against the signature of its class or function."""
        if isinstance(node, str):
            node = {COMPONENT_KEY: node}
        path, given = node[COMPONENT_KEY], {name: value for name, value in node.items() if name != COMPONENT_KEY}
        try:
            parameters = _parameters(locate(path))[positional:] if isinstance(path, str) else None
        except UserError as error:
            return self._reject(_join(key, COMPONENT_KEY), str(error))
        if parameters is None:
            return self._mismatch(path, str, _join(key, COMPONENT_KEY))
        return Component(path, self._kwargs(given, parameters, key), key)

    def _kwargs(self, given: dict[str, Any], parameters: list[inspect.Parameter], key: str) -> dict[str, Any]:
        named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        required = [name for name, parameter in named.items() if parameter.default is parameter.empty]
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names(given, [*named, *(given if takes_any else ())], required, key)
        annotations = {name: named[name].annotation if name in named else Any for name in given}
        return {name: self.value(value, annotations[name], _join(key, name)) for name, value in given.items()}

    def _names(self, node: dict[str, Any], known: list[str], required: list[str], key: str) -> None:
        """Unknown and missing names; a missing one that an unknown one seems to mean is not reported twice."""
        unknown = {name: did_you_mean(str(name), known) for name in node if name not in known}
        for name, hint in unknown.items():
            self._reject(_join(key, name), f"unknown key{hint or ', known here: ' + (', '.join(known) or 'none')}")
        for name in required:
            if name not in node and not any(repr(name) in hint for hint in unknown.values()):
                self._reject(_join(key, name), "missing key")

    def _annotated(self, value: Any, arguments: tuple[Any, ...], key: str) -> Any:
        positional = next((extra.count for extra in arguments[1:] if isinstance(extra, Positional)), 0)
        if arguments[0] is Component and (_is_component(value) or isinstance(value, str)):
            return self.component(value, key, positional)
        return self.value(value, arguments[0], key)

    def _union(self, value: Any, annotation: Any, key: str) -> Any:
        """The first member that fits; else the problems of the member that got deepest into the value."""
        failures = []
        for member in get_args(annotation):
            trial = Checker()
            converted = trial.value(value, member, key)
            if not trial.problems:
                return converted
            failures.append(trial.problems)
        deepest = max(failures, key=lambda problems: max(len(problem.key) for problem in problems))
        if isinstance(value, _PLAIN) and all(problem.key == key for problem in deepest):
            return self._mismatch(value, annotation, key)
        self.problems += deepest
        return None

    def _component(self, value: Any, annotation: Any, key: str) -> Any:
        kind = get_origin(annotation) or annotation
        if kind in (*_PLAIN, *_LISTS, *_DICTS, Path, Literal) or not (isinstance(value, str) or _is_component(value)):
            return self._mismatch(value, annotation, key)
        component = self.component(value, key)
        if component is not None and not _may_build(locate(component.path), kind):
            return self._reject(key, f"must be a {kind.__name__}, which {component.path} is not")
        return component

    def _list(self, value: Any, annotation: Any, key: str) -> Any:
        arguments, is_tuple = get_args(annotation), (get_origin(annotation) or annotation) is tuple
        if not isinstance(value, list):
            return self._mismatch(value, annotation, key)
        if is_tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                return self._mismatch(value, annotation, key)
            items: tuple[Any, ...] = arguments
        else:
            items = (arguments[0] if arguments else Any,) * len(value)
        checked = [self.value(v, item, _join(key, i)) for i, (v, item) in enumerate(zip(value, items, strict=True))]
        return tuple(checked) if is_tuple else checked

    def _dict(self, value: Any, annotation: Any, key: str) -> Any:
        if not isinstance(value, dict):
            return self._mismatch(value, annotation, key)
        of_key, of_value = get_args(annotation) or (Any, Any)
        return {
            self.value(name, of_key, key): self.value(item, of_value, _join(key, name)) for name, item in value.items()
        }

    def _plain(self, value: Any, annotation: Any, key: str) -> Any:
        if annotation in _UNCHECKED or not isinstance(annotation, type):
            return self._unchecked(value, key)
        if annotation is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if annotation is Path and isinstance(value, str):
            return Path(value)
        fits = type(value) is annotation if annotation in _PLAIN else _is_instance(value, annotation)
        return value if fits else self._mismatch(value, annotation, key)

    def _unchecked(self, value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [self.value(item, Any, _join(key, index)) for index, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: self.value(item, Any, _join(key, name)) for name, item in value.items()}
        return value

    def _mismatch(self, value: Any, annotation: Any, key: str) -> Any:
        hint = ""
        if annotation is Component:
            hint = "; that is a node with _component_: module.Name"
        elif isinstance(value, str) and value.lower() == "none":
            hint = "; YAML's word for none is null"
        elif annotation is str and isinstance(value, int | float):
            hint = "; quote it to make it a string"
        return self._reject(key, f"must be {describe(annotation)}, not {value!r}{hint}")

    def _reject(self, key: str, message: str) -> Any:
        self.problems.append(Problem(key, message))
        return None


def describe(annotation: Any) -> str:
    """An annotation in the words of a message: `float or null`, `one of 'a', 'b'`, `list[int]`, `Component`."""
    if get_origin(annotation) is Annotated:
        return describe(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(describe(member) for member in get_args(annotation))
    if annotation is NoneType:
        return "null"
    if annotation is Path:
        return "a path"
    if is_dataclass(annotation) and annotation is not Component:
        return f"a mapping with the keys {', '.join(f.name for f in fields(annotation))}"
    if get_args(annotation):
        kind = getattr(get_origin(annotation), "__name__", str(get_origin(annotation)))
        return f"{kind}[{', '.join('...' if a is Ellipsis else describe(a) for a in get_args(annotation))}]"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _is_component(value: Any) -> bool:
    return isinstance(value, dict) and COMPONENT_KEY in value


def _may_build(target: Any, annotation: Any) -> bool:
    """False where one class is wanted and another named; a function's result and a protocol are not checked."""
    if annotation is Component or annotation in _UNCHECKED or _is_protocol(annotation):
        return True
    return not (isinstance(annotation, type) and isinstance(target, type)) or issubclass(target, annotation)


def _is_protocol(annotation: Any) -> bool:
    return bool(getattr(annotation, "_is_protocol", False))


def _is_instance(value: Any, annotation: type) -> bool:
    return not _is_protocol(annotation) and isinstance(value, annotation)


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _parameters(target: Any) -> list[inspect.Parameter]:
    """The parameters of a class or function; of one without a signature (some builtins): any keyword."""
    try:
        return list(inspect.signature(target, eval_str=True).parameters.values())
    except NameError:  # annotations imported under TYPE_CHECKING only: the names can still be checked
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]
