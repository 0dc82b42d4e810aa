"""Several data sets as one: all examples of each, or a stream in which each has a share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from sparrow.components.data import Epochs, Example, FiniteData, PromptData, notes_of, same_columns
from sparrow.components.duplicates import find_duplicates
from sparrow.errors import UserError


class ConcatenatedPrompts:
    """The examples of several finite data sets, which need not have the same columns; None where one lacks a column.

    Args:
        parts: their own order and shuffle_seed mean nothing here.
        shuffle_seed: shuffles each epoch over all parts; None keeps the order of the parts.
        deduplicate, gold: over all parts, as `DatasetPrompts` does it in one.
    """

    def __init__(
        self,
        parts: list[FiniteData],
        shuffle_seed: int | None = None,
        deduplicate: bool = True,
        gold: str | None = None,
    ) -> None:
        for index, part in enumerate(parts):
            if not isinstance(part, FiniteData) or part.size is None:
                raise UserError(f"parts.{index}: {type(part).__name__} has no end; use WeightedPrompts")
        examples = same_columns([example for part in parts for example in part.examples()])
        if not examples:
            raise UserError("parts: at least one data set is needed")
        self._epochs, self.notes = Epochs(examples, shuffle_seed), [note for part in parts for note in notes_of(part)]
        if deduplicate:
            duplicates = find_duplicates(examples, gold)
            self.notes += duplicates.lines("all parts")
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


class WeightedPrompts:
    """An endless stream in which each data set has its share, whatever its size; a small one comes round more often.

    The stream is made of blocks. Each has exactly the shares, up to rounding, in an order of its own.

    Args:
        parts: finite or endless, each in its own order.
        weights: above 0, one for each part.
        seed: of the order within the blocks.
        block: examples of a block, of which each part has at least one.
    """

    size = None

    def __init__(self, parts: list[PromptData], weights: list[float], seed: int = 0, block: int = 1000) -> None:
        if not parts or len(weights) != len(parts) or not all(map(_is_weight, weights)):
            raise UserError(f"weights: {weights} must be numbers above 0, one for each of the {len(parts)} parts")
        if block < len(parts):
            raise UserError(f"block: {block} is below the number of parts, {len(parts)}")
        self._parts, self._seed = parts, seed
        self._counts = _shares(weights, block)
        self._block: tuple[int, list[tuple[int, int]]] = (-1, [])
        # One batch may have no example of some part, and reward functions must see the same columns in all.
        self._columns = list(dict.fromkeys(name for part in parts for name in part.example(0).columns))

    @property
    def notes(self) -> list[str]:
        return [note for part in self._parts for note in notes_of(part)]

    def example(self, index: int) -> Example:
        number, position = divmod(index, sum(self._counts))
        if self._block[0] != number:
            self._block = (number, self._ordered(number))
        part, rank = self._block[1][position]
        example = self._parts[part].example(rank)
        return Example(example.prompt, {name: example.columns.get(name) for name in self._columns})

    def examples(self) -> Sequence[Example]:
        """Those of the finite parts, one part after the other."""
        return same_columns([example for part in self._finite() for example in part.examples()])

    def drop(self, indices: set[int]) -> None:
        start = 0
        for number, part in enumerate(self._parts):
            if not isinstance(part, FiniteData):
                continue
            stop = start + len(part.examples())
            dropped = {index - start for index in indices if start <= index < stop}
            if part.size is not None and len(dropped) == part.size:
                raise UserError(f"parts.{number}: none of its {part.size} examples is left")
            part.drop(dropped)
            start = stop

    def _finite(self) -> list[FiniteData]:
        return [part for part in self._parts if isinstance(part, FiniteData)]

    def _ordered(self, number: int) -> list[tuple[int, int]]:
        """Part and index in the part of each example of a block."""
        order = [part for part, count in enumerate(self._counts) for _ in range(count)]
        random.Random(f"{self._seed}/{number}").shuffle(order)
        ranks = [number * count for count in self._counts]
        block = []
        for part in order:
            block.append((part, ranks[part]))
            ranks[part] += 1
        return block


def _is_weight(weight: Any) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < float("inf")


def _shares(weights: list[float], block: int) -> list[int]:
    """Whole numbers in proportion to the weights that sum to `block`, by largest remainders, but at least 1 each."""
    total = sum(weights)
    exact = [block * weight / total for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != block:
        step = 1 if sum(counts) < block else -1
        eligible = [index for index in range(len(counts)) if counts[index] + step >= 1]
        nearest = max(eligible, key=lambda index: (step * (exact[index] - counts[index]), -index))
        counts[nearest] += step
    return counts
