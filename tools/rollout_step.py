"""Modes `step` and `profile` of the rollout benchmark: decode steps of a fixed batch at a fixed context.

Axes: B rows, N blocks per row, K KV heads, P pages, D head dim.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import torch
from rollout_shapes import RandomModel, fill_with_noise, step_bytes

from sparrow.engine.decode import Drawing
from sparrow.engine.graphs import GraphStepper
from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.window import Window
from sparrow.kernels.timing import milliseconds
from sparrow.protocols import KVCache

STEPS = 8  # per timing
TIMINGS = 7
TOP_K = 20


@dataclass
class StepResult:
    """One row of the table; `roof_gb_s` is the read bandwidth measured in the same run."""

    model: str
    cache: str
    backend: str
    selector: str
    batch: int
    context: int
    ms: float
    tokens_per_s: float
    gb: float
    gb_s: float
    roof_gb_s: float
    roof_ms: float
    share_of_roof: float
    capture_s: float
    peak_gib: float


class FixedBatch:
    """A batch of B rows of one context length, over a pool of random keys and values with permuted blocks."""

    def __init__(self, model: RandomModel, cache: KVCache, batch: int, context: int) -> None:
        self.cache, self.batch = cache, batch
        device, config = model.device, model.config
        blocks = -(-context // cache.block_size)
        cache.allocate(config, batch * blocks, device, model.dtype)
        generator = torch.Generator(device).manual_seed(0)
        fill_with_noise(cache, generator)
        window = Window(STEPS + 1, batch + 1, TOP_K, 0, device, model.dtype)
        self.rows = Rows(batch, blocks, 1024, window, device)
        table = torch.randperm(batch * blocks, generator=generator, device=device) + 1
        self.rows.block_table_RN[:batch] = table.view(batch, blocks)
        self.rows.prompt_length_R[:batch] = context - STEPS
        self.rows.uniforms_RL.uniform_(generator=generator)
        eos_V = torch.zeros(config.vocab_size, dtype=torch.bool, device=device)
        started = time.perf_counter()
        drawing = Drawing(SamplingParams(), eos_V, TOP_K)
        with torch.no_grad():
            self.stepper = GraphStepper(model.decoder, cache, self.rows, drawing, [(batch, blocks)])
        torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - started
        self.longest = blocks * cache.block_size

    def steps(self) -> None:
        """`STEPS` steps from the same lengths."""
        self.rows.response_length_R.zero_()
        self.stepper.run(list(range(self.batch)), self.longest, STEPS)

    def milliseconds(self) -> float:
        """Median time of a step."""
        self.steps()
        return statistics.median(milliseconds(self.steps, TIMINGS)) / STEPS

    def kernels(self) -> list[tuple[str, float, int]]:
        """Name, ms per step and launches per step of every kernel, slowest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self.steps()
            torch.cuda.synchronize()
        rows = [(e.key, e.self_device_time_total / 1e3 / STEPS, e.count // STEPS) for e in profiler.key_averages()]
        return sorted(rows, key=lambda row: -row[1])

    def close(self) -> None:
        """Gives pool and graphs back."""
        del self.stepper, self.rows
        self.cache.release()
        torch.cuda.empty_cache()


def measure(
    model: RandomModel, cache: KVCache, labels: tuple[str, str, str], batch: int, context: int, roof_gb_s: float
) -> tuple[StepResult, FixedBatch]:
    """Times one case; the batch is still open. `labels` are cache, backend and selector."""
    torch.cuda.reset_peak_memory_stats()
    fixed = FixedBatch(model, cache, batch, context)
    ms = fixed.milliseconds()
    read = step_bytes(model, cache, [context] * batch)
    roof_ms = read / roof_gb_s / 1e6
    result = StepResult(
        model.name, *labels, batch, context, ms, batch / ms * 1e3, read / 1e9, read / ms / 1e6, roof_gb_s,
        roof_ms, roof_ms / ms, fixed.capture_s, torch.cuda.max_memory_allocated() / 2**30,
    )  # fmt: skip
    return result, fixed


def show_step(result: StepResult) -> str:
    """One line."""
    r = asdict(result)
    return (
        "{model:5s} {cache:15s} {backend:7s} b{batch:<3d} {context:6d} tok  {ms:7.3f} ms  roof {roof_ms:6.3f} "
        "({share_of_roof:4.0%})  {tokens_per_s:7.0f} tok/s  {gb_s:5.0f} GB/s  capture {capture_s:4.1f} s  "
        "{peak_gib:5.1f} GiB"
    ).format(**r)
