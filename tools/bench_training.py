"""Benchmarks of the training half on one device, with real shapes and random weights.

  python tools/bench_training.py logprob --model 4b --tokens 32768
  python tools/bench_training.py step --model 1.7b --tokens 32768 --documents 4 --activation-checkpointing
  python tools/bench_training.py attention --model 4b --tokens 16384 --schedule qwen3-4b-0.86
  python tools/bench_training.py rl --model 1.7b --rollouts makespan_1.7b.json --activation-checkpointing
  python tools/bench_training.py distill --model 1.7b --schedule qwen3-1.7b-0.86 --activation-checkpointing

All run on a CPU too, to try them: --model tiny --tokens 256. docs/training.md says how each mode measures.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rollout_shapes import MODELS, SELECTORS
from tool_results import benchmark
from training_attention import measure_attention, show_attention
from training_distill import LOSSES, DistillOptions, measure_distill, show_distill
from training_logprob import measure_logprob, show_logprob
from training_rl import RLOptions, measure_rl, show_rl
from training_step import OPTIMIZERS, StepOptions, measure_step, show_step

from sparrow.attention.dense import BACKENDS
from sparrow.components.distiller import TEACHERS
from sparrow.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return benchmark(lambda: {"result": args.run(args, device)}, args.out, device)


def _logprob(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    result = measure_logprob(args.model, args.tokens, args.top_k, args.chunk, device)
    print(show_logprob(result), flush=True)
    return result


def _step(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if args.documents > args.tokens:
        raise UserError(f"--documents {args.documents}: more than --tokens {args.tokens}")
    options = StepOptions(
        args.model, args.tokens, args.documents, args.optimizer, args.attention, args.chunk,
        args.activation_checkpointing or args.offload_activations, args.offload_activations, args.compile,
        args.beside_gib,
    )  # fmt: skip
    result = measure_step(options, device)
    print(show_step(result), flush=True)
    return result


def _attention(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    if args.prompt > args.tokens:
        raise UserError(f"--prompt {args.prompt}: more than --tokens {args.tokens}")
    result = measure_attention(
        args.model, args.tokens, args.prompt, args.schedule, args.selector, args.likeness, device
    )
    print(show_attention(result), flush=True)
    return result


def _rl(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    options = RLOptions(
        args.model, args.micro_batch_tokens, args.samples, args.top_k, args.optimizer, args.attention, args.chunk,
        args.activation_checkpointing or args.offload_activations, args.offload_activations, args.compile, args.sync_s,
    )  # fmt: skip
    result = measure_rl(args.rollouts, options, device)
    print(show_rl(result), flush=True)
    return result


def _distill(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    options = DistillOptions(
        args.model, args.tokens, args.prompt, args.schedule, args.selector, args.loss, args.teacher, args.rank,
        args.micro_batch_tokens, args.top_k, args.attention, args.chunk,
        args.activation_checkpointing or args.offload_activations, args.offload_activations, args.compile,
        args.share, args.rollout_s_per_sequence,
    )  # fmt: skip
    result = measure_distill(options, device)
    print(show_distill(result), flush=True)
    return result


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    logprob = _mode(modes, "logprob", _logprob, "log-prob, entropy and top-k, against the bare matmul of the head")
    step = _mode(modes, "step", _step, "forward, backward and optimizer step of packed sequences")
    step.add_argument("--documents", type=_count, default=1, help="of unequal lengths, that the tokens are packed from")
    step.add_argument("--beside-gib", type=_not_negative, default=0.0, help="GiB that the engine's weights would hold")
    attention = _mode(modes, "attention", _attention, "sparse attention of distilling, beside dense, of one layer")
    attention.add_argument("--likeness", type=float, default=0.9, help="correlation of neighbouring queries")
    rl = _mode(modes, "rl", _rl, "an RL step, dense and sparse, from makespans of bench_rollout.py")
    rl.add_argument("--rollouts", type=Path, required=True, help="JSON file of bench_rollout.py makespan")
    rl.add_argument("--samples", type=_count, default=4, help="micro-batches that are run")
    rl.add_argument("--sync-s", type=_not_negative, default=0.0, help="seconds of the weight sync, from bench_sync.py")
    distill = _mode(modes, "distill", _distill, "a step of the rollout-only adapter, beside the rest of an RL step")
    distill.add_argument("--loss", choices=LOSSES, default="k3")
    distill.add_argument("--teacher", choices=TEACHERS, default="before_step")
    distill.add_argument("--rank", type=_count, default=16)
    distill.add_argument("--share", type=float, default=0.25, help="of the sequences, distilled on")
    distill.add_argument("--rollout-s-per-sequence", type=_not_negative, help="makespan_s / requests of a makespan")
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


def _mode(modes: Any, name: str, run: Callable[..., dict[str, Any]], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = modes.add_parser(name, help=text)
    parser.set_defaults(run=run)
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
