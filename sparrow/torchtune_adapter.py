"""The one module that touches torchtune's private names.

torchtune 0.6.1 is its last release. It imports two names that torchao dropped in 0.16, so nothing of it that needs
`torchtune.training`, its own command line included, imports before `apply_shim` has run in that very process.
`python -m sparrow.torchtune_adapter RECIPE --config CONFIG` runs one of torchtune's recipes in such a process.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from sparrow.errors import UserError

DROPPED_BY_TORCHAO = ("int4_weight_only", "int8_dynamic_activation_int4_weight")


def apply_shim() -> None:
    """Gives `torchao.quantization` the names torchtune imports; using one of them raises UserError. Idempotent."""
    import torchao.quantization

    for name in DROPPED_BY_TORCHAO:
        if not hasattr(torchao.quantization, name):
            setattr(torchao.quantization, name, _unavailable(name))


def _unavailable(name: str) -> Any:
    def raise_unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise UserError(f"torchao.quantization.{name} is gone since torchao 0.16: this quantizer cannot be used")

    return raise_unavailable


@cache
def recipes() -> dict[str, tuple[Path, dict[str, Path]]]:
    """torchtune's recipes by name: the script, and its configs by name.

    Executes the registry's file alone: it needs nothing, while importing torchtune takes seconds.
    """
    spec = find_spec("torchtune")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    root = package.parent / "recipes"
    listed = runpy.run_path(str(package / "_recipe_registry.py"), run_name="torchtune_recipe_registry")["_ALL_RECIPES"]
    return {
        recipe.name: (root / recipe.file_path, {c.name: root / "configs" / c.file_path for c in recipe.configs})
        for recipe in listed
    }


def files() -> dict[str, Path]:
    """Every recipe and config of torchtune by name; its registry also lists some that its wheel lacks."""
    scripts = {name: script for name, (script, _) in recipes().items()}
    named = {name: path for _, configs in recipes().values() for name, path in configs.items()} | scripts
    return {name: path for name, path in named.items() if path.is_file()}


def delegate(argv: Sequence[str]) -> None:
    """Runs torchtune's own command line; it ends with SystemExit where it has something to complain about."""
    apply_shim()
    from torchtune._cli.tune import main

    sys.argv = ["tune", *argv]
    main()


def _run_recipe(name: str, arguments: Sequence[str]) -> None:
    script, configs = recipes()[name]
    apply_shim()
    sys.argv = [str(script), *(str(configs.get(argument, argument)) for argument in arguments)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    _run_recipe(sys.argv[1], sys.argv[2:])
