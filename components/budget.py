"""Budget schedules: how many KV pages a sparse layer may read at each cached length (paper, dynamic budget schedule).

All budgets are *total* pages: sink, recent and selected together. Length is the total cached length in tokens, prompt
included. Shape suffix: B decode rows; N schedule entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from sparrow.errors import UserError
from sparrow.registry import did_you_mean, recipes_dir

DEFAULT_BIN_WIDTH = 2000
RELEASED_ENTRIES = 20
ESTIMATORS = ("top_20", "exact")


class FixedBudget:
    """The same budget at every length: the baseline whose P5 sinks as sequences grow (paper, fixed-budget ablation).

    Args:
        pages: total pages, at least 1.
    """

    def __init__(self, pages: int) -> None:
        _check_pages([pages], bin_width=None, where="FixedBudget", allow_dips=False)
        self.max_pages = pages

    def pages(self, cached_length: Tensor) -> Tensor:
        """The budget for each cached length [B] (any shape), int64."""
        return torch.full_like(cached_length, self.max_pages, dtype=torch.int64)

    def check(
        self,
        page_size: int,
        sink_pages: int,
        recent_pages: int,
        dense_layers: int,
        model_name: str,
        selector: str,
        temperature: float = 1.0,
    ) -> list[str]:
        """A fixed budget has no provenance: only the reserved pages can rule it out; always returns []."""
        _check_reserved([self.max_pages], sink_pages + recent_pages, where="FixedBudget")
        return []


class StepSchedule:
    """Piecewise constant in cached length: entry `min(length // bin_width, last)` (paper, dynamic budget schedule).

    Args:
        path: name of a packaged schedule ("qwen3-4b-0.86") or path of a YAML file (ends in .yaml or has a slash).
        pages: the entries themselves, for runs without a calibrated schedule; exactly one of `path` and `pages`.
        bin_width: tokens per entry, 2,000 unless given; a file brings its own.
        allow_foreign: let `check` report, not refuse, a schedule that was calibrated for other settings.
        allow_dips: let a budget fall with length; calibration noise does that, and P5 falls with it.

    Raises:
        UserError: naming file, entry and value.
    """

    def __init__(
        self,
        path: str | None = None,
        pages: list[int] | None = None,
        bin_width: int | None = None,
        allow_foreign: bool = False,
        allow_dips: bool = False,
    ) -> None:
        if (path is None) == (pages is None):
            raise UserError("StepSchedule: give exactly one of `path` (a schedule's name or file) and `pages`")
        if path is not None and bin_width is not None:
            raise UserError(f"StepSchedule: bin_width={bin_width} stands beside path={path}, which brings its own")
        self.allow_foreign = allow_foreign
        self.where = path or "StepSchedule"
        self.provenance = None if path is None else read_schedule(path, allow_dips)
        if self.provenance is not None:
            self.bin_width, self.entries = self.provenance.bin_width, self.provenance.pages
        else:
            self.bin_width, self.entries = DEFAULT_BIN_WIDTH if bin_width is None else bin_width, list(pages or [])
            _check_whole("bin_width", self.bin_width, self.where)
            _check_pages(self.entries, self.bin_width, self.where, allow_dips)
        self._tables_N: dict[torch.device, Tensor] = {}

    @property
    def max_pages(self) -> int:
        """The largest budget at any length."""
        return max(self.entries)

    def pages(self, cached_length: Tensor) -> Tensor:
        """The budget for each cached length [B] (any shape), int64, on its device; nothing reaches the host."""
        device = cached_length.device
        # Kept per device: a copy from the host inside a CUDA graph would be an error on every step.
        if device not in self._tables_N:
            self._tables_N[device] = torch.tensor(self.entries, dtype=torch.int64, device=device)
        entry = (cached_length.long() // self.bin_width).clamp(max=len(self.entries) - 1)
        return self._tables_N[device][entry]

    def check(
        self,
        page_size: int,
        sink_pages: int,
        recent_pages: int,
        dense_layers: int,
        model_name: str,
        selector: str,
        temperature: float = 1.0,
    ) -> list[str]:
        """Compares the settings that the schedule was calibrated for with those of the run.

        Args:
            model_name: name or folder of the checkpoint; its last part counts, upper or lower case.
            selector: class name or short name (`CentroidSelector`, `centroid`).

        Returns:
            One sentence per difference, to be printed; empty when all agree or the entries stand in the YAML.

        Raises:
            UserError: a budget below the reserved pages; a difference, unless `allow_foreign`.
        """
        _check_reserved(self.entries, sink_pages + recent_pages, self.where)
        if self.provenance is None:
            return []
        run = {
            "model": Path(model_name).name.lower(),
            "page_size": page_size,
            "selector": _short_selector(selector),
            "sink_pages": sink_pages,
            "recent_pages": recent_pages,
            "dense_layers": dense_layers,
            "temperature": float(temperature),
        }
        names = {"model": self.provenance.model.lower(), "selector": _short_selector(self.provenance.selector)}
        made_for = vars(self.provenance) | names
        differences = [
            f"{key} is {made_for[key]!r} in the schedule, {ours!r} in this run"
            for key, ours in run.items()
            if made_for[key] != ours
        ]
        if differences and not self.allow_foreign:
            raise UserError(
                f"schedule {self.where}: {'; '.join(differences)}; "
                "calibrate one for this run, or set allow_foreign: true to use it all the same"
            )
        return differences


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule with its provenance; the keys of the YAML file, all of them required.

    `estimator` and `tau` say which P5 the entries were chosen for: "top_20" (the paper's lower bound) or "exact".
    `landmark` is how the selector summarises a page. `source` is "released" for the paper's tables.
    """

    model: str
    tau: float
    estimator: str
    page_size: int
    bin_width: int
    pages: list[int]
    selector: str
    landmark: str
    sink_pages: int
    recent_pages: int
    dense_layers: int
    temperature: float
    source: str


def read_schedule(path: str, allow_dips: bool = False) -> ScheduleFile:
    """Reads and validates a schedule by name or path; UserError names file, key and value."""
    file = _find(path)
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
    if missing := [key for key in known if key not in node]:
        raise UserError(f"{file}: missing {', '.join(missing)}")
    return _validated(node, str(file), allow_dips)


def _validated(node: dict[Any, Any], file: str, allow_dips: bool) -> ScheduleFile:
    for key in ("page_size", "bin_width"):
        _check_whole(key, node[key], file)
    for key in ("sink_pages", "recent_pages", "dense_layers"):
        _check_whole(key, node[key], file, least=0)
    for key in ("model", "selector", "landmark", "source"):
        if not isinstance(node[key], str) or not node[key]:
            raise UserError(f"{file}: {key} must be a name, got {node[key]!r}")
    for key, most in (("tau", 1.0), ("temperature", float("inf"))):
        if type(node[key]) not in (int, float) or not 0 < node[key] <= most:
            raise UserError(f"{file}: {key} must be a number above 0 and at most {most}, got {node[key]!r}")
    if node["estimator"] not in ESTIMATORS:
        raise UserError(f"{file}: estimator must be one of {', '.join(ESTIMATORS)}, got {node['estimator']!r}")
    if not isinstance(node["pages"], list):
        raise UserError(f"{file}: pages must be a list of budgets, got {node['pages']!r}")
    _check_pages(node["pages"], node["bin_width"], file, allow_dips)
    if node["source"] == "released" and len(node["pages"]) != RELEASED_ENTRIES:
        raise UserError(f"{file}: a released schedule has {RELEASED_ENTRIES} entries, this has {len(node['pages'])}")
    return ScheduleFile(**node)


def _find(path: str) -> Path:
    if "/" in path or path.endswith((".yaml", ".yml")):
        return Path(path).expanduser()
    # The files are data that ship beside the recipes; no recipe is imported.
    folder = recipes_dir() / "configs" / "schedules"
    names = sorted(file.stem for file in folder.glob("*.yaml"))
    if path in names:
        return folder / f"{path}.yaml"
    hint = did_you_mean(path, names) or f", there are {', '.join(names)}"
    raise UserError(f"no schedule is called {path!r}{hint}; any other needs the path of its .yaml file")


def _check_whole(key: str, value: Any, where: str, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise UserError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")


def _check_pages(pages: Sequence[Any], bin_width: int | None, where: str, allow_dips: bool) -> None:
    if not pages:
        raise UserError(f"{where}: pages is empty; a schedule has at least one entry")
    for entry, value in enumerate(pages):
        name = "pages" if bin_width is None else f"pages[{entry}] (from cached length {entry * bin_width})"
        _check_whole(name, value, where)
        if entry and value < pages[entry - 1] and not allow_dips:
            raise UserError(
                f"{where}: {name} is {value}, below the {pages[entry - 1]} before it; "
                "a budget does not fall with length, unless allow_dips: true"
            )


def _check_reserved(pages: Sequence[int], reserved: int, where: str) -> None:
    if min(pages) < reserved:
        entry = pages.index(min(pages))
        raise UserError(f"{where}: pages[{entry}] is {pages[entry]}, fewer than the {reserved} sink and recent pages")


def _short_selector(name: str) -> str:
    """`sparrow.components.selector.HeadSoftmaxSelector`, `head_softmax` -> `headsoftmax`."""
    return name.rpartition(".")[2].removesuffix("Selector").replace("_", "").lower()
