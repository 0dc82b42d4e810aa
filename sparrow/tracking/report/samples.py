"""The newest rows of samples.jsonl, which may be far larger than memory: only its end is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparrow.tracking.report.metrics import parse_line

# Enough for the samples of the last steps, at 2,048 tokens each.
TAIL_BYTES = 8 * 2**20
NOT_MEASURED = -1


@dataclass(frozen=True)
class Sample:
    """A rollout as its row has it; what an older or a damaged row lacks is None or empty.

    Attributes:
        tokens: text pieces of the response, without the `omitted` ones between its two halves.
        alphas: acceptance of each in thousandths, NOT_MEASURED where there is none.
        lowest: the tokens with the lowest alpha, each {position, alpha, before, token, after}.
    """

    step: int
    prompt: str
    response: str
    reward: float | None = None
    advantage: float | None = None
    length: int | None = None
    terminated: bool | None = None
    alpha_mean: float | None = None
    alpha_min: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)
    alphas: list[int] = field(default_factory=list)
    omitted: int = 0
    lowest: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Samples:
    """The newest first; `skipped` bytes before them were not read."""

    rows: list[Sample] = field(default_factory=list)
    skipped: int = 0


def read_samples(path: Path, count: int) -> Samples:
    """The last `count` samples that can be read; no file, no samples."""
    if not path.exists():
        return Samples()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).split(b"\n")
    # What follows the last newline is being written; what precedes the first one has lost its beginning.
    whole = lines[1 if start else 0 : -1]
    found = [_sample(row) for row in map(parse_line, reversed(whole[-4 * count :])) if isinstance(row, dict)]
    return Samples([sample for sample in found if sample is not None][:count], start)


def _sample(row: dict[str, Any]) -> Sample | None:
    """None where the row has no step or no response."""
    step, response = row.get("step"), row.get("response")
    if type(step) is not int or not isinstance(response, str):
        return None
    tokens, alphas = _tokens(row)
    return Sample(
        step,
        row["prompt"] if isinstance(row.get("prompt"), str) else "",
        response,
        reward=_number(row.get("reward")),
        advantage=_number(row.get("advantage")),
        length=row["length"] if type(row.get("length")) is int else None,
        terminated=row["terminated"] if isinstance(row.get("terminated"), bool) else None,
        alpha_mean=_number(row.get("alpha_mean")),
        alpha_min=_number(row.get("alpha_min")),
        rewards={name: _number(value) for name, value in _dict(row.get("rewards")).items()},
        tokens=tokens,
        alphas=alphas,
        omitted=row["omitted"] if type(row.get("omitted")) is int else 0,
        lowest=[low for low in _list(row.get("lowest")) if _is_low(low)],
    )


def _tokens(row: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Both lists, or none where they do not belong together."""
    tokens, alphas = _list(row.get("tokens")), _list(row.get("alphas"))
    sound = all(isinstance(token, str) for token in tokens) and all(type(alpha) is int for alpha in alphas)
    return (tokens, alphas) if sound and len(tokens) == len(alphas) else ([], [])


def _is_low(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("position")) is int and _number(value.get("alpha")) is not None


def _number(value: Any) -> float | None:
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1000:
        return None  # more than a float holds
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
