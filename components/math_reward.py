"""The reward of mathematics: 1.0 where a response's answer equals the gold answer, else 0.0."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Sequence
from typing import Any

from sparrow.components.math_answer import find_answer, too_much
from sparrow.components.math_rules import quick_verdict
from sparrow.errors import UserError
from sparrow.worker_pool import Outcome, WorkerPool

COUNTS = ("correct", "wrong", "no_answer", "timeout", "error")
# ANTLR, behind math-verify, learns its grammar from what it parses, 50 ms and more a construct: once for all workers.
_WARM_UP = [
    (r"\frac{1}{2}", "0.25"), (r"2\sqrt{3}", r"\sqrt{12}"), (r"(1, -2)", r"(1, 3)"), ("1, 2", "2, 3"),
    (r"\{1, 2\}", r"\{2\}"), (r"[0, 1)", r"(-\infty, 3]"), (r"[0,1]\cup(2,3)", r"(2,\infty)"), ("x = 3", "y = 2x + 1"),
    (r"x \le 3", "1 < x < 2"), (r"\pm 3", r"50\%"), (r"\frac{\pi}{3}", r"2\pi r^{2}"), ("x^2 - 1", "(x - 1)(x + 1)"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 \\ 3 \end{bmatrix}"),
    (r"\log_2 8", r"\ln 2"), (r"\sin^2 x", r"\cos(2x)"), ("3 + 2i", "e^{2x}"), (r"1.5 \times 10^{3}", r"2^{10}"),
    (r"\binom{5}{2}", "10!"), ("|-3|", r"a \cdot b"), (r"\frac{\sqrt{5} - 1}{2}", r"\sqrt[3]{2}"), ("3/4", "-7/2"),
    (r"x \in (0, 1)", r"\mathbb{R}"), ("f(x) = x^2", "x = 1 or x = 2"), (r"\tan \theta", r"\lfloor 2.5 \rfloor"),
]  # fmt: skip


class MathReward:
    """Compares the answer of each response with the data set's column `answer`, by math-verify, in killable workers.

    `answer` is text (LaTeX or plain), a number, or a list of acceptable ones; None, or no such column: not applicable.
    How the answer of a response is found, and what counts as equal, is in docs/tasks.md. An answer that hangs its
    verifier, or takes its memory, scores 0.0 and is counted; one that the verifier fails on scores None and is counted.

    Args:
        weight: factor in the sum of rewards.
        workers: processes on this rank, started at the first call.
        timeout: CPU seconds for one answer.
        budget: CPU seconds of a worker for the slow answers of one call (sparrow/worker_pool.py); others do not count.
        memory_mb: address space of a worker.
        recycle: answers after which a worker is replaced.

    Raises:
        UserError: a limit that is not positive, a weight that is not finite.
    """

    def __init__(
        self,
        weight: float = 1.0,
        workers: int = 2,
        timeout: float = 3.0,
        budget: float = 30.0,
        memory_mb: int = 1024,
        recycle: int = 2000,
    ) -> None:
        if not math.isfinite(weight):
            raise UserError(f"MathReward: weight must be finite, got {weight}")
        self.name, self.weight = "math", weight
        self.counts = dict.fromkeys(COUNTS, 0)
        warm_up = [["verdict", answer, [gold]] for answer, gold in _WARM_UP]
        function = "sparrow.components.math_judge.judge"
        self._pool = WorkerPool(function, workers, timeout, budget, memory_mb, recycle, warm_up)

    def __call__(self, completions: list[str], /, **columns: list[Any]) -> list[float | None]:
        """Raises UserError for a gold answer that is no text, number or list of these."""
        found = _found(completions, columns)
        golds = [
            None if gold is None else acceptable(gold, f"at index {index} ")
            for index, gold in enumerate(_column(columns, len(completions)))
        ]
        kinds: list[str | None] = [None if accepted is None else "no_answer" for accepted in golds]
        open_ones: dict[str, list[int]] = {}
        for index, (answer, accepted) in enumerate(zip(found, golds, strict=True)):
            if answer is None or accepted is None:
                continue
            if (quick := _quick(answer, accepted)) is not None:
                kinds[index] = quick
            else:
                # The samples of a prompt often agree, and then are judged once.
                open_ones.setdefault(json.dumps([answer, accepted]), []).append(index)
        outcomes = self._pool.map([["verdict", *json.loads(pair)] for pair in open_ones])
        for indices, outcome in zip(open_ones.values(), outcomes, strict=True):
            for index in indices:
                kinds[index] = _kind(outcome)
        self.counts = {name: kinds.count(name) for name in COUNTS}
        return [None if kind in (None, "error") else float(kind == "correct") for kind in kinds]

    def problems(self, columns: dict[str, list[Any]]) -> list[str | None]:
        """Per example why its gold answer cannot be used: is empty, cannot be parsed, does not equal itself.

        None too where there is no gold answer, which is for another reward.
        """
        reasons: list[str | None] = []
        items: dict[str, None] = {}
        accepted_each: list[list[str]] = []
        for gold in _column(columns, max(map(len, columns.values()), default=0)):
            try:
                accepted, reason = [] if gold is None else acceptable(gold, ""), None
            except UserError as error:
                accepted, reason = [], str(error)
            reasons.append(reason)
            accepted_each.append(accepted)
            items.update(dict.fromkeys(accepted))
        outcomes = self._pool.map([["problem", gold] for gold in items])
        by_gold = {gold: _reason(gold, outcome) for gold, outcome in zip(items, outcomes, strict=True)}
        return [
            reason or next((by_gold[gold] for gold in accepted if by_gold[gold]), None)
            for reason, accepted in zip(reasons, accepted_each, strict=True)
        ]

    def answers(self, completions: list[str], /, **columns: list[Any]) -> list[str | None]:
        """Each response's answer in a form that equal answers share, for votes; None where there is none."""
        found = _found(completions, columns)
        texts = list(dict.fromkeys(answer for answer in found if answer is not None and not too_much(answer)))
        outcomes = self._pool.map([["canonical", answer] for answer in texts])
        # One that cannot be evaluated still is an answer, with its spelling as its form.
        forms = {
            answer: outcome.value if outcome.kind == "done" else answer
            for answer, outcome in zip(texts, outcomes, strict=True)
        }
        return [None if answer is None else forms.get(answer, answer) for answer in found]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()


def acceptable(gold: Any, where: str) -> list[str]:
    """The acceptable answers as text. Raises UserError."""
    if isinstance(gold, list | tuple):
        if not gold:
            raise UserError(f"answer {where}is an empty list")
        return [text for part in gold for text in acceptable(part, where)]
    if isinstance(gold, str) and gold.strip():
        return [gold]
    if isinstance(gold, numbers.Real) and not isinstance(gold, bool) and math.isfinite(gold):
        return [str(gold)]
    shown = "empty text" if isinstance(gold, str) else f"{gold!r:.60}"
    raise UserError(f"answer {where}must be text, a number or a list of these, not {shown}")


def _column(columns: dict[str, list[Any]], count: int) -> list[Any]:
    """A set of data without gold answers may stand beside one that has them."""
    return columns.get("answer", [None] * count)


def _found(completions: list[str], columns: dict[str, list[Any]]) -> list[str | None]:
    truncated: Sequence[Any] = columns.get("truncated") or [False] * len(completions)
    return [find_answer(text, bool(cut)) for text, cut in zip(completions, truncated, strict=True)]


def _quick(answer: str, accepted: list[str]) -> str | None:
    if too_much(answer):
        return "wrong"
    verdicts = [quick_verdict(answer, gold) for gold in accepted]
    if True in verdicts:
        return "correct"
    return None if None in verdicts else "wrong"


def _kind(outcome: Outcome) -> str:
    if outcome.kind == "done":
        return "correct" if outcome.value else "wrong"
    return "error" if outcome.kind == "error" else "timeout"


def _reason(gold: str, outcome: Outcome) -> str | None:
    if outcome.kind != "done":
        return f"answer {gold!r:.80}: its verifier ends with: {outcome.detail or outcome.kind}"
    return None if outcome.value is None else f"answer {gold!r:.80}: {outcome.value}"
