"""P5 of the acceptance rate over cached length and budget, how sure it is, and the budgets that keep it above tau.

The interval is a bootstrap over whole sequences. Tokens of one sequence are no independent draws: a trajectory that
goes astray is bad for hundreds of tokens in a row, and an interval from resampled tokens would be several times too
narrow.

Axes: N tokens, S sequences, R resamples, V acceptance rates on the grid that occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparrow.components.acceptance import TAIL, tail_quantile
from sparrow.errors import UserError

# Resamples are weighed as counts over a grid, so that their cost does not grow with the tokens; bounds are rounded
# outwards to it.
GRID = 4096


@dataclass(frozen=True)
class Measured:
    """Acceptance of N decoded tokens under one budget.

    Attributes:
        alpha_N, floor_N: the chosen estimate, and what the top-k estimate reads for dense against dense; fp32.
        cached_length_N: tokens in the KV cache when the token was sampled.
        sequence_N: which sequence it belongs to, numbered over all ranks.
    """

    alpha_N: Tensor
    floor_N: Tensor
    cached_length_N: Tensor
    sequence_N: Tensor


@dataclass(frozen=True)
class Cell:
    """P5 of the tokens of one bin under one budget, with its interval; NaN without tokens."""

    bin_start: int
    budget: int
    p5: float
    low: float
    high: float
    tokens: int
    sequences: int


def joined(parts: Sequence[Measured]) -> Measured:
    """The tokens of all ranks."""
    return Measured(
        torch.cat([part.alpha_N for part in parts]),
        torch.cat([part.floor_N for part in parts]),
        torch.cat([part.cached_length_N for part in parts]),
        torch.cat([part.sequence_N for part in parts]),
    )


def bins_of(lengths_N: Sequence[Tensor], bin_width: int, from_length: int, until_length: int | None) -> range:
    """First cached lengths of the bins that there are tokens for, between the limits; one tensor of lengths a budget.

    Bins before the shortest prompt are no gaps: nothing is ever decoded there.
    """
    filled = [lengths for lengths in lengths_N if lengths.numel()]
    if not filled:
        raise UserError("no token was decoded: every response ended with its first token, which is the prefill's")
    first = max(int(min(lengths.min() for lengths in filled)) // bin_width, -(-from_length // bin_width))
    last = int(max(lengths.max() for lengths in filled)) // bin_width
    if until_length is not None:
        last = min(last, -(-until_length // bin_width) - 1)
    if first > last:
        raise UserError(
            f"from_length {from_length}, until_length {until_length}: no bin of {bin_width} tokens that starts between "
            "them has been measured"
        )
    return range(first * bin_width, (last + 1) * bin_width, bin_width)


def inside(measured: Measured, start: int, width: int) -> Measured:
    """The tokens of one bin of cached length."""
    inside_N = (measured.cached_length_N >= start) & (measured.cached_length_N < start + width)
    return Measured(**{name: values_N[inside_N] for name, values_N in vars(measured).items()})


def cells_of(
    measured: Measured, budget: int, bins: range, confidence: float, resamples: int, seed: int = 0
) -> list[Cell]:
    """One cell for each bin of cached length.

    Raises:
        UserError: an acceptance rate is not finite.
    """
    if broken := int((~measured.alpha_N.isfinite()).sum()):
        raise UserError(f"budget {budget}: the acceptance rate of {broken} tokens is not finite")
    cells = []
    for start in bins:
        part = inside(measured, start, bins.step)
        alpha_N, sequence_N = part.alpha_N, part.sequence_N
        p5 = low = high = float("nan")
        if len(alpha_N):
            p5 = tail_quantile(alpha_N, TAIL)
            low, high = bootstrap_interval(alpha_N, sequence_N, TAIL, confidence, resamples, seed)
        cells.append(Cell(start, budget, p5, low, high, len(alpha_N), len(sequence_N.unique())))
    return cells


def bootstrap_interval(
    alpha_N: Tensor, sequence_N: Tensor, quantile: float, confidence: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Percentile interval of a quantile, from sequences drawn with replacement, each with all of its tokens.

    Args:
        alpha_N: at least one value, in [0, 1].
        sequence_N: any integers.
    """
    value_R, outside = resampled_quantile(alpha_N, sequence_N, quantile, resamples, seed), (1 - confidence) / 2
    return tail_quantile(value_R, outside), min(tail_quantile(value_R, 1 - outside) + 1 / GRID, 1.0)


def resampled_quantile(alpha_N: Tensor, sequence_N: Tensor, quantile: float, resamples: int, seed: int) -> Tensor:
    """The quantile of each resample [R], down to the grid; for the same sequences and seed the draws are the same."""
    member_N = sequence_N.unique(return_inverse=True)[1]
    S = int(member_N.max()) + 1
    point_V, point_N = (alpha_N.double() * GRID).floor().unique(return_inverse=True)
    V = len(point_V)
    tokens_SV = torch.bincount(member_N * V + point_N, minlength=S * V).view(S, V)
    generator = torch.Generator().manual_seed(seed)
    drawn_RS = torch.randint(S, (resamples, S), generator=generator)
    times_RS = torch.zeros(resamples, S).scatter_add_(1, drawn_RS, torch.ones(resamples, S))
    # fp32 counts whole numbers exactly up to 16M; their running sums do not stay below it.
    below_RV = (times_RS @ tokens_SV.float()).double().cumsum(-1)
    return point_V[torch.searchsorted(below_RV, quantile * below_RV[:, -1:]).squeeze(1)] / GRID


def first_sequences(measured: Measured, S: int) -> Measured:
    """The tokens of the first S sequences."""
    kept_N = measured.sequence_N < S
    return Measured(**{name: values_N[kept_N] for name, values_N in vars(measured).items()})


def by_response(measured: Measured, prompt_length_S: Tensor) -> Measured:
    """The same tokens at their position in the response, in the place of the cached length.

    Args:
        prompt_length_S: of each sequence, by its number.
    """
    return replace(measured, cached_length_N=measured.cached_length_N - prompt_length_S[measured.sequence_N])


def refuse_small_cells(cells: Sequence[Cell], min_tokens: int, min_sequences: int) -> None:
    """Raises UserError that names each bin with too little in it, the budgets there, and what is missing."""
    lines = []
    for start in dict.fromkeys(cell.bin_start for cell in cells):
        here = [cell for cell in cells if cell.bin_start == start]
        if small := [cell for cell in here if cell.tokens < min_tokens or cell.sequences < min_sequences]:
            missing = {
                "tokens": min_tokens - min(cell.tokens for cell in small),
                "sequences": min_sequences - min(cell.sequences for cell in small),
            }
            needs = " and ".join(f"{count} {name}" for name, count in missing.items() if count > 0)
            lines.append(f"bin {start}, budgets {', '.join(str(cell.budget) for cell in small)}: needs {needs} more")
    if lines:
        raise UserError(
            f"no budget is chosen from cells below min_tokens {min_tokens} or min_sequences {min_sequences}:\n"
            + "\n".join(lines)
            + "\nmore `prompts` fill them: the same command with a larger number measures only those that are new; a "
            "larger acceptance.bin_width joins them; until_length cuts the last bins off, from_length the first"
        )


def choose(cells: Sequence[Cell], tau: float, strict: bool = True) -> list[Cell]:
    """Per bin the cell of the smallest budget whose lower bound is at least tau, budgets never falling with length.

    Args:
        strict: False ends the path before the first bin in which no budget reaches tau.

    Raises:
        UserError: there is such a bin.
    """
    chosen: list[Cell] = []
    for start in dict.fromkeys(cell.bin_start for cell in cells):
        column = sorted((cell for cell in cells if cell.bin_start == start), key=lambda cell: cell.budget)
        least = chosen[-1].budget if chosen else 0
        enough = [cell for cell in column if cell.low >= tau and cell.budget >= least]
        if not enough and not strict:
            break
        if not enough:
            best = max(column, key=lambda cell: cell.low)
            raise UserError(
                f"budgets: none keeps the lower bound of P5 at tau {tau:g} from cached length {start} on; the best is "
                f"{best.budget} pages with P5 {best.p5:.3f}, at least {best.low:.3f}: add larger ones, raise `prompts` "
                "for a narrower bound (what is measured is kept), or lower acceptance.tau"
            )
        chosen.append(enough[0])
    return chosen


def agreement(cells: Sequence[Cell], others: Sequence[Cell]) -> dict[tuple[int, int], float]:
    """P5 of the first minus P5 of the second by (bin, budget), for the cells that both have tokens in."""
    theirs = {(cell.bin_start, cell.budget): cell.p5 for cell in others if cell.tokens}
    return {
        (cell.bin_start, cell.budget): cell.p5 - theirs[cell.bin_start, cell.budget]
        for cell in cells
        if cell.tokens and (cell.bin_start, cell.budget) in theirs
    }
