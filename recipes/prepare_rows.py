"""From a row of a published data set to a prepared example."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparrow.components.data import Message
from sparrow.components.duplicates import fingerprint, gold_text
from sparrow.components.gold import GoldExtractor, UnusableGold
from sparrow.components.row_fields import chat, fill, lookup
from sparrow.errors import UserError
from sparrow.recipes.prepare_config import PrepareConfig, Wrapper


@dataclass(frozen=True)
class Draft:
    """A prepared example, before it is compared with others.

    Attributes:
        columns: the gold answer and what else goes on.
        fingerprint: of the question, without template.
        solutions: programs that should score 1.
    """

    id: str
    prompt: str | list[Message]
    columns: dict[str, Any]
    fingerprint: str
    solutions: tuple[str, ...]

    @property
    def gold(self) -> str:
        """To compare; the tests of a program can be megabytes."""
        return hashlib.sha256(gold_text(self.columns).encode()).hexdigest()

    def row(self) -> dict[str, Any]:
        return {"id": self.id, "prompt": self.prompt, **self.columns, "fingerprint": self.fingerprint}


def row_id(cfg: PrepareConfig, row: dict[str, Any], number: int, where: str) -> str:
    """The row's id, or the set's name and the number, from 0."""
    if cfg.id is None:
        return f"{cfg.name}-{number:06d}"
    value = lookup(row, cfg.id, f"{where}: id")
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UserError(f"{where}: id: {cfg.id!r} holds no text or integer but {value!r:.40}")
    return str(value)


def make_draft(cfg: PrepareConfig, gold: GoldExtractor, row: dict[str, Any], name: str, where: str) -> Draft:
    """The example of a row; UnusableGold says why there is none, UserError what config or file has wrong."""
    question = lookup(row, cfg.question, f"{where}: question")
    if question is not None and not isinstance(question, str):
        raise UserError(f"{where}: question: {cfg.question!r} must hold text, not {question!r:.40}")
    kept = {column: lookup(row, path, f"{where}: keep") for column, path in cfg.keep.items()}
    found = gold(row, where)
    question = _unwrapped(question or "", cfg.unwrap).strip()
    if not question:
        raise UnusableGold("no question")
    calls = found.columns.get("tests", {}).get("style") == "call"
    template = cfg.call_template if calls and cfg.call_template is not None else cfg.template
    text = fill(template, row | found.fields | {"question": question}, where)
    prompt = chat(text, cfg.system) if cfg.chat else text
    columns = {**found.columns, **kept, "source": cfg.name}
    return Draft(name, prompt, columns, fingerprint(question), found.solutions)


def _unwrapped(question: str, wrapper: Wrapper | None) -> str:
    if wrapper is None:
        return question
    if not question.startswith(wrapper.prefix) or not question.endswith(wrapper.suffix):
        raise UnusableGold("question: not between the prefix and suffix of unwrap")
    return question.removeprefix(wrapper.prefix).removesuffix(wrapper.suffix)


def reward_columns(drafts: Sequence[Draft]) -> dict[str, list[Any]]:
    """The columns as rewards get them in a run."""
    rows = [draft.row() for draft in drafts]
    names = dict.fromkeys(name for row in rows for name in row if name != "prompt")
    return {name: [row.get(name) for row in rows] for name in names} | {"prompts": [draft.prompt for draft in drafts]}
