"""GRPO with sparse rollouts: the paper's loop, top to bottom.

    tune run sparrow_grpo --config tiny

prompts -> sparse rollout -> rewards -> advantages -> dense log-probs -> acceptance tail and mismatch -> correction ->
loss -> update of the dense weights -> [distiller] -> sync -> log.

Axes: S sequences of this rank's batch, T their response tokens, N tokens of one micro-batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.attention.dense import DenseAttention
from sparrow.components.acceptance import TailTokens, alpha_top_k, top_k_floor
from sparrow.components.data import Example, PromptData
from sparrow.components.distiller import Distiller
from sparrow.components.kv_cache import DenseKVCache, check_runs
from sparrow.components.reward import (
    Closes,
    NamedReward,
    combine_rewards,
    named_rewards,
    outcome_counts,
    parts_per_sequence,
    reward_columns,
)
from sparrow.engine.engine import Engine
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import AlarmStop, Interrupted, UserError
from sparrow.estimators import mean_reward
from sparrow.launch import check_stop, run_recipe
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig, read_config
from sparrow.models.identity import architecture
from sparrow.models.tokenizer import tokenizer_of_model
from sparrow.protocols import AdaptiveBudget
from sparrow.rates import Rates, measure_rates
from sparrow.recipes.evaluate import (
    encode_prompt,
    generate,
    gives_answers,
    in_order,
    judge,
    of_samples,
    per_problem,
    stop_between_tokens,
)
from sparrow.recipes.grpo_config import GRPOConfig, Validation, check
from sparrow.recipes.grpo_data import check_data, check_enough
from sparrow.recipes.grpo_distill import TRAINED_ADAPTER, DistillStep, check_recorded, engine_weights
from sparrow.recipes.grpo_files import start_trackers
from sparrow.recipes.grpo_memory import check_memory
from sparrow.recipes.grpo_minibatches import balance_ranks, split_minibatches
from sparrow.recipes.grpo_report import decode_responses, print_report, rollout_metrics
from sparrow.recipes.grpo_resume import changed_lines, changed_settings, write_settings
from sparrow.recipes.grpo_samples import sample_rows
from sparrow.recipes.grpo_saves import Saves, find_save
from sparrow.recipes.grpo_speed import measured_speedup, modelled_speedup
from sparrow.recipes.grpo_update import PolicyUpdate
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.rollout import RolloutBatch
from sparrow.rollout_dump import Origin, Replay, dump_rollouts
from sparrow.tracking.console import Advance, PhaseConsole, say
from sparrow.tracking.tracker import SafeTrackers
from sparrow.training import distributed
from sparrow.training.alarms import AlarmMonitor
from sparrow.training.device import resolve_device
from sparrow.training.flops import training_flop
from sparrow.training.layers import prepare_layers
from sparrow.training.logprob import score_tokens, token_logprobs
from sparrow.training.memory_use import memory_metrics
from sparrow.training.mismatch import mismatch_panel
from sparrow.training.packing import MicroBatch, response_hidden
from sparrow.training.profile import Trace
from sparrow.training.sharding import load_trained, release


class SparrowGRPO:
    """Reinforcement learning with verifiable rewards from block-sparse rollouts (arXiv 2606.08446)."""

    def __init__(self, cfg: GRPOConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)
        self.saves_dir = self.output_dir / "checkpoints"
        self.trackers = SafeTrackers([tracker.build() for tracker in cfg.trackers] if distributed.rank() == 0 else [])
        self.alarms = AlarmMonitor(cfg.alarms)
        self.console = PhaseConsole(speaks=distributed.rank() == 0)
        self.rewards: list[NamedReward] = []
        self.steps_here = 0  # of this process
        self.run_id: str | None = None  # of the trackers, where the run is resumed
        self.step = 0
        self.next_prompt = 0

    # Setup

    def setup(self) -> None:
        """Cheap checks first, then the model (made by the warm-up, loaded, or from a save) and what stands on it."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.device = resolve_device(cfg.device, cfg.threads)
        save, self.changes = find_save(cfg, self.saves_dir)
        self._build_components()
        if save is None and cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        source = Path(cfg.model) if save is None else save / "model"
        self.tokenizer = tokenizer_of_model(source)  # before the weights, which take their time
        check_memory(cfg, read_config(source), self.cache, self.device)
        self._check_data(read_config(source))
        self.model = load_trained(source, self.device, getattr(torch, cfg.dtype), cfg.replicate)
        self._build_around_model()
        if save is not None:
            self._load_state(save)
        if isinstance(self.engine, Replay) and self.step < cfg.steps:
            folder = self.engine.check(self.step + 1, cfg.steps)
            self.changes += changed_lines("changed since the dump", changed_settings(cfg, folder))
        if distributed.rank() == 0:
            start_trackers(self.trackers, cfg, self.cache.budget, self.run_id)
            self._print_start()

    def _check_data(self, model: DecoderConfig) -> None:
        cfg = self.cfg
        self.data_lines = check_data("data", self.data, self._encode, self.rewards, cfg, model)
        if cfg.validation is not None:
            checked = (self._encode, self.rewards, cfg, model)
            self.data_lines += check_data("validation.data", self.validation_data, *checked)
            check_enough("validation.prompts", cfg.validation.prompts, self.validation_data)

    def _build_components(self) -> None:
        """What needs no model: a mistake shows before a warm-up or a large checkpoint takes its time."""
        cfg = self.cfg
        self.data: PromptData = cfg.data.build()
        if cfg.validation is not None:
            self.validation_data: PromptData = cfg.validation.data.build()
        self.rewards = named_rewards([reward.build() for reward in cfg.reward])
        self.cache = cfg.kv_cache.build()
        self.acceptance = cfg.acceptance.build()
        self.advantage, self.correction = cfg.advantage.build(), cfg.correction.build()
        # A size of group that it refuses shows here, not after the first rollout.
        self.advantage(torch.zeros(cfg.num_samples), torch.zeros(cfg.num_samples, dtype=torch.int64))
        self.loss, self.aggregation = cfg.loss.build(), cfg.aggregation.build()
        self.distiller: Distiller | None = cfg.distiller.build() if cfg.distiller is not None else None
        check_recorded(self.distiller, self.acceptance.top_k)
        self.controller = self.cache.budget if isinstance(self.cache.budget, AdaptiveBudget) else None
        self._schedule_differences()

    def _schedule_differences(self) -> list[str]:
        """Those that are allowed; raises where one is not."""
        cfg, acceptance = self.cfg, self.acceptance
        run = (cfg.model, cfg.sampling.temperature, acceptance.estimator_name, acceptance.tau)
        adapter = None if self.distiller is None else TRAINED_ADAPTER
        differences: list[str] = self.cache.check(*run, adapter)
        return differences

    def _build_around_model(self) -> None:
        cfg, eos_ids = self.cfg, self.tokenizer.eos_ids
        engine = replace(cfg.engine, dtype=cfg.engine.dtype or cfg.dtype)
        check_runs(self.cache, self.model.config, self.device, getattr(torch, engine.dtype or cfg.dtype))
        # Once more, as a warm-up may have made the checkpoint only now.
        self.schedule_differences = self._schedule_differences()
        decode, top_k = self.tokenizer.decode, self.acceptance.top_k
        self.origin = Origin(
            model=architecture(self.tokenizer.path), num_samples=cfg.num_samples, sampling=cfg.sampling, top_k=top_k
        )
        self.engine: Engine | Replay
        if cfg.replay is not None:
            self.engine = Replay(Path(cfg.replay), self.cache, self.origin)
        else:
            weights = engine_weights(self.distiller, self.model)
            self.engine = Engine(self.model, self.cache, eos_ids, engine, cfg.seed, top_k, decode, weights)
        # The reference is what the policy starts from, also when the run is resumed.
        trained = (self.device, getattr(torch, cfg.dtype), cfg.replicate)
        self.reference = load_trained(cfg.model, *trained).requires_grad_(False) if cfg.kl_coef > 0 else None
        self.optimizer = cfg.optimizer.build(self.model.named_parameters())
        parameters = list(self.model.parameters())  # those of the dense policy: the adapter comes after
        self.update = PolicyUpdate(
            cfg, self.model, self.optimizer, parameters, self.loss, self.aggregation, self.device
        )
        self.saves = Saves(
            cfg, self.saves_dir, self.model, self.optimizer, parameters, self.tokenizer.path, self.distiller
        )
        if self.distiller is not None:
            self.distiller.attach(self.model)
            micro = (cfg.attention, cfg.sampling.temperature, cfg.micro_batch_tokens, cfg.logprob_chunk)
            self.distill = DistillStep(self.distiller, self.model, *micro, self.device)
        prepare_layers(self.model, cfg.activation_checkpointing, cfg.offload_activations, cfg.compile)
        self.rates = self._rates(getattr(torch, engine.dtype or cfg.dtype))
        self.dense_cache = DenseKVCache(self.cache.page_size, self.cache.block_size)
        if cfg.validation is not None:
            # Numbers of its own: training and validation prompts count from 0 alike.
            self.validation_engine = Engine(self.model, self.dense_cache, eos_ids, engine, cfg.seed + 1, decode=decode)

    def _rates(self, rollout_dtype: torch.dtype) -> Rates:
        """Of this device, for train/mfu and speedup/model."""
        rates = measure_rates(self.device)
        flop_per_s = self.cfg.flop_per_s or rates.flop_per_s
        return replace(rates, flop_per_s=flop_per_s, element_bytes=rollout_dtype.itemsize)

    def _print_start(self) -> None:
        """What goes wrong most often: sampling parameters, end of the response, the prompt as the model sees it."""
        for line in self.changes + self.data_lines:
            print(line)
        for difference in self.schedule_differences:
            print(f"schedule, allowed to differ: {difference}")
        ids = self._encode(self.data.example(0))
        print(f"{self.cfg.sampling}, eos ids {self.tokenizer.eos_ids}")
        print(f"first prompt, {len(ids)} tokens: {self.tokenizer.decode(ids)!r}", flush=True)

    # The loop

    def train(self) -> None:
        """All steps that are left, with a save at the end, also where the user stops the run."""
        try:
            if self.step == 0 and self.cfg.validation is not None:
                self._log(self._validate(self.cfg.validation), 0)
                self.console.take()  # of no step
            while self.step < self.cfg.steps:
                check_stop()
                self._step()
                self._stop_on_alarm()
        except Interrupted:
            self._save()
            raise Interrupted(f"stopped after step {self.step}; resume=auto goes on from {self.saves_dir}") from None
        self._save_and_report()

    def _save_and_report(self) -> None:
        self._save()
        if distributed.rank() == 0:
            print_report(self.output_dir, self.saves_dir, self.acceptance.tau)

    def _stop_on_alarm(self) -> None:
        if names := self.alarms.stopped_by:
            self._save_and_report()
            raise AlarmStop(
                f"alarm {', '.join(names)} stopped the run after step {self.step}; it is saved in {self.saves_dir}"
            )

    def _check_alarms(self, metrics: dict[str, float]) -> dict[str, float]:
        """On figures of all ranks, and so the same on each."""
        raised, lines = self.alarms.step(metrics)
        if distributed.rank() == 0:
            for line in lines:
                say(f"step {self.step}: {line}")
        return raised

    def _step(self) -> None:
        """One step, the validation and the save that are due after it, and its row of metrics."""
        started = time.perf_counter()
        self.console.step = self.step + 1
        with self._profiled():
            metrics = self._train_step()
        self.step += 1
        self.next_prompt += self.cfg.prompts_per_step
        metrics |= self._check_alarms(metrics)
        validation = self.cfg.validation
        try:
            if validation is not None and (self.step % validation.every == 0 or self.step == self.cfg.steps):
                with self.console.phase("validation"):
                    metrics |= self._validate(validation)
        finally:  # The step is done, and will be saved: Ctrl-C in the validation must not take its row.
            seconds = time.perf_counter() - started
            self._log(metrics | self._times(seconds), self.step)
        if self.saves.is_best(metrics, self.step) or self.step % self.cfg.checkpoint_every == 0:
            self._save()

    def _times(self, step_seconds: float) -> dict[str, float]:
        """Seconds of the step and of its phases; the save before it is the last step's, and no part of this one."""
        seconds = self.console.take()
        times = {f"time/{name}": value for name, value in seconds.items()} | {"time/step": step_seconds}
        shares = {f"time_share/{name}": seconds[name] / step_seconds for name in seconds if name != "save"}
        return times | shares

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """A trace of the second step of this process: the first one compiles and captures."""
        self.steps_here += 1
        if not self.cfg.profile or self.steps_here != 2:
            yield
            return
        trace = Trace()
        yield
        with self.console.phase("profile"):
            trace.write(self.output_dir / "profile" / f"step_{self.step + 1:06d}_rank{distributed.rank()}.json.gz")

    def _train_step(self) -> dict[str, float]:
        """One batch of rollouts, from the prompts to the new weights; returns its metrics."""
        phase = self.console.phase
        with phase("rollout", self.cfg.prompts_per_step * self.cfg.num_samples / distributed.world_size()) as advance:
            batch = self._rollout(advance)
            distributed.barrier()  # who waits for the longest responses of others waits in the rollout
        with phase("reward"):
            reward_metrics = self._score(batch)
            batch = balance_ranks(batch, self.cfg)
        # Dense pass and update share their micro-batches, so that their log-probs are bit-equal.
        minibatches, only_scored = split_minibatches(batch, self.cfg, self.device)
        everything = [micro for minibatch in minibatches for micro in minibatch.micro_batches] + only_scored
        with phase("dense", len(everything)) as advance:
            metrics = self._dense_pass(batch, everything, advance)
        metrics |= reward_metrics | rollout_metrics(
            batch, self.engine.cache, self.model.config.num_layers, self.engine.stats
        )
        learned = [micro for minibatch in minibatches for micro in minibatch.micro_batches]
        with phase("update", len(learned)) as advance:
            metrics |= self.update.run(batch, minibatches, self.step, advance)
        seconds = self.console.seconds
        metrics |= self._utilisation(everything, learned, seconds["dense"] + seconds["update"])
        if self.distiller is not None and not self.alarms.fallback:
            with phase("distill"):
                metrics |= self.distill(batch, self.cache, float(self.optimizer.param_groups[0]["lr"]))
        speedup = self._speedup(batch)
        # After what looks at the pages that the rollout saw. A dense fallback says nothing of a budget.
        if self.controller is not None and not self.alarms.fallback:
            assert batch.alpha_T is not None
            metrics |= self.controller.observe(batch.alpha_T, batch.cached_length_T, self.acceptance.tau)
        with phase("sync"):
            self.engine.sync()
        metrics |= memory_metrics(self.device) | speedup
        if distributed.rank() == 0:
            self.trackers.log_samples(sample_rows(batch, self.tokenizer, self.cfg.samples_per_step), self.step + 1)
        metrics["tokens_per_second"] = metrics["completions/tokens"] / seconds["rollout"]
        return metrics

    def _speedup(self, batch: RolloutBatch) -> dict[str, float]:
        """Of decoding over a dense cache; the clock's only every so many steps, as it decodes for it."""
        cfg, model = self.cfg, self.model
        if self.alarms.fallback or isinstance(self.engine, Replay) or isinstance(self.cache, DenseKVCache):
            return {}
        speedup = modelled_speedup(batch, model.config, self.cache, self.dense_cache, cfg.engine.max_rows, self.rates)
        if cfg.measure_speedup_every and self.step % cfg.measure_speedup_every == 0:
            with self.console.phase("measure_speedup"):
                speedup |= measured_speedup(batch, model, self.cache, self.dense_cache, self.engine.config)
        return speedup

    def _utilisation(self, scored: list[MicroBatch], learned: list[MicroBatch], seconds: float) -> dict[str, float]:
        """Model FLOPs of dense pass and update over all ranks, and their share of what the devices could do."""
        forwards = 1 if self.reference is None else 2
        flop = training_flop(self.model.config, scored, learned, forwards)
        flop = distributed.sum_values({"flop": flop})["flop"]
        return {"train/flops": flop, "train/mfu": flop / (seconds * self.rates.flop_per_s * distributed.world_size())}

    def _rollout(self, advance: Advance) -> RolloutBatch:
        """This rank's share of the step's prompts; random numbers follow the prompt, not the rank."""
        cfg = self.cfg
        first = self.next_prompt
        adapter: AbstractContextManager[None] = nullcontext()
        if self.distiller is not None and not self.alarms.fallback:
            adapter = self.distiller.rollout()
        self.engine.cache = self.dense_cache if self.alarms.fallback else self.cache  # the engine sleeps between steps
        with adapter:
            batch = self._generate(
                self.engine,
                self.data,
                range(first, first + cfg.prompts_per_step),
                cfg.num_samples,
                cfg.sampling,
                advance,
            )
        step, every = self.step + 1, int(cfg.dump_rollouts)
        if every and step % every == 0:
            dump_rollouts(
                self.output_dir / "rollouts",
                step,
                batch,
                batch.numbers_S[:: cfg.num_samples].tolist(),
                self.origin,
                self.engine.stats,
                lambda folder: write_settings(cfg, folder),
            )
        return batch

    def _generate(
        self,
        engine: Engine | Replay,
        data: PromptData,
        numbers: Sequence[int],
        num_samples: int,
        sampling: SamplingParams,
        advance: Advance,
    ) -> RolloutBatch:
        """Responses to the prompts that this rank takes from the queue of all ranks, with their texts."""
        keep_hidden = engine is self.engine and self.acceptance.needs_hidden
        on_step = partial(_between_tokens, advance)
        batch = generate(engine, data, numbers, self._encode, num_samples, sampling, keep_hidden, on_step)
        engine.sleep()  # The pool must not stand beside the activations of training, nor beside another engine's.
        batch.texts = decode_responses(batch, self.tokenizer)
        return batch

    def _score(self, batch: RolloutBatch) -> dict[str, float]:
        """Rewards and group advantages; returns metrics over all ranks."""
        batch.rewards_S, parts = combine_rewards(self.rewards, batch.texts, reward_columns(batch))
        batch.reward_parts = parts_per_sequence(parts)
        advantages = self.advantage(batch.rewards_S, batch.groups_S)
        batch.advantages_S, batch.keep_S = advantages.advantages_S, advantages.keep_S
        if self.cfg.mask_truncated:
            batch.advantages_S = torch.where(batch.terminated_S, batch.advantages_S, 0.0)
            batch.keep_S = batch.keep_S & batch.terminated_S
        # The figures are those of the whole step; each rank's groups get numbers of their own for that.
        groups_S = batch.groups_S + distributed.rank() * self.cfg.prompts_per_step
        everywhere = self.advantage(distributed.gather(batch.rewards_S), distributed.gather(groups_S))
        if everywhere.metrics["rewards/not_applicable"] == self.cfg.prompts_per_step * self.cfg.num_samples:
            self._say_no_rewards(batch)
        metrics = everywhere.metrics | distributed.sum_values(outcome_counts(self.rewards))
        for name, part_S in parts.items():
            metrics[f"rewards/{name}/mean"] = float(distributed.gather(part_S).nanmean())
        return metrics

    def _say_no_rewards(self, batch: RolloutBatch) -> None:
        names = ", ".join(name for name, _, _ in self.rewards)
        columns = ", ".join(dict.fromkeys(name for row in batch.columns for name in row))
        if distributed.rank() == 0:
            say(f"warning: step {self.step + 1}: {names} scored no response at all; the data's columns are {columns}")

    @torch.no_grad()
    def _dense_pass(self, batch: RolloutBatch, micro_batches: list[MicroBatch], advance: Advance) -> dict[str, float]:
        """Dense log-probs of the sampled tokens before the update, and what they say of the sparse rollout."""
        cfg = self.cfg
        T = batch.num_tokens
        logprobs_T, entropy_T, exact_T, top_k_T, floor_T = torch.zeros(5, T).unbind()
        if self.distiller is not None and (top_k := min(self.distiller.recorded_top_k, self.model.config.vocab_size)):
            batch.dense_top_ids_TK = torch.zeros(T, top_k, dtype=torch.int64)
            batch.dense_top_logprobs_TK = torch.zeros(T, top_k)
        for done, micro in enumerate(micro_batches):
            advance(done, f"{T:,} tokens")
            at = micro.index_N
            hidden_NE = response_hidden(self.model, micro, self._dense_attention(micro))
            scores = score_tokens(
                hidden_NE,
                self.model.logits,
                micro.targets_N,
                cfg.sampling.temperature,
                self.acceptance.top_k,
                batch.hidden_TE,
                cfg.logprob_chunk,
                sparse_index_N=at,
            )
            logprobs_T[at], entropy_T[at] = scores.logprobs_N.cpu(), scores.entropy_N.cpu()
            top_ids, top_logprobs = scores.top_ids_NK, scores.top_logprobs_NK
            their_ids, their_logprobs = (x[at].to(self.device) for x in (batch.top_ids_TK, batch.top_logprobs_TK))
            top_k_T[at] = alpha_top_k(their_ids, their_logprobs, top_ids, top_logprobs).cpu()
            floor_T[at] = top_k_floor(top_logprobs).cpu()
            if batch.dense_top_ids_TK is not None and batch.dense_top_logprobs_TK is not None:
                kept = batch.dense_top_ids_TK.shape[1]
                batch.dense_top_ids_TK[at] = top_ids[:, :kept].cpu()
                batch.dense_top_logprobs_TK[at] = top_logprobs[:, :kept].cpu()
            if scores.alpha_exact_N is not None:
                exact_T[at] = scores.alpha_exact_N.cpu()
        batch.dense_logprobs_T, batch.entropy_T = logprobs_T, entropy_T
        if self.reference is not None:
            batch.reference_logprobs_T = self._reference_logprobs(self.reference, T, micro_batches)
            release(self.reference)
        release(self.model)
        batch.alpha_T, beside_T = self.acceptance.headline(None if batch.hidden_TE is None else exact_T, top_k_T)
        return self._acceptance_metrics(batch, floor_T, beside_T) | self._correct(batch)

    def _acceptance_metrics(self, batch: RolloutBatch, floor_T: Tensor, top_k_T: Tensor | None) -> dict[str, float]:
        assert batch.alpha_T is not None and batch.entropy_T is not None and batch.dense_logprobs_T is not None
        logprobs = (batch.logprobs_T, batch.dense_logprobs_T)
        tokens = TailTokens(
            batch.alpha_T, floor_T, batch.cached_length_T, *logprobs, top_k_T, batch.response_position_T
        )
        metrics: dict[str, float] = self.acceptance.summary(tokens)
        return metrics | {
            "acceptance/tau": self.acceptance.tau,
            "entropy": float(distributed.gather(batch.entropy_T).mean()),
        }

    def _correct(self, batch: RolloutBatch) -> dict[str, float]:
        """Importance weights of this rank's tokens; mismatch panel and figures over all ranks."""
        dense_T = batch.dense_logprobs_T
        assert dense_T is not None
        batch.correction_T, _ = self.correction(dense_T, batch.logprobs_T, batch.sequence_T)
        sequences_T = batch.sequence_T + distributed.rank() * self.cfg.prompts_per_step * self.cfg.num_samples
        everywhere = [distributed.gather(x) for x in (dense_T, batch.logprobs_T, sequences_T)]
        _, metrics = self.correction(*everywhere)
        return metrics | mismatch_panel(everywhere[1], everywhere[0], everywhere[2])

    def _dense_attention(self, micro: MicroBatch) -> DenseAttention:
        return DenseAttention(self.cfg.attention, micro.lengths, self.device)

    def _reference_logprobs(self, reference: Decoder, T: int, micro_batches: list[MicroBatch]) -> Tensor:
        temperature, chunk = self.cfg.sampling.temperature, self.cfg.logprob_chunk
        logprobs_T = torch.zeros(T)
        for micro in micro_batches:
            hidden_NE = response_hidden(reference, micro, self._dense_attention(micro))
            logprobs_N, _ = token_logprobs(hidden_NE, reference.logits, micro.targets_N, temperature, chunk)
            logprobs_T[micro.index_N] = logprobs_N.cpu()
        return logprobs_T

    # Validation

    def _validate(self, validation: Validation) -> dict[str, float]:
        """Dense rollouts of the dense policy on held-out prompts."""
        sampling = replace(self.cfg.sampling, temperature=validation.temperature)
        numbers = range(validation.prompts)
        with self.console.phase("validation_rollout", validation.prompts * validation.num_samples) as advance:
            batch = self._generate(
                self.validation_engine, self.validation_data, numbers, validation.num_samples, sampling, advance
            )
        judged = in_order(judge(batch, self.rewards))
        figures = per_problem(judged, validation.num_samples, gives_answers(self.rewards))
        means = {name: mean_reward(values) for name, values in figures.items()}
        return {f"val/{name}": value for name, value in (means | of_samples(judged)).items()}

    def _encode(self, example: Example) -> list[int]:
        return encode_prompt(self.tokenizer, example.prompt, self.cfg.enable_thinking)

    # State

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if distributed.rank() == 0:
            self.trackers.log_dict(metrics, step)

    def _save(self) -> None:
        with self.console.phase("save"):
            self.saves.save(self.step, self._state)

    def _state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "next_prompt": self.next_prompt,
            "prompts": self.data.size,
            "version": self.engine.version,
            "nonfinite_in_a_row": self.update.nonfinite_in_a_row,
            "alarms": self.alarms.state_dict(),
            "trackers": self.trackers.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            "distiller": None if self.distiller is None else self.distiller.state_dict(),
            "controller": None if self.controller is None else self.controller.state_dict(),
        }

    def _load_state(self, save: Path) -> None:
        state = self.saves.load(save)
        self.step, self.next_prompt = state["step"], state["next_prompt"]
        if state["prompts"] != self.data.size:
            self.changes.append(
                f"changed since the save: data has {self.data.size} prompts, not {state['prompts']}: it goes on in "
                "another order"
            )
        self.engine.version = state["version"]
        self.update.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self.alarms.load_state_dict(state["alarms"])
        if self.saves.is_own(save):
            self.run_id = state["trackers"]["run_id"]
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"])
        if (state["distiller"] is None) != (self.distiller is None):
            raise UserError(f"resume: {save} was saved {'without' if self.distiller else 'with'} a distiller")
        if self.distiller is not None:
            self.distiller.load_state_dict(state["distiller"])
        if self.controller is not None and state["controller"] is not None:  # None: begun with another budget
            self.controller.load_state_dict(state["controller"])

    def cleanup(self) -> None:
        with ExitStack() as closing:  # each, also where one fails
            closing.callback(self.trackers.close)
            closing.callback(self.console.close)
            for _, _, reward in self.rewards:
                if isinstance(reward, Closes):
                    closing.callback(reward.close)


def _between_tokens(advance: Advance, tokens: int, sequences: int) -> None:
    advance(sequences, f"{tokens:,} tokens")
    stop_between_tokens(tokens, sequences)


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowGRPO, GRPOConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
