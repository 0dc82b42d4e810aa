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
import yaml

from sparrow import peers, registry
from sparrow.config import leaves, load_config, load_tree, to_yaml
from sparrow.errors import EXIT_ALARM, EXIT_INTERRUPTED, EXIT_USER_ERROR, AlarmStop, Interrupted, UserError
from sparrow.registry import did_you_mean
from sparrow.training import distributed

_PARENT = os.getppid()
LATER = 3600
OWN_SETTINGS = ("device", "threads")  # of each node

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
        with _signals(), _process_group():  # the config inside of it: who is given a bad one tells the others
            _read_and_run(recipe_class, schema, parse_arguments(sys.argv[1:] if argv is None else argv))
    except UserError as error:
        _report(str(error))
        return EXIT_USER_ERROR
    except AlarmStop as error:
        _report(str(error))
        return EXIT_ALARM
    except Interrupted as error:
        # Not by way of torchrun, which reads no reports after a signal.
        if _local_rank() == 0:
            print(f"error: {error or 'interrupted'}", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if "WORLD_SIZE" not in os.environ or not peers.is_lost_peer(error):
            raise
        _report(peers.lost_peer_message(error), consequence=True)
        return 1
    return 0


def _read_and_run(recipe_class: Callable[[Any], Recipe], schema: type[Any], arguments: Arguments) -> None:
    if arguments.help:
        print(_help(recipe_class, schema))
        return
    _check_recipe(recipe_class, arguments)
    config = load_config(schema, arguments.config, arguments.overrides)
    if arguments.verbose or (_rank() == 0 and not arguments.validate):
        print(to_yaml(config), flush=True)
    if arguments.validate:
        print("ok")
        return
    _refuse_differences(config)
    _run(recipe_class(config))


def _refuse_differences(config: Any) -> None:
    """UserError where the nodes of a run were given different settings; collective."""
    settings = distributed.gather_objects(dict(leaves(yaml.safe_load(to_yaml(config)))))
    for rank, theirs in enumerate(settings):
        keys = [key for key in {**settings[0], **theirs} if settings[0].get(key) != theirs.get(key)]
        differences = [
            f"{key}: {settings[0].get(key)!r} on rank 0, {theirs.get(key)!r} on rank {rank}"
            for key in keys
            if key not in OWN_SETTINGS
        ]
        if differences:
            raise UserError(f"the nodes were given different settings: {'; '.join(differences)}")


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


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _report(message: str, consequence: bool = False) -> None:
    """One line `error: ...` on stderr for each line; a child of torchrun hands it to its parent, which says it once.

    Args:
        consequence: of another rank's end. torchrun says the earliest failure, and counts in seconds.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and os.getppid() == _PARENT:
        seconds = int(time.time()) + LATER * consequence
        code = 1 if consequence else EXIT_USER_ERROR
        content = {"message": {"message": message, "extraInfo": {"timestamp": str(seconds)}}, "code": code}
        Path(error_file).write_text(json.dumps(content), encoding="utf-8")
        return
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr, flush=True)


# Signals: the handler only takes a note; a second Ctrl-C is for a recipe that does not get to a safe point. torchrun
# passes the first one on as it is, and the second as SIGTERM; a job's scheduler may send one to it and to its children.
_stop_signal: int | None = None
_stop_time = 0.0
SECONDS_OF_ONE_SIGNAL = 2.0


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
    global _stop_signal, _stop_time
    passed_on = "TORCHELASTIC_RUN_ID" in os.environ
    if number == _stop_signal == signal.SIGINT and not passed_on:
        raise KeyboardInterrupt
    if passed_on and _stop_signal is not None:
        if time.monotonic() - _stop_time > SECONDS_OF_ONE_SIGNAL:
            raise KeyboardInterrupt
        return
    _stop_signal, _stop_time = number, time.monotonic()
    if _local_rank() == 0:
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
    if _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    peers.wait_for_all()
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    orderly: Exception | None = None
    with peers.watched(_report):
        try:
            yield
        except (AlarmStop, Interrupted) as error:
            orderly = error
        dist.all_reduce(torch.zeros(1))  # who is done first is still watched: torchrun gives the others 300 s only
    # After an error the other ranks may wait in a collective, and an orderly end would wait for them.
    dist.destroy_process_group()
    if orderly is not None:
        raise orderly
