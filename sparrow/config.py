"""Loads a recipe's config: a YAML file, the files it is based on, and the command line's overrides, strictly.

`recipe:` says which recipe a file is for, `base:` names a config (or a path, relative to the file) that is loaded
first. An override that changes a node's `_component_` replaces the node, since the arguments of the old component
mean nothing to the new one; everything else is merged. `${key}` stands for another value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparrow.checker import COMPONENT_KEY, Checker
from sparrow.errors import UserError
from sparrow.instantiate import Component, Positional
from sparrow.registry import did_you_mean, find_config

__all__ = ["Component", "Positional", "load_config", "load_tree", "to_yaml"]

T = TypeVar("T")
Tree = dict[str, Any]
COMMAND_LINE = "command line"
_LITERAL_DOLLAR = re.compile(r"(\\*)\$\{")  # to be escaped, and every backslash before it doubled
_REMOVED = object()  # in the place of a list's item, so that the other overrides' indices stay those of the files


@dataclass(frozen=True)
class Layer:
    """One source of values, later ones win; `name` is what messages call it."""

    name: str
    tree: Tree


def load_config(schema: type[T], name_or_path: str, overrides: Sequence[str] = ()) -> T:
    """An instance of the dataclass `schema` from a config's name or path and `key=value`, `~key` overrides.

    The keys `recipe` and `base` are the loader's own; `recipe` reaches the schema if that has such a field.

    Raises:
        UserError: one line for each problem, with the file (or `command line`), the dotted key and what would do.
    """
    tree, layers = _merged(name_or_path, overrides)
    if "recipe" not in {field.name for field in fields(schema)}:  # type: ignore[arg-type]
        tree.pop("recipe", None)
    checker = Checker()
    config = checker.schema(_resolved(tree, layers), schema)
    if checker.problems:
        raise UserError("\n".join(f"{_origin(p.key, layers)}: {p.key}: {p.message}" for p in checker.problems))
    return config


def load_tree(name_or_path: str, overrides: Sequence[str] = ()) -> Tree:
    """The merged tree as plain data, unchecked and with its `${...}` unresolved; for what needs no schema."""
    return _merged(name_or_path, overrides)[0]


def to_yaml(config: Any) -> str:
    """The effective config as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a tree; an empty dict or list is a value."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not children:
        yield prefix, node
    for name, child in children:
        yield from leaves(child, f"{prefix}.{name}" if prefix else str(name))


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return {COMPONENT_KEY: value.path, **_plain(value.kwargs)}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return _LITERAL_DOLLAR.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _merged(name_or_path: str, overrides: Sequence[str]) -> tuple[Tree, list[Layer]]:
    """The merged tree, and its layers from the file that was asked for to its last base, the command line first."""
    files = _file_layers(find_config(name_or_path))
    tree: Tree = {}
    for layer in reversed(files):
        tree = _merge(tree, layer.tree)
    for key in (override[1:] for override in overrides if override.startswith("~")):
        _remove(tree, key)
    command_line = _command_line([override for override in overrides if not override.startswith("~")])
    return _without_removed(_merge(tree, command_line)), [Layer(COMMAND_LINE, command_line), *files]


def _file_layers(path: Path, above: tuple[Path, ...] = ()) -> list[Layer]:
    """The file's own layer, then those of its bases."""
    if path.resolve() in above:
        raise UserError(f"{path}: base: the files are based on each other in a circle")
    tree = _read(path)
    base = tree.pop("base", None)
    if base is None:
        return [Layer(str(path), tree)]
    if not isinstance(base, str):
        raise UserError(f"{path}: base: must be the name or path of a config, not {base!r}")
    try:
        base_path = find_config(base, beside=path.parent)
    except UserError as error:
        raise UserError(f"{path}: base: {error}") from error
    return [Layer(str(path), tree), *_file_layers(base_path, (*above, path.resolve()))]


def _read(path: Path) -> Tree:
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not readable as YAML: {' '.join(str(error).split())}") from error
    tree = OmegaConf.to_container(node, resolve=False)
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path}: {'is empty' if not tree else 'must hold key: value pairs, not a list'}")
    return tree  # type: ignore[return-value]


def _command_line(overrides: Sequence[str]) -> Tree:
    """`a.b=value` strings as a tree; a later one wins."""
    tree: Tree = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"{COMMAND_LINE}: {override!r} is not key=value or ~key")
        _set(tree, key.split("."), _parse(key, text))
    return tree


def _parse(key: str, text: str) -> Any:
    """A value as YAML would read it; `None`, which YAML takes for a string, means null."""
    if text == "None":
        return None
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{COMMAND_LINE}: {key}: {text!r} is not readable as YAML; quote it") from error


def _set(tree: Tree, parts: list[str], value: Any) -> None:
    """Sets one leaf; a component may be given by its path alone (`loss=a.B`) and its arguments apart (`loss.x=1`)."""
    *parents, last = parts
    for part in parents:
        child = tree.get(part)
        if not isinstance(child, dict):
            child = {COMPONENT_KEY: child} if isinstance(child, str) else {}
            tree[part] = child
        tree = child
    if isinstance(value, str) and isinstance(tree.get(last), dict):
        tree[last][COMPONENT_KEY] = value
    else:
        tree[last] = value


def _merge(below: Any, above: Any) -> Any:
    """`above` over `below`; neither is changed. Indices (`rewards.0.weight`) reach into lists."""
    if isinstance(below, dict) and COMPONENT_KEY in below and isinstance(above, str):
        above = {COMPONENT_KEY: above}
    if isinstance(below, list) and isinstance(above, dict) and all(index.isdigit() for index in above):
        return _merge_list(below, {int(index): item for index, item in above.items()})
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    if above.get(COMPONENT_KEY, below.get(COMPONENT_KEY)) != below.get(COMPONENT_KEY):
        return above
    return {**below, **{key: _merge(below.get(key), item) for key, item in above.items()}}


def _merge_list(below: list[Any], above: dict[int, Any]) -> list[Any]:
    if max(above) >= len(below):
        raise UserError(f"{COMMAND_LINE}: index {max(above)} is beyond the list's {len(below)} items")
    return [_merge(item, above[index]) if index in above else item for index, item in enumerate(below)]


def _remove(tree: Any, key: str) -> None:
    """Deletes a mapping's key, or marks a list's item (`trackers.2`) as removed."""
    *parents, last = key.split(".")
    for part in parents:
        tree = _children(tree).get(part)
    if last not in _children(tree):
        hint = f"; the list has {len(tree)} items, from 0" if isinstance(tree, list) else ""
        raise UserError(
            f"{COMMAND_LINE}: ~{key}: there is no such key to remove{hint or did_you_mean(last, _children(tree))}"
        )
    if isinstance(tree, list):
        tree[int(last)] = _REMOVED
    else:
        del tree[last]


def _children(node: Any) -> Tree:
    """What a dotted key can go on with: the keys of a mapping, the indices of a list."""
    if isinstance(node, list):
        return {str(index): item for index, item in enumerate(node)}
    return {key: item for key, item in node.items() if isinstance(key, str)} if isinstance(node, dict) else {}


def _without_removed(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_removed(item) for key, item in node.items()}
    return [_without_removed(item) for item in node if item is not _REMOVED] if isinstance(node, list) else node


def _resolved(tree: Tree, layers: Sequence[Layer]) -> Any:
    """The tree with every `${key}` replaced by the value it stands for."""
    try:
        return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise UserError(f"{_origin(key, layers)}: {key}: {str(error).splitlines()[0]}") from error


def _origin(key: str, layers: Sequence[Layer]) -> str:
    """Name of the layer that gave the key's value; for a missing key, of that which gave its innermost parent."""
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        for layer in layers:
            if _has(layer.tree, parts[:depth]):
                return layer.name
    return next(layer.name for layer in layers if layer.name != COMMAND_LINE)


def _has(tree: Any, parts: Sequence[str]) -> bool:
    for part in parts:
        if isinstance(tree, str):
            return part == COMPONENT_KEY  # a component given by its path alone
        children = _children(tree)
        if part not in children:
            return False
        tree = children[part]
    return True
