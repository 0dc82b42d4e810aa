"""The keys of a sparrow_prepare config; docs/tasks.md explains them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparrow.components.data import check_columns
from sparrow.config import Component
from sparrow.errors import UserError

OWN_COLUMNS = ("id", "prompt", "answer", "tests", "starter_code", "source", "fingerprint")


@dataclass(kw_only=True)
class Wrapper:
    """What a published prompt has around the question, to be taken off."""

    prefix: str = ""
    suffix: str = ""


@dataclass(kw_only=True)
class PrepareConfig:
    """Every key of a sparrow_prepare config."""

    recipe: str = "sparrow_prepare"
    name: str  # of the data set; the column `source`
    licence: str
    origin: str  # where the public file lies
    source: str  # the local copy: a file or folder; or a name on the hub
    subset: str | None = None  # a configuration of the hub, a folder in a local copy
    split: str | None = None
    revision: str | None = None
    limit: int | None = None  # the first so many rows
    output: str  # JSONL; a manifest is written beside it

    question: str  # column, or dotted path
    unwrap: Wrapper | None = None
    template: str = "{question}"
    call_template: str | None = None  # where the tests call a function
    system: str | None = None
    chat: bool = True  # the prompt is a user's message; false: plain text
    id: str | None = None  # column, or dotted path; by default the name and the row's number
    keep: dict[str, str] = field(default_factory=dict)  # name -> column, or dotted path, that goes on

    gold: Component
    reward: Component | None = None  # whose `problems` says which gold answers cannot be used
    solutions: int = 0  # of the data set's own, tried until one scores 1 by `reward`; 0 tries none
    exclude: list[str] = field(default_factory=list)  # prepared evaluation sets whose questions are left out
    drop: dict[str, str] = field(default_factory=dict)  # id -> why it is left out


def check(cfg: PrepareConfig) -> None:
    """What no single key can see."""
    if cfg.limit is not None and cfg.limit < 1:
        raise UserError(f"limit: {cfg.limit} must be at least 1")
    if cfg.solutions < 0 or (cfg.solutions and cfg.reward is None):
        raise UserError(f"solutions: {cfg.solutions} must not be negative, and needs a reward that scores them")
    if cfg.system is not None and not cfg.chat:
        raise UserError("system: has no place in a prompt of plain text; leave it or chat: false out")
    check_columns(cfg.keep, "keep")
    for name in cfg.keep:
        if name in OWN_COLUMNS:
            raise UserError(f"keep: {name!r} is a column that the preparation writes itself; choose another name")
