"""Prompts to train and evaluate on. A data set is a function of an index, so that resuming needs one integer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sparrow.errors import UserError

Message = dict[str, str]
# Reward functions get these by name, from the run.
RESERVED_COLUMNS = ("completions", "prompts", "completion_lengths", "truncated")


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


@runtime_checkable
class FiniteData(PromptData, Protocol):
    """A data set whose examples can be gone through, and some of them left out, before the first step."""

    def examples(self) -> Sequence[Example]:
        """All examples, unshuffled."""
        ...

    def drop(self, indices: set[int]) -> None:
        """Leaves out these of `examples()`; the order of the others is that of a set which never had them."""
        ...


def notes_of(data: PromptData) -> list[str]:
    """What a data set left out while it was read, a line each, for the console; its `notes`, where it has any."""
    return list(getattr(data, "notes", ()))


class Epochs:
    """Examples in an endless stream, each epoch in an order of its own; what a finite data set is made of.

    Args:
        examples: at least one.
        shuffle_seed: of the orders; None keeps the order given.
    """

    def __init__(self, examples: Sequence[Example], shuffle_seed: int | None) -> None:
        assert examples
        self.examples, self._shuffle_seed = examples, shuffle_seed
        self._order: tuple[int, list[int]] = (-1, [])

    def example(self, index: int) -> Example:
        assert index >= 0
        epoch, position = divmod(index, len(self.examples))
        if self._shuffle_seed is None:
            return self.examples[position]
        if self._order[0] != epoch:
            order = list(range(len(self.examples)))
            # Seeding with a string is stable over Python versions and platforms.
            random.Random(f"{self._shuffle_seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self.examples[self._order[1][position]]

    def without(self, indices: set[int]) -> Epochs:
        """The same but for some of the examples; UserError where none is left."""
        kept = [example for index, example in enumerate(self.examples) if index not in indices]
        if not kept:
            raise UserError(f"none of {len(self.examples)} examples is left")
        return Epochs(kept, self._shuffle_seed)


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
        self._epochs = Epochs(_read(Path(path).expanduser(), prompt_key, limit), shuffle_seed)

    @property
    def size(self) -> int:
        return len(self._epochs.examples)

    def example(self, index: int) -> Example:
        return self._epochs.example(index)

    def examples(self) -> Sequence[Example]:
        return self._epochs.examples

    def drop(self, indices: set[int]) -> None:
        self._epochs = self._epochs.without(indices)


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
    return same_columns(examples)


def same_columns(examples: Sequence[Example]) -> list[Example]:
    """The examples with all columns that any of them has; None where one lacks it."""
    names = dict.fromkeys(name for example in examples for name in example.columns)
    return [Example(example.prompt, {name: example.columns.get(name) for name in names}) for example in examples]


def _parse(line: str, prompt_key: str, where: str) -> Example:
    try:
        row = json.loads(line)
    # ValueError: also an integer with more digits than Python parses. RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got a {type(row).__name__}")
    if prompt_key not in row:
        raise UserError(f"{where}: no key {prompt_key!r}; there are {', '.join(map(repr, row)) or 'none'}")
    prompt = checked_prompt(row.pop(prompt_key), where)
    check_columns(row, where)
    return Example(prompt, row)


def check_columns(names: Iterable[str], where: str) -> None:
    """UserError for a column whose name the run needs itself."""
    for name in names:
        if name in RESERVED_COLUMNS:
            raise UserError(
                f"{where}: no column may be called {name!r}: reward functions get the run's own values under it; "
                "rename the column"
            )


def checked_prompt(prompt: Any, where: str) -> str | list[Message]:
    """The prompt, if it is text or chat messages, neither of them empty; else a UserError."""
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        return prompt
    raise UserError(f"{where}: the prompt must be text or a list of {{role, content}} messages, not {prompt!r:.60}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
