"""Mode `makespan` of the rollout benchmark: how long a whole queue takes, and what the time goes to.

With a stride of n, one decode step in n is taken, the middle one, and its time counts n times; lengths, admissions,
growth, preemptions and swaps are those of all steps. So a run of an hour is seen in a minute. What differs from the
full run: rows leave at the end of a stride, not of a window of `steps_per_look` steps; a step that is timed alone pays
for its launch alone; and the host's time at a look is counted once for each look that the full run would have taken.
All three make the figure too high rather than too low.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rollout_lengths import LengthSummary
from rollout_meter import DecodeRun
from rollout_queue import QueueRun
from rollout_shapes import step_bytes

TAIL = 0.25  # of the most rows that ever ran
PHASES = ("decode", "prefill", "swap", "host")


@dataclass(frozen=True)
class WindowTimes:
    """One window as the full run has it, in seconds.

    Attributes:
        lengths: cached tokens of each row in the middle of the window.
        steps, executed: decode steps, and those that were taken.
        decode, prefill, swap: of the device.
        host: planning, starts and looks; nothing else goes on meanwhile.
    """

    lengths: list[int]
    steps: int
    executed: int
    decode: float
    prefill: float
    swap: float
    host: float

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def seconds(self) -> float:
        return self.decode + self.prefill + self.swap + self.host


@dataclass(frozen=True, kw_only=True)
class MakespanResult:
    """One row of the table. `ms_per_step`, `gb_s` and its share of the roof are of the decode steps alone.

    Attributes:
        prompt_lengths, response_lengths: of the queue, in tokens; responses are prompt-major, as many of each prompt.
        stride: steps that one stands for; above 1 the run is sampled, see the module.
        tail_share: of the time, with fewer than a quarter of `peak_rows` rows.
        outside_graphs_share: of decode steps and what the host does between them, the latter.
        over_dense: the dense cache's makespan over this one, where both were measured.
        peak_gib: None on the CPU.
    """

    model: str
    cache: str
    backend: str
    selector: str
    requests: int
    lengths: LengthSummary
    prompt_lengths: list[int]
    response_lengths: list[int]
    stride: int
    makespan_s: float
    tokens_per_s: float
    ms_per_step: float
    steps: int
    executed_steps: int
    mean_rows: float
    peak_rows: int
    tail_share: float
    preemptions: int
    swapped_tokens: int
    peak_blocks: int
    num_blocks: int
    peak_gib: float | None
    seconds: dict[str, float]
    outside_graphs_share: float
    gb_s: float
    roof_gb_s: float
    share_of_roof: float
    over_dense: float | None = None


@torch.no_grad()
def run_windows(run: QueueRun, on_window: Callable[[int, float], None]) -> list[WindowTimes]:
    """Runs the queue to its end; `on_window` gets the tokens so far and the seconds of the makespan they took."""
    windows, seconds = [], 0.0
    while not run.generation.done:
        windows.append(_window(run))
        seconds += windows[-1].seconds
        on_window(run.generation.num_tokens, seconds)
    return windows


def summarise(
    run: QueueRun, windows: Sequence[WindowTimes], labels: tuple[str, str, str], roof_gb_s: float
) -> MakespanResult:
    """The figures of a run; `labels` are cache, backend and selector."""
    seconds = {phase: sum(getattr(window, phase) for window in windows) for phase in PHASES}
    makespan, steps = sum(seconds.values()), sum(window.steps for window in windows)
    peak_rows = max(window.rows for window in windows)
    read = sum(window.steps * step_bytes(run.model, run.cache, window.lengths) for window in windows)
    gb_s = read / max(seconds["decode"], 1e-9) / 1e9
    stats, limits = run.generation.stats, run.queue.limits
    cache, backend, selector = labels
    return MakespanResult(
        model=run.model.name,
        cache=cache,
        backend=backend,
        selector=selector,
        requests=len(limits),
        lengths=LengthSummary.of(limits),
        prompt_lengths=[len(prompt) for prompt in run.queue.prompts],
        response_lengths=limits,
        stride=run.sizes.stride,
        makespan_s=makespan,
        tokens_per_s=sum(limits) / makespan,
        ms_per_step=seconds["decode"] / max(steps, 1) * 1e3,
        steps=steps,
        executed_steps=sum(window.executed for window in windows),
        mean_rows=sum(window.steps * window.rows for window in windows) / max(steps, 1),
        peak_rows=peak_rows,
        tail_share=sum(window.seconds for window in windows if window.rows < TAIL * peak_rows) / makespan,
        preemptions=stats.preemptions,
        swapped_tokens=stats.swapped_tokens,
        peak_blocks=stats.peak_blocks,
        num_blocks=run.num_blocks,
        peak_gib=_peak_gib(run.model.device),
        seconds=seconds,
        outside_graphs_share=seconds["host"] / (seconds["host"] + seconds["decode"]),
        gb_s=gb_s,
        roof_gb_s=roof_gb_s,
        share_of_roof=gb_s / roof_gb_s,
    )


def show(result: MakespanResult) -> str:
    """A few lines."""
    r = result
    split = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in r.seconds.items())
    ratio = "" if r.over_dense is None else f", {r.over_dense:.2f} x dense"
    memory = "" if r.peak_gib is None else f", {r.peak_gib:.1f} GiB at the most"
    how = f"sampled: one step in {r.stride} taken" if r.stride > 1 else "every step taken"
    return (
        f"{r.model} {r.cache} {r.backend}: {r.requests} requests in {r.makespan_s:.1f} s, "
        f"{r.tokens_per_s:.0f} tok/s{ratio} ({how}, {r.executed_steps} of {r.steps})\n"
        f"  lengths: {r.lengths}\n"
        f"  {r.ms_per_step:.2f} ms a step, {r.mean_rows:.1f} rows in the mean, {r.peak_rows} at the most, "
        f"{r.tail_share:.0%} of the time in the tail\n"
        f"  {split}; outside graphs {r.outside_graphs_share:.1%} of decode\n"
        f"  {r.gb_s:.0f} GB/s of {r.roof_gb_s:.0f} ({r.share_of_roof:.0%}); {r.preemptions} preemptions, "
        f"{r.swapped_tokens} tokens swapped; {r.peak_blocks} of {r.num_blocks} blocks{memory}"
    )


def _window(run: QueueRun) -> WindowTimes:
    before, started = run.clock.seconds.copy(), run.clock.now()
    run.stepper.last = DecodeRun()
    run.generation.window()
    wall = run.clock.now() - started
    spent = {phase: seconds - before[phase] for phase, seconds in run.clock.seconds.items()}
    taken = run.stepper.last
    decode = spent.get("decode", 0.0) * taken.steps / max(taken.executed, 1)
    looks = -(-taken.steps // run.sizes.steps_per_look) if taken.executed < taken.steps else 1
    host = spent.get("start", 0.0) + (wall - sum(spent.values())) * looks
    return WindowTimes(
        taken.lengths, taken.steps, taken.executed, decode, spent.get("prefill", 0.0), spent.get("swap", 0.0), host
    )  # fmt: skip


def _peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
