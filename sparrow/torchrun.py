"""Where `tune run` finds a recipe, and how it runs it: in this process, or in several under torch.distributed.run."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from sparrow import registry, torchtune_adapter
from sparrow.errors import EXIT_INTERRUPTED, RESUME_ADVICE, UserError
from sparrow.instantiate import add_working_directory
from sparrow.registry import did_you_mean

# After Ctrl-C or SIGTERM the processes finish their step and save; torchrun's own limit is 30 seconds.
SHUTDOWN_SECONDS = "600"


@dataclass(frozen=True)
class Target:
    """What to run as `__main__`: a module's dotted name or a file's path; `arguments` come before the user's."""

    name: str
    is_module: bool = True
    arguments: tuple[str, ...] = ()


def find_target(recipe: str) -> Target:
    """A recipe by name (ours first, then torchtune's), by path, or by module.

    Raises:
        UserError: there is none, with the name that comes closest.
    """
    ours = registry.find_recipe(recipe)
    if ours is not None:
        return Target(ours.module)
    if "/" in recipe or recipe.endswith(".py"):
        path = Path(recipe).with_suffix(".py")
        if not path.is_file():
            raise UserError(f"no recipe file {str(path)!r}{did_you_mean(path.stem, _our_names())}")
        return Target(str(path), is_module=False)
    add_working_directory()
    if _is_module(recipe):
        return Target(recipe)
    theirs = torchtune_adapter.recipes()
    if recipe in theirs:
        return Target("sparrow.torchtune_adapter", arguments=(recipe,))
    hint = did_you_mean(recipe, [*_our_names(), *theirs])
    raise UserError(f"unknown recipe {recipe!r}{hint or '; `tune ls` lists the recipes'}")


def _our_names() -> list[str]:
    return [recipe.name for recipe in registry.recipes()]


def _is_module(name: str) -> bool:
    """True for a module that is no package; False also where the package that should hold it does not exist."""
    if not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.submodule_search_locations is None


def run_here(target: Target, arguments: Sequence[str]) -> int:
    """Runs the recipe as the main module of this process and returns its exit code."""
    sys.argv = [target.name, *target.arguments, *arguments]
    try:
        if target.is_module:
            runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target.name).resolve().parent))  # as `python FILE` does
            runpy.run_path(target.name, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 0


def run_several(arguments: Sequence[str]) -> int:
    """Runs `[TORCHRUN OPTIONS] RECIPE ...` in as many processes as the options say; returns the first failure's code.

    A failure is reported in one line: a recipe's UserError, or which rank failed, below that rank's traceback, or that
    another node is gone.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    for name in ("elastic", "run"):  # these log each worker's end at ERROR, and advice on OMP_NUM_THREADS
        logging.getLogger(f"torch.distributed.{name}").setLevel(logging.CRITICAL)
    options = _torchrun_options(arguments)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    reports = tempfile.TemporaryDirectory(prefix="sparrow_reports_", ignore_cleanup_errors=True)
    options.log_dir = options.log_dir or reports.name
    try:
        run(options)
    except ChildFailedError as error:
        return _report(error, options)
    except SignalException:
        return EXIT_INTERRUPTED
    except RendezvousError as error:
        if report := _own_report(Path(options.log_dir)):
            _say(report["message"]["message"])
            return report["code"]
        where = f"the node at {options.rdzv_endpoint}" if options.rdzv_endpoint else "torchrun's store"
        print(f"error: lost {where}; {RESUME_ADVICE} ({error})", file=sys.stderr)
        return 1
    return 0


def _torchrun_options(arguments: Sequence[str]) -> Any:
    from torch.distributed.run import determine_local_world_size, get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    options = parser.parse_args(arguments)
    try:
        determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        raise UserError(f"tune run: --nproc_per_node {options.nproc_per_node}: {error}") from error
    target = find_target(options.training_script)
    options.training_script, options.module = target.name, target.is_module
    options.training_script_args = [*target.arguments, *options.training_script_args]
    if options.max_restarts:
        raise UserError(
            f"tune run: --max_restarts {options.max_restarts}: torchrun would start again whatever ended, also a run "
            "that an alarm or you stopped; leave it out, and go on with resume=auto"
        )
    if not options.rdzv_endpoint and options.nnodes in ("1", "1:1"):
        options.standalone = True  # a port of its own, so that several jobs can share the machine
    return options


def _refuse(message: str) -> NoReturn:
    raise UserError(f"tune run: {message}; options of torchrun come first, then RECIPE --config CONFIG")


def _tell_other_nodes(folder: Path, cause: str) -> None:
    """By the store of the run; where all ranks of this node are gone, nobody else does."""
    from sparrow import peers  # torch is slow to import

    for file in sorted(folder.rglob(peers.STORE_NOTE))[:1]:
        peers.tell_of_a_kill(file, cause)


def _own_report(folder: Path) -> Any:
    """What a worker of this node reported (`launch`), where another node's end came to the agent first."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("error.json"))]
    return next((report for report in reports if "code" in report), None)


def _say(message: str) -> None:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)


def _report(error: Any, options: Any) -> int:
    rank, failure = error.get_first_failure()
    said = failure.message.get("message") if isinstance(failure.message, dict) else None
    code = failure.exitcode
    if code == EXIT_INTERRUPTED:  # said by the first rank of each node
        return code
    how = f"failed with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    if code < 0:
        _tell_other_nodes(Path(options.log_dir), f"rank {rank} {how}")
    _say(said or f"rank {rank} {how}; {RESUME_ADVICE}")
    return code if code > 0 else 128 - code
