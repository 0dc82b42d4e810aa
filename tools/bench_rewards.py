"""Benchmarks of the rewards: answers a second, and how long hostile ones hold up a step.

  python tools/bench_rewards.py math --workers 2
  python tools/bench_rewards.py code --workers 1 2

docs/tasks.md says what the answers of each mode are.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from rewards_code import measure_code, show_code
from rewards_math import measure_math, show_math
from tool_results import benchmark


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)

    def run() -> dict[str, object]:
        result = args.measure(args)
        print(args.show(result), flush=True)
        return {"result": result}

    return benchmark(run, args.out, torch.device("cpu"))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    math = modes.add_parser("math", help="the mathematics reward, on ordinary and on pathological answers")
    math.set_defaults(measure=lambda args: measure_math(args.workers, args.answers, args.pathological), show=show_math)
    math.add_argument("--workers", type=_count, default=2)
    math.add_argument("--answers", type=_count, default=4096, help="ordinary ones, 8 a prompt")
    math.add_argument("--pathological", type=_count, default=1000)
    code = modes.add_parser("code", help="programs in the sandbox, by number of workers")
    code.set_defaults(measure=lambda args: measure_code(args.runs, args.workers), show=show_code)
    code.add_argument("--workers", type=_count, nargs="+", default=[1, 2])
    code.add_argument("--runs", type=_count, default=200)
    for mode in (math, code):
        mode.add_argument("--out", type=Path, help="JSON file")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
