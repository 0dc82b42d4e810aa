"""The recipes and configs that come with Sparrow, found by looking at the files: nothing is imported or parsed whole.

A recipe is a module of `sparrow.recipes` that can be run; the first line of its docstring describes it. A config is a
YAML file below `recipes/configs` whose `recipe:` line, or that of its `base:`, says which recipe it is for; its first
comment line describes it. A YAML file without either (a budget schedule) is data: it can be copied, but is not listed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from sparrow.errors import UserError


@dataclass(frozen=True)
class Recipe:
    name: str
    path: Path
    description: str

    @property
    def module(self) -> str:
        return f"sparrow.recipes.{self.name}"


@dataclass(frozen=True)
class Config:
    """`recipe` is None for a YAML file that is no recipe's config."""

    name: str
    path: Path
    recipe: str | None
    description: str


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the closest known name, or nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def recipes_dir() -> Path:
    """The folder of `sparrow.recipes`."""
    spec = find_spec("sparrow.recipes")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def recipes() -> tuple[Recipe, ...]:
    """All recipes, sorted by name."""
    paths = [path for path in sorted(recipes_dir().glob("*.py")) if _first_match(r"^(if __name__ ==.*)", path)]
    return tuple(Recipe(path.stem, path, _first_match(r'\A\s*r?"""(.+?)(?:"""|$)', path)) for path in paths)


@cache
def configs() -> tuple[Config, ...]:
    """All YAML files that come with the recipes, sorted by name; a name is the path below `configs`, unsuffixed."""
    root = recipes_dir() / "configs"
    paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}
    return tuple(
        Config(name, path, _recipe_of(path, paths), _first_match(r"^# *(.+)$", path)) for name, path in paths.items()
    )


def _first_match(pattern: str, path: Path) -> str:
    match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1].strip().strip("'\"") if match else ""


def _recipe_of(path: Path, paths: dict[str, Path]) -> str | None:
    """The `recipe:` of a YAML file, or of the first file down its chain of bases that has one."""
    for _ in range(len(paths)):
        recipe = _first_match(r"^recipe: *([^\s#]+)", path)
        base = paths.get(_first_match(r"^base: *([^\s#]+)", path))
        if recipe or base is None:
            return recipe or None
        path = base
    return None


def find_recipe(name: str) -> Recipe | None:
    """The recipe of that name, or None."""
    return next((recipe for recipe in recipes() if recipe.name == name), None)


def find_config(name_or_path: str, beside: Path | None = None) -> Path:
    """Path of a config given by name or path; a relative path also counts from the folder `beside`.

    Raises:
        UserError: there is no such config.
    """
    named = next((config.path for config in configs() if config.name == name_or_path), None)
    candidates = [named, beside and beside / name_or_path, Path(name_or_path).expanduser()]
    for path in candidates:
        if path is not None and path.is_file():
            return path
    known = [config.name for config in configs()]
    hint = did_you_mean(Path(name_or_path).stem, known) or did_you_mean(name_or_path, known)
    raise UserError(f"no config named {name_or_path!r}, nor such a file{hint or '; `tune ls` lists the configs'}")
