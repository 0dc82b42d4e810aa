"""The reward of reasoning-gym's tasks. Its scorers never run in this process.

A scorer that an answer took over could say anything, the score itself included. So an answer is compared here wherever
that can be done, and what a scorer is asked about has passed the grammar of its family first (`gym_families`). The
score comes back from the sandbox as data; each answer has a process of its own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparrow.components.gym_families import FAMILIES, canonical, judged_here
from sparrow.components.math_answer import MAX_TAIL_CHARS, last_box
from sparrow.components.reasoning_gym import gold_problem
from sparrow.errors import UserError
from sparrow.sandbox import Failure, Sandbox, SandboxError
from sparrow.sandbox.inside.values import decode
from sparrow.sandbox.limits import Limits

COUNTS = ("correct", "wrong", "no_answer", "timeout", "error")
VETTED = "0.1.25"  # the scorers of another version may do other things
_OPEN, _CLOSE = "<answer>", "</answer>"
_SCORER = Path(__file__).resolve().with_name("gym_scorer.py")
_Verdict = tuple[str, float | None]  # outcome, reward


class ReasoningGymReward:
    """Judges the answer of each response by the column `gym` (None: not applicable); 1.0 if it is right, else 0.0.

    Outcomes, in `counts` after each call: "correct", "wrong", "no_answer", "timeout" (or more memory than allowed:
    0.0 too), "error" (the scorer or the sandbox failed: None). `partial` changes rewards, not counts.

    Args:
        weight: factor in the sum of rewards.
        partial: take a scorer's credit for what is not right; for the families with a scorer only.
        timeout: seconds of the clock for one answer.
        memory_mb: of one answer's process.
        workers: answers that are scored at a time.

    Raises:
        UserError: a limit out of its range, a weight that is not finite. At the first example that needs the sandbox:
            this machine cannot isolate, or reasoning-gym is missing or not of the version that was vetted.
    """

    def __init__(
        self,
        weight: float = 1.0,
        partial: bool = False,
        timeout: float = 10.0,
        memory_mb: int = 1024,
        workers: int = 2,
    ) -> None:
        if not math.isfinite(weight):
            raise UserError(f"ReasoningGymReward: weight must be finite, got {weight}")
        if workers < 1:
            raise UserError(f"ReasoningGymReward: workers must be at least 1, got {workers}")
        Limits(seconds=timeout, memory_mb=memory_mb)  # now, not at the first example that needs the sandbox
        self.name, self.weight = "gym", weight
        self.counts = dict.fromkeys(COUNTS, 0)
        self._partial = partial
        self._limits: dict[str, Any] = {"timeout": timeout, "memory_mb": memory_mb, "workers": workers}
        self._sandbox: Sandbox | None = None

    def __call__(self, completions: list[str], /, **columns: list[Any]) -> list[float | None]:
        """Raises UserError: there is no column `gym`, or one that `ReasoningGymPrompts` did not make."""
        found = _found(completions, columns)
        verdicts: list[_Verdict | None] = [None] * len(completions)
        open_ones: dict[str, list[int]] = {}
        for index, (answer, gym) in enumerate(zip(found, _column(columns), strict=True)):
            if gym is None:
                continue
            verdicts[index] = _verdict_here(answer, gym)
            if verdicts[index] is None:
                # The samples of a prompt often agree, and then are scored once.
                formed = canonical(FAMILIES[gym["family"]], answer or "")
                open_ones.setdefault(json.dumps([formed, gym]), []).append(index)
        scored = self._map([json.loads(item) for item in open_ones])
        for indices, verdict in zip(open_ones.values(), scored, strict=True):
            for index in indices:
                verdicts[index] = verdict
        self.counts = {name: sum(verdict is not None and verdict[0] == name for verdict in verdicts) for name in COUNTS}
        return [verdict and verdict[1] for verdict in verdicts]

    def problems(self, columns: dict[str, list[Any]]) -> list[str | None]:
        """Per example why its gold answer cannot be used: its own rule or scorer refuses it."""
        reasons: list[str | None] = [gym and gold_problem(gym) for gym in _column(columns)]
        asked = [
            index for index, gym in enumerate(_column(columns))
            if gym is not None and reasons[index] is None and FAMILIES[gym["family"]].check == "scorer"
        ]  # fmt: skip
        golds = [columns["gym"][index] for index in asked]
        items = [[canonical(FAMILIES[gym["family"]], gym["answer"]), gym] for gym in golds]
        for index, (outcome, _) in zip(asked, self._map(items), strict=True):
            if outcome != "correct":
                reasons[index] = f"answer {columns['gym'][index]['answer']!r:.60}: its scorer says {outcome}"
        return reasons

    def answers(self, completions: list[str], /, **columns: list[Any]) -> list[str | None]:
        """Each response's answer in its family's form; None where there is none, or none in that form."""
        return [
            None if answer is None or gym is None else canonical(FAMILIES[gym["family"]], answer)
            for answer, gym in zip(_found(completions, columns), _column(columns), strict=True)
        ]

    def close(self) -> None:
        """Ends the sandbox's processes."""
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None

    def _map(self, items: Sequence[Sequence[Any]]) -> list[_Verdict]:
        if not items:
            return []
        if self._sandbox is None:
            roots = _package_roots()
            # The scorer's folder comes last: of its modules none may be taken for one of the package's.
            self._sandbox = Sandbox(
                **self._limits,
                binds=[str(_SCORER), *roots],
                python_path=[*roots, str(_SCORER.parent)],
                preload=[_SCORER.stem],
            )
        return self._sandbox.map(self._score, items)

    def _score(self, item: Sequence[Any]) -> _Verdict:
        answer, gym = item
        assert self._sandbox is not None
        entry = {"answer": gym["answer"], "metadata": decode(gym["metadata"])}
        try:
            score = self._sandbox.call(
                "from gym_scorer import score", "score", [gym["family"], gym["settings"], answer, entry]
            )
        except SandboxError:
            return "error", None
        return _verdict_of(score, self._partial)


def find_gym_answer(response: str, truncated: bool = False) -> str | None:
    """The answer as it is written; None where there is none.

    1. Only what follows the last `</think>` counts. A `<think>` that is not closed leaves no answer.
    2. What is between the last `<answer>` and the `</answer>` after it.
    3. Without any `<answer>`, the last `\\boxed{...}`.
    4. Without either, and if the response was not cut off, all of it.

    One that is empty or not closed is no answer, whatever stands before it. A code fence around it is taken off.
    """
    text = response[-MAX_TAIL_CHARS:].rpartition("</think>")[2]
    if "<think>" in text:
        return None
    _, opened, inner = text.rpartition(_OPEN)
    boxed, content = last_box(text)
    if opened:
        content, closed, _ = inner.partition(_CLOSE)
        content = content if closed else None
    elif not boxed:
        content = None if truncated else text
    lines = (content or "").strip().splitlines()
    if len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        lines = lines[1:-1]
    return "\n".join(lines).strip() or None


def _verdict_here(answer: str | None, gym: dict[str, Any]) -> _Verdict | None:
    if answer is None:
        return "no_answer", 0.0
    family = FAMILIES[gym["family"]]
    formed = canonical(family, answer)
    if formed is None:
        return "wrong", 0.0
    right = judged_here(family, formed, gym["answer"], gym["metadata"])
    return None if right is None else ("correct", 1.0) if right else ("wrong", 0.0)


def _verdict_of(score: Any, partial: bool) -> _Verdict:
    if isinstance(score, Failure):
        over_limits = score.status in ("timeout", "output") or score.message.startswith("MemoryError")
        # A process that ended without a word: the kernel takes one that goes over its memory.
        return ("timeout", 0.0) if over_limits or score.message.startswith("exit code") else ("error", None)
    if type(score) not in (int, float) or not 0 <= score <= 1:
        return "error", None
    return "correct" if score == 1 else "wrong", float(score if partial else score == 1)


def _found(completions: list[str], columns: dict[str, list[Any]]) -> list[str | None]:
    truncated: Sequence[Any] = columns.get("truncated") or [False] * len(completions)
    return [find_gym_answer(text, bool(cut)) for text, cut in zip(completions, truncated, strict=True)]


def _column(columns: dict[str, list[Any]]) -> list[Any]:
    if "gym" not in columns:
        raise UserError(f"ReasoningGymReward: no column 'gym'; there are {', '.join(sorted(columns)) or 'none'}")
    for index, gym in enumerate(columns["gym"]):
        if gym is not None and not _is_task(gym):
            raise UserError(
                f"ReasoningGymReward: column 'gym' at index {index} is not of ReasoningGymPrompts: {gym!r:.60}"
            )
    return columns["gym"]


def _is_task(gym: Any) -> bool:
    if not isinstance(gym, dict) or not {"family", "answer", "metadata", "settings"} <= set(gym):
        return False
    family = FAMILIES.get(str(gym["family"]))
    return family is not None and isinstance(gym["answer"], str) and set(family.metadata) <= set(gym["metadata"])


def _package_roots() -> list[str]:
    """The folders that reasoning-gym and what it needs are imported from. It is not imported here."""
    spec = importlib.machinery.PathFinder.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise UserError("reasoning-gym is not installed: pip install 'sparrow-rl[gym]'")
    own = Path(spec.origin).parents[1]
    version = next(
        (found.version for found in importlib.metadata.distributions(path=[str(own)], name="reasoning-gym")), None
    )
    if version != VETTED:
        raise UserError(
            f"reasoning-gym: the scorers of version {VETTED} were vetted, not those of {version}; install that one"
        )
    installed = [str(Path(path).resolve()) for path in sys.path if path and next(Path(path).glob("*.dist-info"), None)]
    return list(dict.fromkeys([str(own.resolve()), *installed]))
