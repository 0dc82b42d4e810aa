"""What a training run needs of each GPU's memory, phase by phase, without a GPU and without weights.

  python tools/plan_memory.py --config qwen3_14b --gpus 8 --memory 141GB
  python tools/plan_memory.py --config my.yaml --gpus 2 --memory 80GiB model=/path/to/checkpoint dtype=bfloat16
  python tools/plan_memory.py --config qwen3_4b qwen3_8b --gpus 1 2 --memory 141GB

The model is a folder, of which only config.json is read, or a name such as Qwen3-4B; where the config leaves it to the
user, its own name says which. Several configs make one table of totals. docs/training.md explains the parts.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch
from rollout_shapes import QWEN3, model_config
from tool_results import exit_code

from sparrow.config import load_config, load_tree
from sparrow.errors import UserError
from sparrow.memory_plan import GIB, PHASES, MemoryPlan, check_fits, plan_table
from sparrow.models.decoder_config import DecoderConfig, read_config
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.recipes.grpo_memory import memory_plan

UNITS = {"GB": 10**9, "GiB": GIB}
LEFT_TO_THE_USER = "???"


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    args = _parse(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    memory = _memory(args.memory)
    plans = [_plan(name, args.overrides, gpus) for name, gpus in _cases(args)]
    lines = plan_table(plans[0], memory) if len(plans) == 1 else _totals(args.config, plans, memory)
    print("\n".join(lines), flush=True)
    for plan in plans:
        check_fits(plan, memory)


def _plan(name: str, overrides: list[str], gpus: int) -> MemoryPlan:
    tree = load_tree(name, overrides)
    if tree.get("recipe") != "sparrow_grpo":
        raise UserError(f"--config {name}: is for {tree.get('recipe')}; memory is planned for sparrow_grpo")
    if tree.get("model") == LEFT_TO_THE_USER:
        overrides = [*overrides, f"model={name}"]
    cfg = load_config(GRPOConfig, name, overrides)
    return memory_plan(cfg, _shape(cfg.model), cfg.kv_cache.build(), gpus)


def _shape(model: str) -> DecoderConfig:
    """Of a folder with a config.json, or of a published model by its name."""
    if (Path(model) / "config.json").is_file():
        return read_config(Path(model))
    match = re.match(r"qwen3[-_]([0-9.]+b)(?![0-9a-z])", Path(model).name.lower())
    if match is None or match[1] not in QWEN3:
        known = ", ".join(f"Qwen3-{size.upper()}" for size in QWEN3)
        raise UserError(f"model: {model} is neither a folder with a config.json nor one of {known}")
    return model_config(match[1])


def _totals(names: list[str], plans: list[MemoryPlan], memory: int) -> list[str]:
    """A Markdown table of the totals, a row for each config."""
    head = ["config", "GPUs", *PHASES, f"left of {memory / GIB:.1f}"]
    rows = [head, ["---"] * len(head)]
    for name, plan in zip(names, plans, strict=True):
        totals = [plan.total(phase) for phase in PHASES]
        figures = [f"{value / GIB:.1f}" for value in (*totals, memory - max(totals))]
        rows.append([f"`{name}`", str(plan.job.gpus), *figures])
    return [f"| {' | '.join(row)} |" for row in rows]


def _cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    gpus = args.gpus * len(args.config) if len(args.gpus) == 1 else args.gpus
    if len(gpus) != len(args.config) or min(gpus) < 1:
        raise UserError(
            f"--gpus {args.gpus}: one number of at least 1, or one for each of the {len(args.config)} configs"
        )
    return list(zip(args.config, gpus, strict=True))


def _memory(text: str | None) -> int:
    """Bytes of a size such as 141GB; those of the GPU at hand without one."""
    if text is None:
        if not torch.cuda.is_available():
            raise UserError("--memory: this machine has no GPU; give the size of one, such as 141GB")
        return torch.cuda.get_device_properties(0).total_memory
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(GB|GiB)", text)
    if match is None or float(match[1]) == 0:
        raise UserError(f"--memory {text}: is no size such as 141GB or 131.3GiB")
    return int(float(match[1]) * UNITS[match[2]])


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", nargs="+", required=True, help="names or paths of sparrow_grpo configs")
    parser.add_argument("--gpus", nargs="+", type=int, default=[1], help="processes, one GPU each")
    parser.add_argument("--memory", help="of each GPU: 141GB, 80GiB; that of this machine's by default")
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}")
    configs = [word for word in args.config if "=" not in word and not word.startswith("~")]
    args.overrides = [word for word in args.config if word not in configs] + rest
    args.config = configs
    return args


if __name__ == "__main__":
    sys.exit(main())
