"""Schedule files: the entries of a budget schedule with their provenance, one YAML file each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sparrow.errors import UserError
from sparrow.registry import did_you_mean, recipes_dir

ESTIMATORS = ("top_20", "exact")
RELEASED_ENTRIES = 20
RELEASED_MODELS = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule with its provenance; the keys of the YAML file. Those that say how it was measured may be absent.

    `estimator` and `tau` say which P5 the entries were chosen for: "top_20" (the paper's lower bound) or "exact".
    `selector` holds the selector's arguments as well, where it has some. `source` is "released" for the paper's tables.
    """

    model: str
    tau: float
    estimator: str
    page_size: int
    bin_width: int
    pages: list[int]
    selector: str
    sink_pages: int
    recent_pages: int
    dense_layers: int
    temperature: float
    source: str
    landmark: str | None = None  # how the released tables' selector summarises a page, for the reader
    architecture: str | None = None  # figures of the checkpoint that training does not change
    weights: str | None = None  # fingerprint of those that it was measured with
    adapter: str | None = None  # that was on in the sparse forward: its folder's name, and a fingerprint
    mode: str | None = None  # "generate" or "teacher_forced"
    prompts: int | None = None
    tokens_per_bin: list[int] | None = None  # decoded tokens that each entry rests on; 0 where none was measured
    confidence: float | None = None  # of the two-sided interval whose lower bound reached tau
    date: str | None = None  # of the measurement, 2026-01-31


def read_schedule(path: str, allow_dips: bool = False) -> ScheduleFile:
    """Reads and validates a schedule by name or path; UserError names file, key and value."""
    file = schedule_file(path)
    try:
        node = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not readable as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(node, dict):
        raise UserError(f"{file}: a schedule is a mapping of keys, not a {type(node).__name__}")
    known = [field.name for field in fields(ScheduleFile)]
    for key in node:
        if key not in known:
            raise UserError(f"{file}: unknown key {key!r}{did_you_mean(str(key), known)}")
    if missing := [field.name for field in fields(ScheduleFile) if field.default is MISSING and field.name not in node]:
        raise UserError(f"{file}: missing {', '.join(missing)}")
    return _validated(node, str(file), allow_dips)


def _validated(node: dict[Any, Any], file: str, allow_dips: bool) -> ScheduleFile:
    for key in ("page_size", "bin_width"):
        check_whole(key, node[key], file)
    for key in ("sink_pages", "recent_pages", "dense_layers"):
        check_whole(key, node[key], file, least=0)
    for key in ("model", "selector", "source"):
        if not isinstance(node[key], str) or not node[key]:
            raise UserError(f"{file}: {key} must be a name, got {node[key]!r}")
    for key, most in (("tau", 1.0), ("temperature", float("inf"))):
        if type(node[key]) not in (int, float) or not 0 < node[key] <= most:
            raise UserError(f"{file}: {key} must be a number above 0 and at most {most}, got {node[key]!r}")
    if node["estimator"] not in ESTIMATORS:
        raise UserError(f"{file}: estimator must be one of {', '.join(ESTIMATORS)}, got {node['estimator']!r}")
    if not isinstance(node["pages"], list):
        raise UserError(f"{file}: pages must be a list of budgets, got {node['pages']!r}")
    check_pages(node["pages"], node["bin_width"], file, allow_dips)
    _check_model(node, file)
    _check_measurement(node, file)
    return ScheduleFile(**node)


def _check_model(node: dict[Any, Any], file: str) -> None:
    """The model is one that a run can have, and one that the paper has a table for where the table is the paper's."""
    if "/" in node["model"]:
        raise UserError(
            f"{file}: model {node['model']!r} matches no checkpoint: they are compared by the last part of their path"
        )
    if node["source"] != "released":
        return
    if node["model"].lower() not in RELEASED_MODELS:
        raise UserError(f"{file}: model {node['model']!r} is none of the released ones, {', '.join(RELEASED_MODELS)}")
    if len(node["pages"]) != RELEASED_ENTRIES:
        raise UserError(f"{file}: a released schedule has {RELEASED_ENTRIES} entries, this has {len(node['pages'])}")


def _check_measurement(node: dict[Any, Any], file: str) -> None:
    """The optional keys, where they are there."""
    for key in ("landmark", "architecture", "weights", "adapter", "mode", "date"):
        if not isinstance(node.get(key, ""), str):
            raise UserError(f"{file}: {key} must be a text, got {node[key]!r}; put it into quotes")
    check_whole("prompts", node.get("prompts", 1), file)
    if "confidence" in node and (type(node["confidence"]) is not float or not 0 < node["confidence"] < 1):
        raise UserError(f"{file}: confidence must be a number between 0 and 1, got {node['confidence']!r}")
    tokens = node.get("tokens_per_bin", node["pages"])
    if not isinstance(tokens, list) or len(tokens) != len(node["pages"]):
        raise UserError(f"{file}: tokens_per_bin must be a list of {len(node['pages'])} numbers, got {tokens!r}")
    for value in tokens:
        check_whole("tokens_per_bin", value, file, least=0)


def schedule_file(path: str) -> Path:
    """Where a schedule is read from, by its name or path; raises UserError for a name that no file has."""
    if "/" in path or path.endswith((".yaml", ".yml")):
        return Path(path).expanduser()
    # The files are data that ship beside the recipes; no recipe is imported.
    folder = recipes_dir() / "configs" / "schedules"
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if path in names:
        return folder / f"{path}.yaml"
    hint = did_you_mean(path, names) or f", there are {', '.join(names)}"
    raise UserError(f"no schedule is called {path!r}{hint}; any other needs the path of its .yaml file")


def check_whole(key: str, value: Any, where: str, least: int = 1) -> None:
    """UserError unless the value is an int of at least `least`."""
    if type(value) is not int or value < least:
        raise UserError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")


def check_pages(pages: Sequence[Any], bin_width: int | None, where: str, allow_dips: bool) -> None:
    """UserError unless the entries are budgets, and do not fall with length where that is not allowed."""
    if not pages:
        raise UserError(f"{where}: pages is empty; a schedule has at least one entry")
    for entry, value in enumerate(pages):
        name = "pages" if bin_width is None else f"pages[{entry}] (from cached length {entry * bin_width})"
        check_whole(name, value, where)
        if entry and value < pages[entry - 1] and not allow_dips:
            raise UserError(
                f"{where}: {name} is {value}, below the {pages[entry - 1]} before it; "
                "a budget does not fall with length, unless allow_dips: true"
            )
