"""Distillation of a rollout-only adapter without reinforcement learning: P5 by length and budget, before and after.

    tune run sparrow_distill --config tiny_distill_offline

P5 of held-out prompts -> steps (prompts -> sparse rollouts with the adapter -> dense teacher -> update of the adapter)
-> P5 again -> adapter/ in PEFT format, p5.csv, p5.json, p5.png.

The model's own weights stay as they are. The same command goes on where it was stopped, with larger `steps` beyond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import yaml

from sparrow.components.acceptance import AcceptanceTail
from sparrow.components.budget import FixedBudget
from sparrow.components.data import Example, PromptData
from sparrow.components.distiller import Distiller
from sparrow.components.kv_cache import SparseKVCache, check_runs
from sparrow.config import to_yaml
from sparrow.engine.engine import Engine
from sparrow.errors import Interrupted, UserError
from sparrow.launch import check_stop, run_recipe
from sparrow.models.checkpoint import load_decoder
from sparrow.models.decoder_config import read_config
from sparrow.models.tokenizer import tokenizer_of_model
from sparrow.protocols import AdaptiveBudget, KVCache
from sparrow.recipes.calibrate_config import check_model, check_reserved, fixed_budget, with_budget
from sparrow.recipes.calibrate_measure import Sampler, Scorer, Trajectories
from sparrow.recipes.calibrate_rates import TokenRates
from sparrow.recipes.calibrate_results import Results
from sparrow.recipes.calibrate_surface import Measured
from sparrow.recipes.distill_config import DistillConfig, adapter_folder, check, check_distiller, settings
from sparrow.recipes.distill_report import OWN_BUDGET, Change, changes, draw_changes, table, write_changes
from sparrow.recipes.evaluate import encode_prompt, generate
from sparrow.recipes.grpo_distill import DistillStep, engine_weights
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.tracking.tracker import SafeTrackers
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.training.layers import prepare_layers
from sparrow.whole_files import write_whole


class SparrowDistill:
    """Trains a rollout-only adapter on the rollouts of one model, which itself is not trained (DistillSparse)."""

    def __init__(self, cfg: DistillConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)
        self.trackers = SafeTrackers([tracker.build() for tracker in cfg.trackers] if distributed.rank() == 0 else [])
        self.step = 0

    # Setup

    def setup(self) -> None:
        """Cheap checks first, then the model, its adapter, and what was done before."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.device = resolve_device(cfg.device, cfg.threads)
        self._build_components()
        if cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        config = read_config(Path(cfg.model))
        check_model(config, self.cache.pattern)
        check_runs(self.cache, config, self.device, getattr(torch, cfg.engine.dtype or cfg.dtype))
        self.results = Results(self.output_dir / "measured", settings(cfg))
        self.tokenizer = tokenizer_of_model(cfg.model)
        self.model = load_decoder(Path(cfg.model), self.device, getattr(torch, cfg.dtype)).requires_grad_(False)
        self._build_around_model()
        self._load()
        if distributed.rank() == 0:
            self.trackers.start(self.output_dir, yaml.safe_load(to_yaml(cfg)), None)

    def _build_components(self) -> None:
        cfg = self.cfg
        self.data: PromptData = cfg.data.build()
        wanted = cfg.held_out_prompts + cfg.steps * cfg.prompts_per_step
        if self.data.size is not None and self.data.size < wanted:
            raise UserError(
                f"steps: {cfg.steps} take {wanted} prompts with the held-out ones; the data has {self.data.size}"
            )
        self.acceptance: AcceptanceTail = cfg.acceptance.build()
        self.cache: SparseKVCache = cfg.kv_cache.build()
        if isinstance(self.cache.budget, AdaptiveBudget):
            raise UserError("kv_cache.budget: one that follows P5 has nothing to follow here; give a fixed schedule")
        check_reserved(cfg.budgets, self.cache.pattern)
        self.caches: dict[int, SparseKVCache] = {
            budget: with_budget(cfg.kv_cache, fixed_budget(budget)).build() for budget in cfg.budgets
        }
        if not isinstance(self.cache.budget, FixedBudget):
            self.caches[OWN_BUDGET] = self.cache
        self.distiller: Distiller = cfg.distiller.build()
        check_distiller(self.distiller)

    def _build_around_model(self) -> None:
        cfg = self.cfg
        self.sampler = Sampler(cfg, self.data, self.model, self.tokenizer, self.acceptance.top_k)
        self.scorer = Scorer(cfg, self.model, self.acceptance, self.device)
        weights = engine_weights(self.distiller, self.model)
        eos_ids, decode = self.tokenizer.eos_ids, self.tokenizer.decode
        self.engine = Engine(self.model, self.cache, eos_ids, cfg.engine, cfg.seed, 1, decode, weights)
        self.distiller.attach(self.model)
        prepare_layers(self.model, cfg.activation_checkpointing, False, False)
        micro = (cfg.sampling.temperature, cfg.micro_batch_tokens, cfg.logprob_chunk)
        self.distill = DistillStep(self.distiller, self.model, "auto", *micro, self.device)

    # The run

    def train(self) -> None:
        """P5 before, the steps that are left, P5 after."""
        try:
            before = self._measured("before")
            while self.step < self.cfg.steps:
                check_stop()
                self._step()
                if self.step % self.cfg.checkpoint_every == 0:
                    self._save()
            self._save()
            after = self._measured(f"after_{self.step}")
        except Interrupted:
            self._save()
            raise Interrupted(f"stopped after step {self.step}; the same command goes on") from None
        if distributed.rank() == 0:
            self._report(changes(before, after, self.acceptance.bin_width, self.cfg))

    def _step(self) -> None:
        """Sparse rollouts to the next prompts, and an update of the adapter."""
        cfg, started = self.cfg, time.perf_counter()
        first = cfg.held_out_prompts + self.step * cfg.prompts_per_step
        numbers = range(first, first + cfg.prompts_per_step)
        with self.distiller.rollout():
            batch = generate(self.engine, self.data, numbers, self._encode, cfg.num_samples, cfg.sampling)
            self.engine.sync()  # before the adapter is off, which may be merged
        rollout_seconds = time.perf_counter() - started
        metrics = self.distill(batch, self.cache, None)
        self.step += 1
        seconds = time.perf_counter() - started
        metrics |= {"time/rollout": rollout_seconds, "time/distill": seconds - rollout_seconds, "time/step": seconds}
        if distributed.rank() == 0:
            self.trackers.log_dict(metrics, self.step)
            print(self._line(metrics), flush=True)

    def _line(self, metrics: dict[str, float]) -> str:
        seconds, left = metrics["time/step"], self.cfg.steps - self.step
        return (
            f"step {self.step}/{self.cfg.steps}  kl {metrics.get('distill/kl', 0.0):.4f}  "
            f"{metrics['distill/tokens']:,.0f} tokens  {seconds:.1f}s, eta {seconds * left:.0f}s"
        )

    def _encode(self, example: Example) -> list[int]:
        return encode_prompt(self.tokenizer, example.prompt, self.cfg.enable_thinking)

    # P5 of the held-out prompts

    def _measured(self, when: str) -> dict[int, Measured]:
        """The tokens under each budget; collective."""
        if missing := self._missing(when):
            started, prompts = time.perf_counter(), self.cfg.held_out_prompts
            measure = self._measure(when)
            for budget in missing:
                check_stop()
                measured = measure(self.caches[budget])
                if distributed.rank() == 0:
                    self.results.save(when, budget, prompts, measured)
                    seconds = time.perf_counter() - started
                    print(f"P5 {when}  budget {budget}  {len(measured.alpha_N):,} tokens  {seconds:.0f}s", flush=True)
        distributed.barrier()
        return {budget: self.results.load(when, budget) for budget in self.caches}

    def _missing(self, when: str) -> list[int]:
        missing = [budget for budget in self.caches if not self.results.prompts(when, budget)]
        return list(distributed.gather_objects(missing)[0])

    def _measure(self, when: str) -> Callable[[KVCache], Measured]:
        """Without the adapter `before`, with it after."""
        cfg, held_out = self.cfg, range(self.cfg.held_out_prompts)
        adapter = nullcontext if when == "before" else self.distiller.rollout
        rates = TokenRates(cfg.num_samples, self.sampler, self.scorer, adapter)
        if cfg.mode == "generate":
            return lambda cache: rates.generated(cache, held_out)
        return rates.rescoring(self._trajectories(rates, held_out))

    def _trajectories(self, rates: TokenRates, held_out: range) -> Trajectories:
        """The saved ones; sampled where there are none."""
        saved = self.results.load_trajectories()
        if distributed.gather_objects(len(saved.prompts))[0]:
            return saved
        whole = rates.dense_trajectories(self.cache, held_out)
        if distributed.rank() == 0:
            self.results.save_trajectories(whole)
        distributed.barrier()
        return whole

    def _report(self, rows: Sequence[Change]) -> None:
        name = Path(self.cfg.model).absolute().name
        title = f"{name}, {self.acceptance.estimator_name}, {self.cfg.mode}, {self.step} steps"
        write_changes(self.output_dir, rows, {"model": name, "steps": self.step, "settings": settings(self.cfg)})
        draw_changes(self.output_dir / "p5.png", rows, self.acceptance.bin_width, title)
        print("\n".join(["", *table(rows), f"adapter  {adapter_folder(self.cfg)}"]), flush=True)

    # State

    def _save(self) -> None:
        """The adapter, its optimizer and the step, whole at every moment; and the adapter in PEFT format."""
        if distributed.rank() == 0:
            state = {"step": self.step, "distiller": self.distiller.state_dict()}
            write_whole(self.output_dir / "state.pt", lambda part: torch.save(state, part))
            self.distiller.export(adapter_folder(self.cfg))
        distributed.barrier()

    def _load(self) -> None:
        """Goes on where there is a state; `Results` has seen that the settings are the same."""
        file = self.output_dir / "state.pt"
        if not distributed.gather_objects(file.is_file())[0]:
            return
        state = torch.load(file, map_location="cpu", weights_only=True)
        if state["step"] > self.cfg.steps:
            raise UserError(
                f"steps: {self.output_dir} has done {state['step']} of them already, more than {self.cfg.steps}"
            )
        self.step = state["step"]
        self.distiller.load_state_dict(state["distiller"])
        if distributed.rank() == 0:
            print(f"goes on after step {self.step}", flush=True)

    def cleanup(self) -> None:
        self.trackers.close()


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowDistill, DistillConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
