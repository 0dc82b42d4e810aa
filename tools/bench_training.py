"""Benchmarks of the training half with real shapes and random weights, on one device; `step` on several, too.

  python tools/bench_training.py logprob --model 4b --tokens 32768
  python tools/bench_training.py step --model 1.7b --tokens 32768 --documents 4 --activation-checkpointing
  torchrun --nproc_per_node 2 tools/bench_training.py step --model 4b --activation-checkpointing
  python tools/bench_training.py attention --model 4b --tokens 16384 --schedule qwen3-4b-0.86
  python tools/bench_training.py rl --model 1.7b --rollouts makespan_1.7b.json --activation-checkpointing
  python tools/bench_training.py distill --model 1.7b --schedule qwen3-1.7b-0.86 --activation-checkpointing

All run on a CPU too, to try them: `step --model tiny --tokens 256`, `distill --model tiny --tokens 256 --prompt 64
--micro-batch-tokens 512 --schedule 64`. docs/training.md says how each mode measures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from random_trainer import trainer_device
from rollout_shapes import MODELS, SELECTORS
from tool_results import benchmark
from training_attention import measure_attention, show_attention
from training_distill import LOSSES, DistillOptions, measure_distill, show_distill
from training_logprob import measure_logprob, show_logprob
from training_rl import RLOptions, measure_rl, show_rl
from training_step import OPTIMIZERS, StepOptions, TrainingOptions, measure_step, show_step

from sparrow.attention.dense import BACKENDS
from sparrow.components.distiller import TEACHERS
from sparrow.errors import UserError
from sparrow.training import distributed

Options = TypeVar("Options", bound=TrainingOptions)


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    with trainer_device() as device:
        return benchmark(lambda: {"result": _measured(args, device)}, args.out, device)


def _measured(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if distributed.world_size() > 1 and args.mode != "step":
        raise UserError(f"mode {args.mode} is of one process; of torchrun's, only step is")
    result: dict[str, Any] = args.run(args, device)
    if distributed.rank() == 0:
        print(args.show(result), flush=True)
    return result


def _logprob(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return measure_logprob(args.model, args.tokens, args.top_k, args.chunk, device)


def _step(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if args.documents > args.tokens:
        raise UserError(f"--documents {args.documents}: more than --tokens {args.tokens}")
    return measure_step(_options(StepOptions, args), device)


def _attention(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if args.prompt > args.tokens:
        raise UserError(f"--prompt {args.prompt}: more than --tokens {args.tokens}")
    return measure_attention(args.model, args.tokens, args.prompt, args.schedule, args.selector, args.likeness, device)


def _rl(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return measure_rl(args.rollouts, _options(RLOptions, args), device)


def _distill(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    return measure_distill(_options(DistillOptions, args), device)


def _options(kind: type[Options], args: argparse.Namespace) -> Options:
    """The mode's options: arguments of the same names, and those that all modes that train have."""
    named = vars(args) | {
        "recompute": args.activation_checkpointing or args.offload_activations,
        "offload": args.offload_activations,
        "compiled": args.compile,
    }
    return kind(**{field.name: named[field.name] for field in fields(kind)})


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    logprob = _mode(
        modes, "logprob", _logprob, show_logprob, "log-prob, entropy and top-k, against the bare matmul of the head"
    )
    step = _mode(modes, "step", _step, show_step, "forward, backward and optimizer step of packed sequences")
    step.add_argument("--documents", type=_count, default=1, help="of unequal lengths, that the tokens are packed from")
    step.add_argument("--beside-gib", type=_not_negative, default=0.0, help="GiB that the engine's weights would hold")
    attention = _mode(
        modes, "attention", _attention, show_attention, "sparse attention of distilling, beside dense, of one layer"
    )
    attention.add_argument("--likeness", type=float, default=0.9, help="correlation of neighbouring queries")
    rl = _mode(modes, "rl", _rl, show_rl, "an RL step, dense and sparse, from makespans of bench_rollout.py")
    rl.add_argument("--rollouts", type=Path, required=True, help="JSON file of bench_rollout.py makespan")
    rl.add_argument("--samples", type=_count, default=4, help="micro-batches that are run")
    rl.add_argument("--sync-s", type=_not_negative, default=0.0, help="seconds of the weight sync, from bench_sync.py")
    distill = _mode(
        modes, "distill", _distill, show_distill, "a step of the rollout-only adapter, beside the rest of an RL step"
    )
    distill.add_argument("--loss", choices=LOSSES, default="k3")
    distill.add_argument("--teacher", choices=TEACHERS, default="before_step")
    distill.add_argument("--rank", type=_count, default=16)
    distill.add_argument("--share", type=float, default=0.25, help="of the sequences, distilled on")
    distill.add_argument(
        "--rollout-s-per-sequence", dest="rollout_s", type=_not_negative, help="makespan_s / requests of a makespan"
    )
    for tokens in (logprob, step, attention, distill):
        tokens.add_argument("--tokens", type=_count, default=32768)
    for reads in (attention, distill):
        reads.add_argument("--schedule", required=True, help="its name, or the tokens that a query may read")
        reads.add_argument("--selector", choices=SELECTORS, default="head_softmax")
        reads.add_argument("--prompt", type=_count, default=256)
    for sets in (logprob, rl, distill):
        sets.add_argument("--top-k", type=_count, default=20)
    for parts in (logprob, step, rl, distill):
        parts.add_argument("--chunk", type=_count, default=1024, help="tokens whose logits are held at a time")
    for packs in (rl, distill):
        packs.add_argument("--micro-batch-tokens", type=_count, default=40960)
    for steps in (step, rl):
        steps.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    for trains in (step, rl, distill):
        trains.add_argument("--attention", choices=BACKENDS, default="auto")
        trains.add_argument("--activation-checkpointing", action="store_true")
        trains.add_argument("--offload-activations", action="store_true")
        trains.add_argument("--compile", action="store_true")
    return parser.parse_args(argv)


def _mode(
    modes: Any, name: str, run: Callable[..., dict[str, Any]], show: Callable[[dict[str, Any]], str], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = modes.add_parser(name, help=text)
    parser.set_defaults(run=run, show=show)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0, and finite")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
