"""What is looked at before the first step: prompts that are too long, gold answers that no reward can use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sparrow.components.data import Example, FiniteData, PromptData, check_columns, notes_of
from sparrow.errors import UserError

Problems = Callable[[dict[str, list[Any]]], list[str | None]]
_SHOWN = 3


@dataclass(frozen=True)
class CheckReport:
    """What was left out.

    Attributes:
        total: examples before; None where there is no end to them, and nothing was looked at.
        too_long: id (or index) and tokens of each prompt above the limit.
        bad_gold: id (or index) of each gold answer that cannot be used, and why.
        notes: what the data set itself left out while it was read.
        max_prompt_tokens: the limit.
    """

    total: int | None
    too_long: Sequence[tuple[str, int]] = ()
    bad_gold: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    max_prompt_tokens: int | None = None

    @property
    def kept(self) -> int | None:
        return None if self.total is None else self.total - len(self.too_long) - len(self.bad_gold)

    def lines(self) -> list[str]:
        """For the console."""
        lines = list(self.notes)
        if self.too_long:
            longest = max(tokens for _, tokens in self.too_long)
            shown = _shown([f"{name} ({tokens})" for name, tokens in self.too_long])
            lines.append(
                f"{len(self.too_long)} of {self.total} prompts dropped: above {self.max_prompt_tokens} tokens, the "
                f"longest has {longest}: {shown}"
            )
        if self.bad_gold:
            shown = _shown([f"{name}: {reason}" for name, reason in self.bad_gold])
            lines.append(f"{len(self.bad_gold)} of {self.total} prompts dropped: gold answer unusable: {shown}")
        if self.total is not None:
            lines.append(f"{self.kept} prompts")
        return lines


def check_prompts(
    data: PromptData,
    encode: Callable[[Example], list[int]],
    max_prompt_tokens: int | None,
    problems: Problems | None,
) -> CheckReport:
    """Drops from a finite data set the prompts that are too long and those whose gold answer cannot be used.

    The outcome depends on data, tokenizer and rewards only, so that all processes of a run drop the same ones.

    Args:
        data: an endless one is left as it is; where it has finite parts (`WeightedPrompts`), they are checked.
        encode: the prompt as the model gets it; token ids are counted, not kept.
        max_prompt_tokens: None is no limit.
        problems: of the rewards: per example why its gold answer cannot be used, else None.

    Raises:
        UserError: nothing would be left, or a column has a name that the run needs.
    """
    if not isinstance(data, FiniteData) or not data.examples():
        return CheckReport(None)
    examples = data.examples()
    check_columns(examples[0].columns, "data")
    lengths = [] if max_prompt_tokens is None else [len(encode(example)) for example in examples]
    too_long = {index: tokens for index, tokens in enumerate(lengths) if tokens > (max_prompt_tokens or 0)}
    bad_gold = _bad_golds(examples, too_long, problems)
    report = CheckReport(
        len(examples),
        [(_name(examples, index), tokens) for index, tokens in too_long.items()],
        [(_name(examples, index), reason) for index, reason in bad_gold.items()],
        notes_of(data),
        max_prompt_tokens,
    )
    if report.kept == 0:
        raise UserError("data: no example is left: " + "; ".join(report.lines()[:-1]))
    data.drop(too_long.keys() | bad_gold.keys())
    return report


def _bad_golds(examples: Sequence[Example], too_long: dict[int, int], problems: Problems | None) -> dict[int, str]:
    if problems is None:
        return {}
    asked = [index for index in range(len(examples)) if index not in too_long]
    columns = {name: [examples[index].columns[name] for index in asked] for name in examples[0].columns}
    columns["prompts"] = [examples[index].prompt for index in asked]
    reasons = problems(columns) if asked else []
    if len(reasons) != len(asked):
        raise UserError(f"reward: problems() returned {len(reasons)} values for {len(asked)} examples")
    return {index: reason for index, reason in zip(asked, reasons, strict=True) if reason is not None}


def _name(examples: Sequence[Example], index: int) -> str:
    """The example's `id`, else its index."""
    identity = examples[index].columns.get("id")
    return str(index if identity is None else identity)


def _shown(items: Sequence[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f", and {rest} more" if rest > 0 else "")
