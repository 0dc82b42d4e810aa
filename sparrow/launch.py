"""From a recipe's arguments to its running: config, process group, signals, exit code.

    def main(argv: Sequence[str] | None = None) -> int:
        return run_recipe(GRPO, Config, argv)

    if __name__ == "__main__":
        sys.exit(main())

Ctrl-C or SIGTERM asks a recipe to stop: `check_stop`, called where its state can be saved, then raises Interrupted.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from sparrow import peers, registry
from sparrow.config import load_config, load_tree, to_yaml
from sparrow.errors import AlarmStop, Interrupted, UserError
from sparrow.registry import did_you_mean

EXIT_USER_ERROR = 2
EXIT_ALARM = 3
EXIT_INTERRUPTED = 130

# A rank that is done with its rollouts waits for the others'; of those that fail it hears at once (sparrow/peers.py).
COLLECTIVE_TIMEOUT = timedelta(hours=3)


class Recipe(Protocol):
    """`cleanup` runs whenever the recipe was constructed, also after a `setup` that failed half way."""

    def setup(self) -> None: ...

    def train(self) -> None: ...

    def cleanup(self) -> None: ...


@dataclass
class Arguments:
    """What stands after the recipe's name: `--config X`, overrides, `--validate` to stop after the check of both."""

    config: str = ""
    overrides: list[str] = field(default_factory=list)
    validate: bool = False
    verbose: bool = False
    help: bool = False


def run_recipe(recipe_class: Callable[[Any], Recipe], schema: type[Any], argv: Sequence[str] | None = None) -> int:
    """Runs a recipe to its end and returns the exit code.

    0 done, 1 another process of the run was lost, 2 UserError (one line on stderr), 3 stopped by an alarm, 130
    interrupted after a clean stop. Other exceptions are bugs, and pass.
    """
    _adopt_main_module(recipe_class)
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
        if arguments.help:
            print(_help(recipe_class, schema))
            return 0
        _check_recipe(recipe_class, arguments)
        config = load_config(schema, arguments.config, arguments.overrides)
        if arguments.verbose or (_rank() == 0 and not arguments.validate):
            print(to_yaml(config), flush=True)
        if arguments.validate:
            print("ok")
            return 0
        with _signals(), _process_group():
            _run(recipe_class(config))
    except UserError as error:
        _report(str(error))
        return EXIT_USER_ERROR
    except AlarmStop as error:
        _report(str(error))
        return EXIT_ALARM
    except Interrupted as error:
        _report(str(error) or "interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if "WORLD_SIZE" not in os.environ or not peers.is_lost_peer(error):
            raise
        _report(peers.lost_peer_message(error))
        return 1
    return 0


def _check_recipe(recipe_class: Any, arguments: Arguments) -> None:
    """Of two recipes that come with Sparrow, one given the other's config would complain about all of its keys."""
    running = Path(recipe_class.setup.__globals__["__file__"]).stem
    wanted = load_tree(arguments.config).get("recipe")
    known = [recipe.name for recipe in registry.recipes()]
    if wanted != running and wanted in known and running in known:
        raise UserError(f"{arguments.config}: recipe: this is a config for {wanted}, not for {running}")


def _run(recipe: Recipe) -> None:
    try:
        recipe.setup()
        recipe.train()
    except BaseException:
        try:
            recipe.cleanup()
        except Exception as second:  # it is not to hide the first
            print(f"warning: the clean-up failed as well: {second!r}", file=sys.stderr, flush=True)
        raise
    recipe.cleanup()


def parse_arguments(argv: Sequence[str]) -> Arguments:
    """Raises UserError where the arguments are not `--config X [key=value ...]`."""
    parsed, rest = Arguments(), list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            parsed.help = True
        elif word == "--validate":
            parsed.validate = True
        elif word == "--verbose":
            parsed.verbose = True
        elif word == "--config" or word.startswith("--config="):
            parsed.config = _config_value(word, rest, parsed.config)
        elif word.startswith("-"):
            hint = did_you_mean(word, ["--config", "--validate", "--verbose", "--help"])
            raise UserError(
                f"unknown option {word}{hint or '; options of torchrun stand before the name of the recipe'}"
            )
        else:
            parsed.overrides.append(word)
    if not parsed.config and not parsed.help:
        raise UserError("--config NAME_OR_PATH is missing; `tune ls` lists the configs")
    return parsed


def _config_value(word: str, rest: list[str], earlier: str) -> str:
    if earlier:
        raise UserError(f"--config is given twice: {earlier}, {word}; a file names another as its `base:`")
    value = word.partition("=")[2] if "=" in word else rest.pop(0) if rest else ""
    if not value or value.startswith("-"):
        raise UserError("--config needs the name or path of a config; `tune ls` lists the configs")
    return value


def _help(recipe_class: Any, schema: type[Any]) -> str:
    usage = "--config NAME_OR_PATH [key=value ...] [~key ...] [--validate [--verbose]]"
    lines = [inspect.getdoc(recipe_class) or "", "", usage, "", "keys of the config:"]
    for key in fields(schema):
        optional = " (optional)" if key.default_factory is not MISSING else ""
        default = optional if key.default is MISSING else f" = {key.default!r}"
        lines.append(f"  {key.name}: {key.type}{default}")
    return "\n".join(lines)


def _adopt_main_module(recipe_class: Any) -> None:
    """Lets annotations and pickles of a recipe run as `__main__` find its names.

    torchtune's command line runs a recipe with runpy, which leaves `sys.modules["__main__"]` the console script.
    """
    namespace = recipe_class.setup.__globals__
    if recipe_class.__module__ == "__main__":
        for name, value in namespace.items():
            vars(sys.modules["__main__"]).setdefault(name, value)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _report(message: str) -> None:
    """One line `error: ...` on stderr for each line; a child of torchrun hands it to its parent, which says it once."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(error_file).write_text(json.dumps(content), encoding="utf-8")
        return
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


# Signals: the handler only takes a note; a second Ctrl-C is for a recipe that does not get to a safe point.
_stop_signal: int | None = None


def stop_requested() -> bool:
    """True once Ctrl-C or SIGTERM asked this process to stop."""
    return _stop_signal is not None


def check_stop() -> None:
    """Raises Interrupted if any rank was asked to stop; in a distributed run, all ranks must call it together."""
    stop = torch.tensor(int(stop_requested()))
    if dist.is_initialized():
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        raise Interrupted("interrupted")


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _stop_signal
    if number == signal.SIGINT and _stop_signal == signal.SIGINT:
        raise KeyboardInterrupt
    _stop_signal = number
    print("stopping at the next safe point; Ctrl-C again to stop at once", file=sys.stderr, flush=True)


@contextmanager
def _signals() -> Iterator[None]:
    global _stop_signal
    _stop_signal = None
    previous = {number: signal.signal(number, _on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _process_group() -> Iterator[None]:
    """The process group of a run under torchrun: gloo for CPU tensors and, where there is CUDA, nccl for its own."""
    if "WORLD_SIZE" not in os.environ:
        try:
            yield
        finally:
            if dist.is_initialized():  # of one process, for sharding's bf16 copies
                dist.destroy_process_group()
        return
    if int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    orderly: Exception | None = None
    with peers.watched(_report):
        try:
            yield
        except (AlarmStop, Interrupted) as error:
            orderly = error
    # After an error the other ranks may wait in a collective, and an orderly end would wait for them.
    dist.destroy_process_group()
    if orderly is not None:
        raise orderly
