"""Prompts to train and evaluate on. A data set is a function of an index, so that resuming needs one integer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sparrow.errors import UserError

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """One prompt.

    Attributes:
        prompt: text, encoded as it stands, or chat messages, rendered by the model's template.
        columns: what the data set says besides, for the reward functions (gold answer, ...).
    """

    prompt: str | list[Message]
    columns: dict[str, Any] = field(default_factory=dict)


class PromptData(Protocol):
    """What the recipe asks of a data set."""

    @property
    def size(self) -> int | None:
        """Examples in one epoch; None if there is no end to them."""
        ...

    def example(self, index: int) -> Example:
        """Example number `index` >= 0 of an endless stream (epoch after epoch); the same for the same index, always."""
        ...


class JsonlPrompts:
    """One JSON object a line: the prompt under `prompt_key` (a string or chat messages), every other key a column.

    A key that only some lines have is None on the others, so that reward functions see the same columns in each batch.

    Args:
        path: the file, UTF-8; blank lines are skipped.
        prompt_key: key of the prompt.
        shuffle_seed: shuffles each epoch in an order of its own; None keeps the file's order.
        limit: take the first so many examples of the file.

    Raises:
        UserError: naming file and line.
    """

    def __init__(
        self, path: str, prompt_key: str = "prompt", shuffle_seed: int | None = None, limit: int | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit must be at least 1, got {limit}")
        self._examples = _read(Path(path).expanduser(), prompt_key, limit)
        self._shuffle_seed = shuffle_seed
        self._order: tuple[int, list[int]] = (-1, [])

    @property
    def size(self) -> int:
        return len(self._examples)

    def example(self, index: int) -> Example:
        assert index >= 0
        epoch, position = divmod(index, self.size)
        if self._shuffle_seed is None:
            return self._examples[position]
        if self._order[0] != epoch:
            order = list(range(self.size))
            # Seeding with a string is stable over Python versions and platforms.
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._examples[self._order[1][position]]


def _read(path: Path, prompt_key: str, limit: int | None) -> list[Example]:
    examples: list[Example] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip() and (limit is None or len(examples) < limit):
                    examples.append(_parse(line, prompt_key, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if not examples:
        raise UserError(f"{path}: no examples in this file")
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return [Example(example.prompt, {name: example.columns.get(name) for name in names}) for example in examples]


def _parse(line: str, prompt_key: str, where: str) -> Example:
    try:
        row = json.loads(line)
    # RecursionError: brackets nested thousands deep.
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got a {type(row).__name__}")
    if prompt_key not in row:
        raise UserError(f"{where}: no key {prompt_key!r}; there are {', '.join(map(repr, row)) or 'none'}")
    if "completions" in row:
        raise UserError(f"{where}: no column may be called 'completions': reward functions get the responses under it")
    return Example(_checked_prompt(row.pop(prompt_key), where), row)


def _checked_prompt(prompt: Any, where: str) -> str | list[Message]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    raise UserError(f"{where}: the prompt must be text or a list of {{role, content}} messages, not {prompt!r:.60}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
