"""What a calibration says on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparrow.components.acceptance import TAIL, tail_quantile
from sparrow.recipes.calibrate_surface import Cell, Measured


def progress_line(measured: Measured, bins: range, estimator: str) -> str:
    """P5 by bin, the tokens that each rests on, and the top-k floor, without which no top-k figure is to be read."""
    bin_N = measured.cached_length_N // bins.step * bins.step
    cells = {start: measured.alpha_N[bin_N == start] for start in bins}
    tokens = [len(alpha_N) for alpha_N in cells.values()]
    shown = " ".join(f"{start}:{tail_quantile(alpha_N, TAIL):.3f}" for start, alpha_N in cells.items() if len(alpha_N))
    floor = "" if estimator == "exact" else f"  floor {tail_quantile(measured.floor_N, TAIL):.3f}"
    return f"P5 {shown}{floor}  {min(tokens):,} to {max(tokens):,} tokens a cell"


def schedule_table(chosen: Sequence[Cell], page_size: int) -> list[str]:
    """The chosen path, a line for each bin."""
    lines = ["from    pages   tokens read   P5     lower bound   measured tokens (sequences)"]
    for cell in chosen:
        lines.append(
            f"{cell.bin_start:<7} {cell.budget:<7} {cell.budget * page_size:<13} {cell.p5:.3f}  {cell.low:<13.3f} "
            f"{cell.tokens:,} ({cell.sequences})"
        )
    return lines


def agreement_line(differences: Mapping[tuple[int, int], float], chosen: Sequence[Cell], other: Sequence[Cell]) -> str:
    """How well the two modes agree, over the cells and on the schedule; `other` ends where no budget reaches tau."""
    sizes = {key: abs(value) for key, value in differences.items()}
    (start, budget), largest = max(sizes.items(), key=lambda item: item[1])
    ours, theirs = ([cell.budget for cell in cells] for cells in (chosen, other))
    schedules = "the same schedule" if ours == theirs else f"schedules {ours} and {theirs}"
    return (
        f"generate and teacher_forced: P5 differs by {sum(sizes.values()) / len(sizes):.4f} on average over "
        f"{len(sizes)} cells, by at most {largest:.4f} (bin {start}, budget {budget}); {schedules}"
    )


def held_out_table(cells: Sequence[Cell], tau: float, min_tokens: int) -> list[str]:
    """P5 of the schedule on prompts that calibration did not see, and how far it is above tau."""
    lines = [
        f"held-out prompts under the chosen schedule, tau {tau:g}:",
        "from    pages   P5     interval        P5 - tau  tokens",
    ]
    for cell in cells:
        few = f", fewer than min_tokens {min_tokens}" if cell.tokens < min_tokens else ""
        interval = f"[{cell.low:.3f}, {cell.high:.3f}]"
        lines.append(
            f"{cell.bin_start:<7} {cell.budget:<7} {cell.p5:.3f}  {interval}  {cell.p5 - tau:<+8.3f}  "
            f"{cell.tokens:,}{few}"
        )
    return lines
