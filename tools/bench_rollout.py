"""Benchmarks of the rollout engine on one GPU, with real shapes and random weights.

  python tools/bench_rollout.py step --model 4b --batch 20 --context 32768 --cache dense qwen3-4b-0.86
  python tools/bench_rollout.py profile --model 4b --batch 20 --cache qwen3-4b-0.86
  python tools/bench_rollout.py makespan --model 4b --cache dense qwen3-4b-0.86 --stride 64
  python tools/bench_rollout.py cold --model 4b --cache qwen3-4b-0.86

`makespan` and `cold` run on a CPU too, to try them: --model tiny. docs/performance.md says how each mode measures, and
what was measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rollout_cold import Stopwatch, measure_cold, seconds_since_start, show_cold
from rollout_lengths import KINDS, LengthDistribution
from rollout_makespan import MakespanResult, run_windows, show, summarise
from rollout_progress import progress
from rollout_queue import EngineSizes, QueueRun, RequestQueue, make_queue
from rollout_shapes import BACKENDS, MODELS, SELECTORS, RandomModel, kv_cache, random_model, tune
from rollout_step import FixedBatch, measure, show_step
from roof import read_bandwidth
from tool_results import benchmark, machine

from sparrow.errors import UserError

KERNELS_SHOWN = 16
Results = list[dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.backend = args.backend or ["triton" if device.type == "cuda" else "gather"]
    return benchmark(lambda: {"results": args.run(args, device)}, args.out, device)


def _step(args: argparse.Namespace, device: torch.device) -> Results:
    if device.type != "cuda":
        raise UserError(f"{args.mode} times CUDA graphs and needs a CUDA device; makespan and cold run without")
    _check_caches(args)
    roof, results = _roof(device), []
    for name in args.model:
        model = _tuned(name, args.batch, device)
        for context in args.context:
            for spec, backend in _cases(args):
                labels = (spec, backend, args.selector)
                cache = kv_cache(spec, args.selector, backend)
                result, fixed = measure(model, cache, labels, args.batch, context, roof)
                print(show_step(result), flush=True)
                if args.mode == "profile":
                    _print_kernels(fixed)
                fixed.close()
                results.append(asdict(result))
    return results


def _makespan(args: argparse.Namespace, device: torch.device) -> Results:
    _check_caches(args)
    queues = {name: _queue(args, name, args.requests) for name in args.model}
    roof, results = _roof(device), []
    for name, queue in queues.items():
        model = _tuned(name, args.max_rows, device)
        for result in _with_ratios([_one_makespan(args, model, queue, case, roof) for case in _cases(args)]):
            print(show(result), flush=True)
            results.append(asdict(result))
    return results


def _one_makespan(
    args: argparse.Namespace, model: RandomModel, queue: RequestQueue, case: tuple[str, str], roof: float
) -> MakespanResult:
    spec, backend = case
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run = QueueRun(model, kv_cache(spec, args.selector, backend), queue, _sizes(args, args.stride))
    run.warm_up()
    with progress(f"{model.name} {spec}", sum(queue.limits)) as on_window:
        windows = run_windows(run, on_window)
    result = summarise(run, windows, (spec, backend, args.selector), roof)
    run.close()
    return result


def _with_ratios(results: list[MakespanResult]) -> list[MakespanResult]:
    """Adds to each what the dense cache takes with the same backend, over what it takes itself."""
    dense = {result.backend: result.makespan_s for result in results if result.cache == "dense"}
    return [
        replace(result, over_dense=dense[result.backend] / result.makespan_s) if result.backend in dense else result
        for result in results
    ]


def _cold(args: argparse.Namespace, device: torch.device) -> Results:
    imports, watch = seconds_since_start(), Stopwatch(device)
    if len(args.model) * len(args.cache) * len(args.backend) > 1:
        raise UserError("cold measures the start of a process: give one model, one cache and one backend")
    (name,), ((spec, backend),) = args.model, _cases(args)
    queue = _queue(args, name, -(-args.max_rows // args.samples) * args.samples)
    cache = kv_cache(spec, args.selector, backend)
    result = measure_cold(name, spec, cache, queue, _sizes(args, stride=1), watch, imports)
    print(show_cold(result), flush=True)
    return [asdict(result)]


def _check_caches(args: argparse.Namespace) -> None:
    """Refuses an unknown cache before the weights are made."""
    for spec, backend in _cases(args):
        kv_cache(spec, args.selector, backend)


def _cases(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [(spec, backend) for backend in args.backend for spec in args.cache]


def _queue(args: argparse.Namespace, model: str, requests: int) -> RequestQueue:
    limits = LengthDistribution(args.lengths, args.median, args.shortest, args.longest).draw(requests, args.seed)
    return make_queue(model, args.samples, args.prompt, limits, args.longest, args.seed)


def _sizes(args: argparse.Namespace, stride: int) -> EngineSizes:
    return EngineSizes(args.max_rows, args.kv_tokens, stride=stride)


def _roof(device: torch.device) -> float:
    roof = read_bandwidth(device)
    print(f"{machine(device)}, torch {torch.__version__}, reads at {roof:.0f} GB/s", flush=True)
    return roof


def _tuned(name: str, max_rows: int, device: torch.device) -> RandomModel:
    started = time.perf_counter()
    model = random_model(name, device)
    tune(model, max_rows)
    print(f"{name}: weights and tuning in {time.perf_counter() - started:.1f} s", flush=True)
    return model


def _print_kernels(fixed: FixedBatch) -> None:
    kernels = fixed.kernels()
    total = sum(ms for _, ms, _ in kernels)
    for name, ms, count in kernels[:KERNELS_SHOWN]:
        print(f"  {ms:7.3f} ms {ms / total:5.1%} {count:4d} x {ms / max(count, 1) * 1e3:7.1f} us  {name[:100]}")
    print(f"  {total:7.3f} ms in kernels")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode, run, text in (
        ("step", _step, "decode steps of a fixed batch at a fixed context"),
        ("profile", _step, "the same, and the time of each kernel"),
        ("makespan", _makespan, "a queue of requests with a stated distribution of lengths"),
        ("cold", _cold, "from the start of the process to the first tokens"),
    ):
        _add_options(modes.add_parser(mode, help=text), mode, run)
    return parser.parse_args(argv)


def _add_options(parser: argparse.ArgumentParser, mode: str, run: Callable[..., Results]) -> None:
    parser.set_defaults(run=run)
    parser.add_argument("--model", nargs="+", choices=MODELS, required=True)
    parser.add_argument("--cache", nargs="+", required=True, help="dense, tokens per sparse layer, or a schedule")
    parser.add_argument("--selector", choices=sorted(SELECTORS), default="centroid")
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, help="triton on CUDA, gather on the CPU")
    parser.add_argument("--out", type=Path, help="JSON file")
    if mode in ("step", "profile"):
        parser.add_argument("--batch", type=int, required=True)
        parser.add_argument("--context", type=int, nargs="+", default=[32768], help="cached tokens of each row")
        return
    queue = LengthDistribution()
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt", type=int, default=300, help="tokens, about")
    parser.add_argument("--lengths", choices=KINDS, default=queue.kind, help="distribution of the responses' lengths")
    parser.add_argument("--median", type=int, default=queue.median, help="of the log-normal `thinking`")
    parser.add_argument("--shortest", type=int, default=queue.shortest)
    parser.add_argument("--longest", type=int, default=queue.longest, help="response; also the engine's limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-rows", type=int, default=96)
    parser.add_argument("--kv-tokens", type=int, help="of the pool; what is free but 8 GiB by default")
    if mode == "makespan":
        parser.add_argument("--requests", type=int, default=240)
        parser.add_argument("--stride", type=int, default=1, help="decode steps that one stands for; 1 takes each")


if __name__ == "__main__":
    sys.exit(main())
