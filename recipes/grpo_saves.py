"""Saves of a run, written by all ranks together, and going on from one.

The recipe says what it goes on with besides (`state`); here is all that has files or an order of its own: the weights
to export, shards or optimizer, adapter, settings, and which saves stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.components.distiller import Distiller
from sparrow.errors import UserError
from sparrow.models.checkpoint import save_weights
from sparrow.models.decoder import Decoder
from sparrow.recipes.grpo_config import GRPOConfig, best_saves
from sparrow.recipes.grpo_resume import check_resumable, write_settings
from sparrow.registry import did_you_mean
from sparrow.training import distributed
from sparrow.training.run_state import (
    latest_run_state,
    own_settings,
    resolve_resume,
    save_run_state,
    unfinished_save,
    would_be_kept,
)
from sparrow.training.sharded_state import Optimizer, load_shards, load_whole, save_shards
from sparrow.training.sharding import full_state_dict, is_sharded

SHARDS = "shards"  # folder within a save


def find_save(cfg: GRPOConfig, directory: Path) -> tuple[Path | None, list[str]]:
    """The save to go on from, None where the run begins, and what has changed in the settings since.

    Raises:
        UserError: `output_dir` holds a run that `resume` does not go on with, or the save is not one for this config.
    """
    save = resolve_resume(cfg.resume, directory)
    if save is None and latest_run_state(directory) is not None:
        raise UserError(
            f"output_dir: {cfg.output_dir} holds an earlier run; resume=auto goes on with it, another output_dir "
            "starts beside it"
        )
    return save, [] if save is None else check_resumable(cfg, save)


class Saves:
    """Writes and reads the saves of one run.

    Args:
        directory: holds a folder for each save.
        parameters: those that the optimizer was built with.
        companions: the folder that the run began with, for tokenizer and generation files.

    Attributes:
        last: step of the save that is the newest of this run, or that it went on from; -1 before.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        directory: Path,
        model: Decoder,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        companions: Path,
        distiller: Distiller | None,
    ) -> None:
        self.cfg, self.directory, self.companions = cfg, directory, companions
        self.model, self.optimizer, self.parameters = model, optimizer, parameters
        self.distiller = distiller
        self.last = -1
        self._best = best_saves(cfg)
        self._judged: tuple[int, float] | None = None  # step and its value of `best_metric`

    def is_best(self, metrics: dict[str, float], step: int) -> bool:
        """Whether the step is to be saved for its value of `best_metric`; collective."""
        if self._best is None:
            return False
        name = self._best.metric
        if name not in metrics:
            if not name.startswith("val/") and distributed.rank() == 0:
                hint = did_you_mean(name, list(metrics))
                print(f"warning: best_metric: step {step} has no {name}{hint}", file=sys.stderr, flush=True)
            return False
        self._judged = (step, metrics[name])
        # One look at the disk for all ranks.
        verdict = distributed.rank() == 0 and would_be_kept(self.directory, self._best, metrics[name])
        return bool(distributed.gather_objects(verdict)[0])

    def save(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Saves the step, unless it is saved already; collective.

        Args:
            state: what else the run goes on with, asked of rank 0.
        """
        if step == self.last:
            return
        if distributed.rank() == 0:
            value = self._judged[1] if self._judged is not None and self._judged[0] == step else None
            keep = self.cfg.keep_last
            save_run_state(self.directory, step, lambda folder: self._write(folder, state()), keep, self._best, value)
        else:
            self._write_shared(unfinished_save(self.directory, step))
        distributed.barrier()
        self.last = step

    def _write_shared(self, folder: Path) -> dict[str, Tensor]:
        """What all ranks write together; returns the weights to export, on rank 0."""
        distributed.barrier()  # the folder is there
        if is_sharded(self.model):
            save_shards(folder / SHARDS, self.model, self.optimizer)
        return full_state_dict(self.model, getattr(torch, self.cfg.dtype))

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        # Of the save before: the folder that the run began with may have been a save that is pruned by now.
        before = latest_run_state(self.directory)
        companions = self.companions if before is None else before / "model"
        save_weights(self._write_shared(folder), self.model.config, folder / "model", companions)
        if self.distiller is not None:
            self.distiller.export(folder / "adapter")
        write_settings(self.cfg, folder)
        optimizer = None if is_sharded(self.model) else self.optimizer.state_dict()
        torch.save({**state, "optimizer": optimizer}, folder / "state.pt")

    def load(self, save: Path) -> dict[str, Any]:
        """Reads a save's optimizer, and the masters of a sharded run; returns the rest of its state. Collective."""
        state: dict[str, Any] = torch.load(save / "state.pt", map_location="cpu", weights_only=True)
        self._load_optimizer(save, state.pop("optimizer"))
        self.last = state["step"]
        return state

    def is_own(self, save: Path) -> bool:
        """Whether a save is one of this run's; that of another run begins a run of its own."""
        return save.resolve().parent == self.directory.resolve()

    def _load_optimizer(self, save: Path, whole: dict[str, Any] | None) -> None:
        """Whatever number of processes saved it; with shards come the fp32 weights, which an export in bf16 rounds."""
        with own_settings(self.optimizer):
            if whole is None:
                load_shards(save / SHARDS, self.model, self.optimizer, self.parameters)
            elif is_sharded(self.model):
                load_whole(whole, self.optimizer, self.parameters)
            else:
                self.optimizer.load_state_dict(whole)
