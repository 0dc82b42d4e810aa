"""Components: the nodes of a config that name a class or function by `_component_`, and how they are found and built.

A component's constructor takes what stands in YAML, as keyword arguments. One that also takes something of the run
first (an optimizer: the parameters) is declared in the schema as `Annotated[Component, Positional(1)]`, and
gets it by `build(parameters)`.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from sparrow.errors import UserError
from sparrow.registry import did_you_mean


@dataclass(frozen=True)
class Positional:
    """In `Annotated[Component, Positional(n)]`: the component's first n parameters come from `Component.build`."""

    count: int


@dataclass(frozen=True)
class Component:
    """A validated component node.

    Attributes:
        path: dotted path of a class or function.
        kwargs: its keyword arguments; nested components are Components.
        key: where the node stands in the config, dotted.
    """

    path: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""

    def build(self, *args: Any) -> Any:
        """Imports and calls it, nested components first; `args` go before the keyword arguments."""
        kwargs = {name: _build(value) for name, value in self.kwargs.items()}
        return locate(self.path)(*args, **kwargs)


def _build(value: Any) -> Any:
    if isinstance(value, Component):
        return value.build()
    if isinstance(value, list | tuple):
        return type(value)(_build(item) for item in value)
    if isinstance(value, dict):
        return {key: _build(item) for key, item in value.items()}
    return value


def locate(path: str) -> Callable[..., Any]:
    """The class or function at a dotted path; modules in the working directory are found as well.

    Raises:
        UserError: no such module or attribute, a module that it needs is missing, or it cannot be called.
    """
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise UserError(f"{path!r} is not a dotted path, module.Name")
    if module_name.split(".")[0] == "torchtune":
        from sparrow.torchtune_adapter import apply_shim

        apply_shim()
    target = _get(_import(module_name), attribute, path)
    if not callable(target):
        raise UserError(f"{path!r} is a {type(target).__name__}, not a class or function")
    return target


def add_working_directory() -> None:
    """A console script, unlike `python -m`, does not find the user's own modules in the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def _import(name: str) -> Any:
    """The module, or the class where the dotted path goes through one (`module.Class.from_file`)."""
    add_working_directory()
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise UserError(f"cannot import {name}: {error}") from error
    parent, _, child = name.rpartition(".")
    if not parent:
        raise UserError(f"no module named {name!r}")
    return _get(_import(parent), child, name)


def _get(owner: Any, name: str, path: str) -> Any:
    if hasattr(owner, name):
        return getattr(owner, name)
    submodules = [module.name for module in pkgutil.iter_modules(getattr(owner, "__path__", []))]
    if owner.__name__ == "sparrow":  # an editable install's finder maps it, where pkgutil does not look
        submodules.append("components")
    if name in submodules:
        raise UserError(f"{path!r} is a module, not a class or function")
    public = [known for known in dir(owner) if not known.startswith("_")]
    raise UserError(
        f"{path!r} does not exist: no {name!r} in {owner.__name__}{did_you_mean(name, public + submodules)}"
    )
