"""Budget schedules: how many KV pages a sparse layer may read at each cached length (paper, dynamic budget schedule).

All budgets are *total* pages: sink, recent and selected together. Length is the total cached length in tokens, prompt
included. Shape suffix: N schedule entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.components.schedule_file import ScheduleFile, check_pages, check_whole, read_schedule
from sparrow.errors import UserError
from sparrow.models.identity import SAVED_AS
from sparrow.protocols import RunSettings

DEFAULT_BIN_WIDTH = 2000
UNBOUNDED = 2**31 - 1
_NOTED = ("tau", "weights", "adapter")  # may differ from the calibration's without a refusal


class FixedBudget:
    """The same budget at every length: the baseline whose P5 sinks as sequences grow (paper, fixed-budget ablation).

    Args:
        pages: total pages, at least 1.
    """

    def __init__(self, pages: int) -> None:
        check_pages([pages], bin_width=None, where="FixedBudget", allow_dips=False)
        self.max_pages = pages

    def max_pages_until(self, length: int) -> int:
        """The budget."""
        return self.max_pages

    def pages(self, cached_length: Tensor) -> Tensor:
        """The budget for each cached length (any shape), int64."""
        return torch.full_like(cached_length, self.max_pages, dtype=torch.int64)

    def check(self, run: RunSettings) -> list[str]:
        """A fixed budget has no provenance: only the reserved pages can rule it out; always returns []."""
        check_reserved([self.max_pages], run, where="FixedBudget")
        return []


class RatioBudget:
    """A share of the pages that are cached, rounded up: it grows with length at a constant cost per cached token.

    Args:
        share: of the pages, above 0 and at most 1; taken as the nearest fraction with a denominator up to a million.
        minimum: pages that are kept at any length.
        maximum: pages that are never exceeded; None where only the sequence is to bound them.
        page_size: tokens per page; the cache's.

    Raises:
        UserError: a number out of range.
    """

    def __init__(self, share: float, minimum: int, maximum: int | None = None, page_size: int = 16) -> None:
        if not 0 < share <= 1:
            raise UserError(f"RatioBudget: share must be above 0 and at most 1, got {share}")
        check_whole("minimum", minimum, "RatioBudget")
        check_whole("page_size", page_size, "RatioBudget")
        if maximum is not None:
            check_whole("maximum", maximum, "RatioBudget", least=minimum)
        # Whole numbers, because ceil(.1 * 30) is 4 in floating point.
        self.share = Fraction(share).limit_denominator(10**6)
        self.minimum, self.page_size = minimum, page_size
        self.max_pages = UNBOUNDED if maximum is None else maximum

    def max_pages_until(self, length: int) -> int:
        """The budget at that length: it never falls."""
        return int(self.pages(torch.tensor(length)))

    def pages(self, cached_length: Tensor) -> Tensor:
        """The budget for each cached length (any shape), int64, on its device."""
        pages = -(-cached_length.long() // self.page_size)
        share = -(-pages * self.share.numerator // self.share.denominator)
        return share.clamp(self.minimum, self.max_pages)

    def check(self, run: RunSettings) -> list[str]:
        """No provenance, but it counts in pages: UserError where those of the cache have another size."""
        if run.page_size != self.page_size:
            raise UserError(f"RatioBudget: page_size {self.page_size} is not the {run.page_size} of the cache")
        check_reserved([self.minimum], run, where="RatioBudget")
        return []


class StepTable:
    """Entries by cached length: entry `min(length // bin_width, last)`.

    `replace` writes into the tables that devices hold, so that a captured CUDA graph reads the new entries.
    """

    def __init__(self, entries: Sequence[int], bin_width: int) -> None:
        self.entries, self.bin_width = list(entries), bin_width
        self._tables_N: dict[torch.device, Tensor] = {}

    def bins(self, cached_length: Tensor) -> Tensor:
        """Number of the entry for each cached length, int64."""
        return (cached_length.long() // self.bin_width).clamp(max=len(self.entries) - 1)

    def pages(self, cached_length: Tensor) -> Tensor:
        """The entry for each cached length (any shape), int64, on its device; nothing reaches the host."""
        device = cached_length.device
        # Kept per device: a copy from the host inside a CUDA graph would be an error on every step.
        if device not in self._tables_N:
            self._tables_N[device] = torch.tensor(self.entries, dtype=torch.int64, device=device)
        return self._tables_N[device][self.bins(cached_length)]

    def replace(self, entries: Sequence[int]) -> None:
        """As many other entries."""
        assert len(entries) == len(self.entries), entries
        self.entries = list(entries)
        for table_N in self._tables_N.values():
            table_N.copy_(torch.tensor(self.entries))


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
        if path is None and pages is None:
            raise UserError("StepSchedule: give exactly one of `path` (a schedule's name or file) and `pages`")
        beside = {"pages": pages, "bin_width": bin_width} if path is not None else {}
        if own := [name for name, value in beside.items() if value is not None]:
            raise UserError(
                f"StepSchedule: path={path} stands beside {' and '.join(own)}, and a schedule file brings its own; "
                f"take them out, on the command line by {' '.join(f'~kv_cache.budget.{name}' for name in own)}"
            )
        self.allow_foreign = allow_foreign
        self.where = path or "StepSchedule"
        self.provenance = None if path is None else read_schedule(path, allow_dips)
        if self.provenance is not None:
            bin_width, entries = self.provenance.bin_width, self.provenance.pages
        else:
            bin_width, entries = DEFAULT_BIN_WIDTH if bin_width is None else bin_width, list(pages or [])
            check_whole("bin_width", bin_width, self.where)
            check_pages(entries, bin_width, self.where, allow_dips)
        self.table = StepTable(entries, bin_width)

    @property
    def bin_width(self) -> int:
        """Tokens per entry."""
        return self.table.bin_width

    @property
    def entries(self) -> list[int]:
        """Total pages per bin."""
        return self.table.entries

    @property
    def max_pages(self) -> int:
        """The largest budget at any length."""
        return max(self.entries)

    def max_pages_until(self, length: int) -> int:
        """The largest budget at any cached length up to `length`, dips included."""
        return max(self.entries[: length // self.bin_width + 1])

    def pages(self, cached_length: Tensor) -> Tensor:
        """The budget for each cached length (any shape), int64, on its device; nothing reaches the host."""
        return self.table.pages(cached_length)

    def check(self, run: RunSettings) -> list[str]:
        """Compares the settings that the schedule was calibrated for with those of the run.

        Returns:
            One sentence per difference, to be printed; empty when all agree or the entries stand in the YAML. Another
            tau, other weights of the same architecture, and another adapter are among them but never refused.

        Raises:
            UserError: a budget below the reserved pages; a difference, unless `allow_foreign`.
        """
        check_reserved(self.entries, run, self.where)
        if self.provenance is None:
            return []
        differences, notes = _differences(self.provenance, run), _notes(self.provenance, run)
        if differences and not self.allow_foreign:
            raise UserError(
                f"schedule {self.where}: {'; '.join(differences)}; "
                "calibrate one for this run, or set allow_foreign: true to use it all the same"
            )
        return differences + notes


def _differences(made_for: ScheduleFile, run: RunSettings) -> list[str]:
    """What another P5 follows from, a sentence each."""
    ours = vars(run) | {"model": Path(run.model).absolute().name}
    theirs = vars(made_for)
    return [
        f"{key} is {theirs[key]!r} in the schedule, {ours[key]!r} in this run{_remedy(key, made_for)}"
        for key in _compared(made_for, run)
        if _spelt(key, theirs[key]) != _spelt(key, ours[key])
    ]


def _compared(made_for: ScheduleFile, run: RunSettings) -> list[str]:
    """The keys of `RunSettings` that have to agree.

    The architecture where both know it. The name as well, unless it is the one that every save has: what was trained
    from the calibrated checkpoint is called that, and the paper's P5 curves before and after training coincide.
    """
    keys = [field.name for field in fields(RunSettings) if field.name not in ("architecture", *_NOTED)]
    if made_for.architecture is None or run.architecture is None:
        return keys
    names = made_for.model.lower(), Path(run.model).absolute().name.lower()
    return ["architecture", *(key for key in keys if key != "model" or SAVED_AS not in names)]


def _notes(made_for: ScheduleFile, run: RunSettings) -> list[str]:
    """What may well differ, but should be known."""
    notes = []
    if run.tau is not None and run.tau != made_for.tau:
        notes.append(f"tau is {made_for.tau} in the schedule, {run.tau} in this run")
    if made_for.weights and run.weights and run.weights != made_for.weights:
        notes.append("weights are not those that the schedule was measured with: watch acceptance/p5")
    if made_for.adapter and _weights_of(made_for.adapter) != _weights_of(run.adapter):
        notes.append(
            f"adapter is {made_for.adapter!r} in the schedule, which was measured with it on, and "
            f"{run.adapter or 'none'} in this run: watch acceptance/p5"
        )
    return notes


def _weights_of(adapter: str | None) -> str | None:
    """Its fingerprint: a copy in another folder is the same adapter."""
    return adapter and adapter.rpartition(", weights ")[2]


def _spelt(key: str, value: Any) -> Any:
    """Comparable: `sparrow.components.selector.HeadSoftmaxSelector` and `head_softmax` are both `headsoftmax`."""
    if key == "selector":
        name, bracket, arguments = value.partition("(")
        return name.rpartition(".")[2].removesuffix("Selector").replace("_", "").lower() + bracket + arguments
    return value.lower() if key == "model" else value


def _remedy(key: str, made_for: ScheduleFile) -> str:
    """For the one setting that a run can take over without another rollout."""
    if key != "estimator":
        return ""
    name, _, size = made_for.estimator.partition("_")
    return f" (set acceptance.estimator: {'top_k' if size else name})"


def check_reserved(pages: Sequence[int], run: RunSettings, where: str) -> None:
    """UserError where a budget does not hold the pages that are always kept."""
    reserved = run.sink_pages + run.recent_pages
    if min(pages) < reserved:
        entry = pages.index(min(pages))
        raise UserError(f"{where}: pages[{entry}] is {pages[entry]}, fewer than the {reserved} sink and recent pages")
