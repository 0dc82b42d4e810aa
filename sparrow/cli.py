"""The command line: `tune` and `sparrow` (the same program under a name that torchtune's wheel cannot take back).

What only reads files (`ls`, `cp`, `cat`, `--help`) imports neither torch nor torchtune and answers at once.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from sparrow import registry, torchtune_adapter
from sparrow.errors import UserError
from sparrow.registry import did_you_mean

USAGE = """\
usage: tune COMMAND ...        (or: sparrow COMMAND ..., python -m sparrow COMMAND ...)

  ls [--all]                   list the recipes and their configs; --all: torchtune's as well
  run RECIPE --config CONFIG   run a recipe; `tune run --help` tells more
  validate CONFIG              check a config and all its components without running anything
  cp NAME DEST                 copy a recipe or config, to change it
  cat NAME                     print a recipe or config
  download REPO                download a checkpoint from the Hugging Face hub

CONFIG is a name from `tune ls` or the path of a YAML file."""

RUN_USAGE = """\
usage: tune run [TORCHRUN OPTIONS] RECIPE --config CONFIG [key=value ...] [~key ...]

  RECIPE       a name from `tune ls`, the path of a recipe file (my_recipe.py), or a module (my.recipe)
  CONFIG       a name from `tune ls`, or the path of a YAML file
  key=value    overrides the config: steps=50, loss.clip_high=0.28, loss=sparrow.components.loss.GSPO, reward.0.weight=2
  ~key         removes a key of the config, or an item of a list: ~validation, ~trackers.1

Any option of torchrun starts the recipe in several processes, on this machine unless --nnodes or --rdzv_endpoint
says otherwise:
  tune run --nproc_per_node 2 sparrow_grpo --config tiny
After Ctrl-C or SIGTERM they have ten minutes to reach a safe point ($TORCH_ELASTIC_SHUTDOWN_TIMEOUT, seconds).
`tune run RECIPE --help` lists the keys of a recipe's config."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 2 after one line of error, or the recipe's own."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # while torch is imported, before the recipe listens; or the second one
        print("error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `tune cat NAME | head`; Python flushes stdout once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        print(f"sparrow-rl {version('sparrow-rl')}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        hint = did_you_mean(arguments[0], COMMANDS)
        raise UserError(f"unknown command {arguments[0]!r}{hint or ', known: ' + ', '.join(COMMANDS)}")
    return command(arguments[1:])


def _ls(arguments: list[str]) -> int:
    parser = _Parser(prog="tune ls", description="List the recipes and the configs written for them.")
    parser.add_argument("--all", action="store_true", help="list torchtune's recipes as well")
    everything = parser.parse_args(arguments).all
    for recipe in registry.recipes():
        print(f"{recipe.name:<26}{recipe.description}")
        for config in registry.configs():
            if config.recipe == recipe.name:
                print(f"  {config.name:<24}{config.description}")
    if not everything:
        print("\ntorchtune's own recipes run as well: `tune ls --all` lists them")
        return 0
    print("\nof torchtune:")
    for name, (_, configs) in torchtune_adapter.recipes().items():
        print("\n  ".join([name, *configs]))
    return 0


def _cp(arguments: list[str]) -> int:
    parser = _Parser(prog="tune cp", description="Copy a recipe or config, to change it.")
    parser.add_argument("name", help="from `tune ls`")
    parser.add_argument("destination", type=Path, help="a file or folder; the suffix is added where it lacks")
    parser.add_argument("-n", "--no-clobber", action="store_true", help="leave an existing file alone")
    parser.add_argument("--make-parents", action="store_true", help="create the folders of the destination")
    options = parser.parse_args(arguments)
    source = _find_file(options.name)
    destination = _destination(source, options.destination)
    if options.no_clobber and destination.exists():
        print(f"{destination} exists, left as it is")
        return 0
    if options.make_parents:
        destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copyfile(source, destination)
    except (OSError, shutil.SameFileError) as error:
        raise UserError(
            f"tune cp: {destination}: {getattr(error, 'strerror', None) or error}; see --make-parents"
        ) from error
    print(f"copied to {destination}")
    return 0


def _destination(source: Path, given: Path) -> Path:
    if given.is_dir():
        return given / source.name
    return given if given.suffix == source.suffix else given.with_name(given.name + source.suffix)


def _cat(arguments: list[str]) -> int:
    parser = _Parser(prog="tune cat", description="Print a recipe or config.")
    parser.add_argument("name", help="from `tune ls`")
    source = _find_file(parser.parse_args(arguments).name)
    print(source.read_text(encoding="utf-8"), end="", flush=True)
    return 0


def _find_file(name: str) -> Path:
    """The recipe or config of that name, ours or torchtune's."""
    files = torchtune_adapter.files()
    files |= {config.name: config.path for config in registry.configs()}
    files |= {recipe.name: recipe.path for recipe in registry.recipes()}
    if name not in files:
        raise UserError(f"no recipe or config named {name!r}{did_you_mean(name, files) or '; see `tune ls`'}")
    return files[name]


def _validate(arguments: list[str]) -> int:
    parser = _Parser(prog="tune validate", description="Check a config and its components without building any.")
    parser.add_argument("words", nargs="+", metavar="CONFIG [key=value ...]", help="name or path, overrides")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the effective config")
    options = parser.parse_intermixed_args(arguments)
    from sparrow.config import load_tree
    from sparrow.torchrun import find_target, run_here

    config, *overrides = options.words
    recipe = load_tree(config, overrides).get("recipe")
    if not isinstance(recipe, str):
        raise UserError(f"{config}: recipe: missing key; it says which recipe the config is for")
    verbose = ["--verbose"] if options.verbose else []
    return run_here(find_target(recipe), ["--config", config, *overrides, "--validate", *verbose])


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(RUN_USAGE)
        return 0
    several = arguments[0].startswith("-")
    if several:  # before torch is loaded: stacks of C++ where a store is lost, which Python says in a line
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from sparrow.torchrun import find_target, run_here, run_several

    if several:
        return run_several(arguments)
    return run_here(find_target(arguments[0]), arguments[1:])


def _download(arguments: list[str]) -> int:
    torchtune_adapter.delegate(["download", *arguments])
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "ls": _ls,
    "run": _run,
    "validate": _validate,
    "cp": _cp,
    "cat": _cat,
    "download": _download,
}
