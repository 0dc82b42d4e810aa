"""How long new weights take to reach the rollout engine, with real shapes and random weights.

  python tools/bench_sync.py --model 4b --out sync_4b.json
  python tools/bench_sync.py --model 1.7b 4b 8b --dtype bfloat16
  torchrun --nproc_per_node 2 tools/bench_sync.py --model 4b --dtype bfloat16

Measured after a change of the trainer's weights, with the device waited for at both ends of each part:

  sync   `Engine.sync`: the old copy and the KV pool are dropped
  wake   a fresh copy in the rollout's dtype, and the probe that compares it with the trainer's model
  ready  both, and all else before the first token: the pool, a prefill, the CUDA graphs of one row

The trainer's weights are fp32. `--dtype`, as in a config, is of its forward: with bfloat16, and with several processes,
they are sharded, and each layer is gathered in that dtype on its way into the copy. Each part lasts until the slowest
process is done. On the CPU (--model tiny) one process's engine shares the trainer's weights: there is nothing to copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from random_trainer import random_trainer, trainer_device
from rollout_shapes import MODELS, model_config
from tool_results import benchmark

from sparrow.components.kv_cache import DenseKVCache
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.memory_sizes import parameter_counts
from sparrow.models.decoder import Decoder
from sparrow.training import distributed

TARGET_S = {1: 0.5, 2: 1.0}  # sync and wake of 4B, by the number of GPUs
PROMPT = list(range(1, 33))
CHANGE = 1 + 2**-7  # the least that bf16 shows


@dataclass(frozen=True)
class SyncResult:
    """Seconds are medians over the repeats, `worst_s` the longest sync and wake of one.

    Attributes:
        gb: the fewest bytes: a process's own weights read, and the whole copy written.
        peak_gib: of the first process's device.
    """

    model: str
    weights: str
    processes: int
    trained_in: str
    rollout_in: str
    parameters: int
    repeats: int
    sync_s: float
    wake_s: float
    worst_s: float
    ready_s: float
    gb: float
    probe_difference: float
    peak_gib: float


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    with trainer_device() as device:
        return benchmark(lambda: _measured(args, device), args.out, device)


def _measured(args: argparse.Namespace, device: torch.device) -> dict[str, object]:
    results = []
    for name in args.model:
        results.append(measure(name, device, args))
        if distributed.rank() == 0:
            print(show(results[-1]), flush=True)
    return {"target_s": TARGET_S.get(distributed.world_size()), "results": [asdict(result) for result in results]}


def measure(name: str, device: torch.device, args: argparse.Namespace) -> SyncResult:
    """Times `args.repeats` syncs of one model; one before them warms up."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = random_trainer(model_config(name), device, getattr(torch, args.dtype))
    rollout_dtype = "bfloat16" if device.type == "cuda" else None
    limits = EngineConfig(max_rows=args.max_rows, kv_tokens=args.kv_tokens, max_new_tokens=4, dtype=rollout_dtype)  # type: ignore[arg-type]
    engine = Engine(model, DenseKVCache(), [], limits)
    _generate(engine)
    rows = [_repeat(engine, model, device) for _ in range(args.repeats + 1)][1:]
    sync_s, wake_s, ready_s = (statistics.median(column) for column in zip(*rows, strict=True))
    count = parameter_counts(model.config).total
    copied = type(engine.weights).__name__ != "SharedWeights"
    read = model.head_weight.itemsize / distributed.world_size()
    return SyncResult(
        model=name,
        weights=type(engine.weights).__name__,
        processes=distributed.world_size(),
        trained_in=args.dtype,
        rollout_in=str(engine.dtype).removeprefix("torch."),
        parameters=count,
        repeats=args.repeats,
        sync_s=sync_s,
        wake_s=wake_s,
        worst_s=max(sync + wake for sync, wake, _ in rows),
        ready_s=ready_s,
        gb=count * (read + engine.dtype.itemsize) / 1e9 if copied else 0.0,
        probe_difference=float(engine.weights.probe_difference),  # type: ignore[attr-defined]
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    )


def _repeat(engine: Engine, model: Decoder, device: torch.device) -> tuple[float, float, float]:
    """Seconds of sync, wake and ready, from an engine that is awake to one that is."""
    with torch.no_grad():
        model.model.norm.weight.mul_(CHANGE)
    sync_s = _seconds(engine.sync, device)
    wake_s = _seconds(engine.weights.wake, device)
    engine.weights.sleep()
    return sync_s, wake_s, sync_s + _seconds(lambda: _generate(engine), device)


def _generate(engine: Engine) -> None:
    engine.generate([PROMPT], 1, SamplingParams(), limits=[1])


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    """Until the device, and all processes, are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    distributed.barrier()


def show(result: SyncResult) -> str:
    """One line."""
    total, target = result.sync_s + result.wake_s, TARGET_S.get(result.processes)
    aim = "" if target is None else f"; target {target:g} for 4b"
    speed = f"{result.gb / result.wake_s:.0f} GB/s" if result.gb else "nothing copied"
    several = f", {result.processes} processes" if result.processes > 1 else ""
    return (
        f"{result.model:5s} {result.weights}, {result.trained_in} to {result.rollout_in}{several}  sync "
        f"{result.sync_s:.3f} s + wake {result.wake_s:.3f} s = {total:.3f} s (worst {result.worst_s:.3f}{aim})  {speed}"
        f"  ready {result.ready_s:.3f} s  probe {result.probe_difference:.4f} nats  peak {result.peak_gib:.1f} GiB"
    )


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the trainer's forward")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-rows", type=int, default=64)
    parser.add_argument("--kv-tokens", type=int, default=131072)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
