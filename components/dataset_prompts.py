"""Prompts from data sets as they are published: columns are mapped, questions are put into a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.components.data import Epochs, Example, check_columns, checked_prompt, same_columns
from sparrow.components.duplicates import find_duplicates
from sparrow.components.row_fields import chat, fill, lookup
from sparrow.components.tables import open_table
from sparrow.errors import UserError


class DatasetPrompts:
    """A data set of the hub or of local files (`open_table` in `components/tables.py` says which).

    Args:
        path, name, split, revision: as `open_table` has them.
        prompt: column of the prompt, or a dotted path: text or chat messages. `prompt` where there is no template.
        template: makes the prompt of several columns, `{question}` standing for one; instead of `prompt`.
        system: a system message before the prompt, which must be text.
        chat: text becomes the message of a user, rendered by the model's template; a `system` message implies it.
        columns: name for the reward functions -> column or dotted path, with `?` at its end where it may be missing.
            None: all columns but that of the prompt, under their own names.
        shuffle_seed: shuffles each epoch in an order of its own; None keeps the order of the data set.
        limit: take the first so many rows.
        deduplicate: prompts that differ by no more than case and spacing stand once (`components/duplicates.py`); those
            with different gold answers not at all.
        gold: name, for the reward functions, of the column with the gold answer; None: all of `answer`, `tests` and
            `ground_truth` that there are. It tells repeated prompts from conflicting ones.

    Raises:
        UserError: naming file, row and column.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        prompt: str | None = None,
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
        columns: dict[str, str] | None = None,
        shuffle_seed: int | None = None,
        limit: int | None = None,
        deduplicate: bool = True,
        gold: str | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise UserError(f"limit must be at least 1, got {limit}")
        if prompt is not None and template is not None:
            raise UserError("prompt and template: one of them makes the prompt; leave the other out")
        check_columns(columns or {}, f"{path}: columns")
        self._prompt, self._template, self._system = prompt or "prompt", template, system
        self._chat = chat or system is not None
        table = open_table(path, name, split, revision)
        examples = same_columns([self._example(row, columns, where) for where, row in table.rows(limit)])
        self._epochs, self.notes = Epochs(examples, shuffle_seed), list[str]()
        if deduplicate:
            duplicates = find_duplicates(examples, gold)
            self.notes = duplicates.lines(table.label)
            self.drop(duplicates.repeated | duplicates.conflicting)

    @property
    def size(self) -> int:
        return len(self._epochs.examples)

    def example(self, index: int) -> Example:
        return self._epochs.example(index)

    def examples(self) -> Sequence[Example]:
        return self._epochs.examples

    def drop(self, indices: set[int]) -> None:
        self._epochs = self._epochs.without(indices)

    def _example(self, row: Mapping[str, Any], columns: dict[str, str] | None, where: str) -> Example:
        if columns is None:
            kept = {name: value for name, value in row.items() if self._template or name != self._prompt}
            check_columns(kept, where)
        else:
            kept = {name: lookup(row, path, where) for name, path in columns.items()}
        return Example(self._prompt_of(row, where), kept)

    def _prompt_of(self, row: Mapping[str, Any], where: str) -> str | list[dict[str, str]]:
        if self._template is not None:
            prompt: Any = fill(self._template, row, where)
        else:
            prompt = lookup(row, self._prompt, where)
        prompt = checked_prompt(prompt, f"{where}: {'template' if self._template else self._prompt}")
        if not self._chat:
            return prompt
        if not isinstance(prompt, str):
            raise UserError(f"{where}: {self._prompt}: holds messages already; leave `chat` and `system` out")
        return chat(prompt, self._system)


def verl_prompts(
    path: str, split: str | None = None, shuffle_seed: int | None = None, limit: int | None = None
) -> DatasetPrompts:
    """Parquet files with verl's columns: prompt, data_source, ability, reward_model{style, ground_truth}, extra_info.

    The gold answer becomes `answer`, the data set's name `source`; `ability` and `extra_info` keep their names.
    """
    columns = {
        "answer": "reward_model.ground_truth",
        "source": "data_source",
        "ability": "ability?",
        "id": "extra_info.index?",
        "extra_info": "extra_info?",
    }
    return DatasetPrompts(path, split=split, columns=columns, shuffle_seed=shuffle_seed, limit=limit)
