"""GRPO with sparse rollouts: the paper's loop, top to bottom.

    tune run sparrow_grpo --config tiny

prompts -> sparse rollout -> rewards -> advantages -> dense log-probs -> acceptance tail and mismatch -> correction ->
loss -> update of the dense weights -> [distiller] -> sync -> log.

Axes: S sequences of this rank's batch, T their response tokens, N tokens of one micro-batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from sparrow.attention.packed import PackedCausal
from sparrow.components.acceptance import alpha_top_k, top_k_floor
from sparrow.components.advantage import Advantages
from sparrow.components.aggregation import BatchTotals
from sparrow.components.data import Example, PromptData
from sparrow.components.kv_cache import DenseKVCache
from sparrow.components.loss import LossInputs, kl_penalty
from sparrow.components.reward import columns_per_sequence, combine_rewards
from sparrow.config import to_yaml
from sparrow.engine.engine import Engine
from sparrow.errors import Interrupted, UserError
from sparrow.launch import check_stop, run_recipe, stop_requested
from sparrow.models.checkpoint import load_decoder, save_decoder
from sparrow.models.tokenizer import Tokenizer
from sparrow.recipes.grpo_config import GRPOConfig, Validation, check
from sparrow.recipes.grpo_report import decode_responses, print_report, rollout_metrics, sample_rows
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.rollout import RolloutBatch
from sparrow.tracking.tracker import SafeTrackers
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.training.logprob import score_tokens, token_logprobs
from sparrow.training.mismatch import mismatch_panel
from sparrow.training.packing import MicroBatch, pack, response_hidden, split_by_tokens
from sparrow.training.run_state import latest_run_state, resolve_resume, save_run_state


class SparrowGRPO:
    """Reinforcement learning with verifiable rewards from block-sparse rollouts (arXiv 2606.08446)."""

    def __init__(self, cfg: GRPOConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)
        self.saves = self.output_dir / "checkpoints"
        self.trackers = SafeTrackers([tracker.build() for tracker in cfg.trackers] if distributed.rank() == 0 else [])
        self.run_id: str | None = None  # of the trackers, where the run is resumed
        self.step = 0
        self.nonfinite_in_a_row = 0
        self.last_save = -1

    # Setup

    def setup(self) -> None:
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.device = resolve_device(cfg.device, cfg.threads)
        save = resolve_resume(cfg.resume, self.saves)
        if save is None and latest_run_state(self.saves) is not None:
            raise UserError(
                f"output_dir: {self.output_dir} holds an earlier run; resume=auto goes on with it, another output_dir "
                "starts beside it"
            )
        if cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        source = Path(cfg.model) if save is None else save / "model"
        self.model = load_decoder(source, self.device, torch.float32)
        self.tokenizer = Tokenizer(source)
        self._build_components()
        self.engine = Engine(
            self.model, self.cache, self.tokenizer.eos_ids, cfg.engine, cfg.seed, self.acceptance.top_k
        )
        if save is not None:
            self._load_state(save)
        if distributed.rank() == 0:
            self.trackers.start(self.output_dir, yaml.safe_load(to_yaml(cfg)), self.run_id)
            self._print_start()

    def _build_components(self) -> None:
        cfg = self.cfg
        self.data: PromptData = cfg.data.build()
        self.rewards = [(r.name, r.weight, r) for r in (reward.build() for reward in cfg.reward)]
        self.cache = cfg.kv_cache.build()
        self.acceptance = cfg.acceptance.build()
        self.advantage, self.correction = cfg.advantage.build(), cfg.correction.build()
        self.loss, self.aggregation = cfg.loss.build(), cfg.aggregation.build()
        # The reference is what the policy starts from, also when the run is resumed.
        self.reference = load_decoder(cfg.model, self.device, torch.float32) if cfg.kl_coef > 0 else None
        self.optimizer = cfg.optimizer.build(self.model.named_parameters())
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups]
        self.distiller = cfg.distiller.build() if cfg.distiller is not None else None
        self.parameters = list(self.model.parameters())
        if self.distiller is not None:
            self.distiller.attach(self.model)
        if cfg.validation is not None:
            self.validation_data: PromptData = cfg.validation.data.build()
            dense = DenseKVCache(self.cache.page_size, self.cache.block_size)
            # Numbers of its own: training and validation prompts count from 0 alike.
            self.validation_engine = Engine(self.model, dense, self.tokenizer.eos_ids, cfg.engine, cfg.seed + 1)

    def _print_start(self) -> None:
        for difference in self.cache.check(self.cfg.model, self.cfg.sampling.temperature):
            print(f"schedule, foreign but allowed: {difference}")
        ids = self._encode(self.data.example(0))
        print(f"{self.cfg.sampling}, eos ids {self.tokenizer.eos_ids}")
        print(f"first prompt, {len(ids)} tokens: {self.tokenizer.decode(ids)!r}", flush=True)

    # The loop

    def train(self) -> None:
        try:
            if self.step == 0 and self.cfg.validation is not None:
                self._log(self._validate(self.cfg.validation), 0)
            while self.step < self.cfg.steps:
                check_stop()
                self._step()
        except Interrupted:
            self._save()
            raise Interrupted(f"stopped after step {self.step}; resume=auto goes on from {self.saves}") from None
        self._save()
        if distributed.rank() == 0:
            print_report(self.output_dir, self.saves, self.acceptance.tau)

    def _step(self) -> None:
        started = time.perf_counter()
        metrics = self._train_step()
        self.step += 1
        validation = self.cfg.validation
        if validation is not None and (self.step % validation.every == 0 or self.step == self.cfg.steps):
            metrics |= self._validate(validation)
        metrics["time/step"] = time.perf_counter() - started
        self._log(metrics, self.step)
        if self.step % self.cfg.checkpoint_every == 0:
            self._save()

    def _train_step(self) -> dict[str, float]:
        seconds: dict[str, float] = {}
        with _clock(seconds, "time/rollout"):
            batch = self._rollout()
        with _clock(seconds, "time/reward"):
            reward_metrics, advantages = self._score(batch)
        minibatches, others = self._micro_batches(batch)
        everything = [micro for part in [*minibatches, others] for micro in part]
        with _clock(seconds, "time/dense"):
            metrics = self._dense_pass(batch, everything)
        metrics |= reward_metrics | rollout_metrics(batch, self.cache, self.model.config.num_layers)
        with _clock(seconds, "time/update"):
            metrics |= self._update(batch, minibatches, advantages)
        if self.distiller is not None:
            with _clock(seconds, "time/distill"):
                metrics |= self._distill(batch, everything)
        self.engine.sync()
        if distributed.rank() == 0:
            self.trackers.log_samples(sample_rows(batch, self.tokenizer, self.cfg.samples_per_step), self.step + 1)
        metrics["tokens_per_second"] = metrics["completions/tokens"] / seconds["time/rollout"]
        return metrics | seconds

    def _rollout(self) -> RolloutBatch:
        """This rank's share of the step's prompts; random numbers follow the prompt, not the rank."""
        cfg = self.cfg
        first = self.step * cfg.prompts_per_step
        numbers = list(range(first, first + cfg.prompts_per_step))[distributed.rank() :: distributed.world_size()]
        examples = [self.data.example(number) for number in numbers]
        adapter: AbstractContextManager[None] = nullcontext() if self.distiller is None else self.distiller.rollout()
        with adapter:
            batch = self.engine.generate(
                [self._encode(example) for example in examples],
                cfg.num_samples,
                cfg.sampling,
                prompt_numbers=numbers,
                keep_hidden=self.acceptance.needs_hidden,
                on_step=_stop_between_tokens,
            )
        batch.columns = [example.columns for example in examples]
        batch.texts = decode_responses(batch, self.tokenizer)
        return batch

    def _score(self, batch: RolloutBatch) -> tuple[dict[str, float], Advantages]:
        """Rewards and group advantages; the figures are over all ranks."""
        columns = columns_per_sequence(batch.columns, batch.groups_S)
        batch.rewards_S, parts = combine_rewards(self.rewards, batch.texts, columns)
        advantages: Advantages = self.advantage(batch.rewards_S, batch.groups_S)
        batch.advantages_S = advantages.advantages_S
        groups_S = batch.groups_S + distributed.rank() * self.cfg.prompts_per_step
        everywhere = self.advantage(distributed.gather(batch.rewards_S), distributed.gather(groups_S))
        metrics = dict(everywhere.metrics)
        for name, part_S in parts.items():
            metrics[f"rewards/{name}/mean"] = float(distributed.gather(part_S).nanmean())
        # With a KL term the reference still pulls where no advantage does.
        self.nothing_to_learn = everywhere.is_noop and self.cfg.kl_coef == 0
        return metrics, advantages

    def _micro_batches(self, batch: RolloutBatch) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
        """Micro-batches of each minibatch, which dense pass and update share, so that their log-probs are bit-equal.

        The second list holds the sequences without an advantage. Their gradient is zero: they are scored, for the
        acceptance tail, and count in the denominators, but go through no update (unless a KL term pulls on them).
        """
        assert batch.advantages_S is not None
        learns_S = (batch.advantages_S != 0) | (self.cfg.kl_coef > 0)
        lengths = [len(p) + int(n) - 1 for p, n in zip(batch.prompts, batch.lengths_S, strict=True)]
        # Whole groups, dealt out by their number in the step: the same split whatever the number of ranks.
        part_S = (distributed.rank() + batch.groups_S * distributed.world_size()) % self.cfg.minibatches
        self.part_S = part_S

        def packed(chosen_S: Tensor) -> list[MicroBatch]:
            members = chosen_S.nonzero().flatten().tolist()
            groups = split_by_tokens([lengths[s] for s in members], self.cfg.micro_batch_tokens)
            return [pack(batch, [members[i] for i in group], self.device) for group in groups]

        return [packed((part_S == part) & learns_S) for part in range(self.cfg.minibatches)], packed(~learns_S)

    @torch.no_grad()
    def _dense_pass(self, batch: RolloutBatch, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """Dense log-probs of the sampled tokens before the update, and what they say of the sparse rollout."""
        cfg = self.cfg
        T = batch.num_tokens
        logprobs_T, entropy_T, exact_T, top_k_T, floor_T = torch.zeros(5, T).unbind()
        reference_T = torch.zeros(T)
        for micro in micro_batches:
            at = micro.index_N
            hidden_NE = response_hidden(self.model, micro, self._dense_attention(micro))
            sparse_NE = None if batch.hidden_TE is None else batch.hidden_TE[at]
            scores = score_tokens(
                hidden_NE,
                self.model.logits,
                micro.targets_N,
                cfg.sampling.temperature,
                self.acceptance.top_k,
                sparse_NE,
                cfg.logprob_chunk,
            )
            logprobs_T[at], entropy_T[at] = scores.logprobs_N.cpu(), scores.entropy_N.cpu()
            top_ids, top_logprobs = scores.top_ids_NK.cpu(), scores.top_logprobs_NK.cpu()
            top_k_T[at] = alpha_top_k(batch.top_ids_TK[at], batch.top_logprobs_TK[at], top_ids, top_logprobs)
            floor_T[at] = top_k_floor(top_logprobs)
            if scores.alpha_exact_N is not None:
                exact_T[at] = scores.alpha_exact_N.cpu()
            if self.reference is not None:
                reference_T[at] = self._reference_logprobs(micro).cpu()
        batch.dense_logprobs_T, batch.entropy_T, self.reference_T = logprobs_T, entropy_T, reference_T
        batch.alpha_T, other_T = self.acceptance.headline(None if batch.hidden_TE is None else exact_T, top_k_T)
        return self._acceptance_metrics(batch, floor_T, other_T) | self._correct(batch)

    def _acceptance_metrics(self, batch: RolloutBatch, floor_T: Tensor, other_T: Tensor | None) -> dict[str, float]:
        assert batch.alpha_T is not None and batch.entropy_T is not None
        metrics: dict[str, float] = self.acceptance.summary(
            distributed.gather(batch.alpha_T),
            distributed.gather(floor_T),
            distributed.gather(batch.cached_length_T),
            None if other_T is None else distributed.gather(other_T),
        )
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

    def _update(
        self, batch: RolloutBatch, minibatches: list[list[MicroBatch]], advantages: Advantages
    ) -> dict[str, float]:
        """Optimizer steps on the dense weights; none where no sequence has an advantage or a value is not finite."""
        self._set_learning_rate()
        metrics = {"lr": self.optimizer.param_groups[0]["lr"], "update/noop": float(self.nothing_to_learn)}
        if self.nothing_to_learn:
            return metrics
        for part, micro_batches in enumerate(minibatches):
            sums = self._accumulate(batch, micro_batches, advantages.keep_S, self.part_S == part)
            distributed.sum_gradients(self.parameters)
            sums = distributed.sum_values(sums)
            norm = float(nn.utils.clip_grad_norm_(self.parameters, self.cfg.max_grad_norm))
            tokens = max(sums.pop("tokens"), 1.0)
            loss = sums.pop("loss")
            finite = self._finite(loss=loss, grad_norm=norm, tokens=sums.pop("nonfinite"))
            if finite:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            metrics |= {"loss": loss, "grad_norm": norm, "update/skipped": float(not finite)}
            metrics |= {name: value / tokens for name, value in sums.items()}
        return metrics

    def _accumulate(
        self, batch: RolloutBatch, micro_batches: list[MicroBatch], keep_S: Tensor, part_S: Tensor
    ) -> dict[str, float]:
        """Gradients of one minibatch on this rank; returns sums over its tokens."""
        counted_S = keep_S & part_S
        counts = {"tokens": float(batch.lengths_S[counted_S].sum()), "sequences": float(counted_S.sum())}
        counts = distributed.sum_values(counts)
        totals = BatchTotals(max(int(counts["tokens"]), 1), max(int(counts["sequences"]), 1))
        sums = {"tokens": float(sum(len(m.index_N) for m in micro_batches)), "loss": 0.0, "nonfinite": 0.0}
        for micro in micro_batches:
            loss, metrics = self._micro_loss(batch, micro, totals)
            loss.backward()
            metrics["loss"] = loss.detach()
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _micro_loss(
        self, batch: RolloutBatch, micro: MicroBatch, totals: BatchTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        assert batch.dense_logprobs_T is not None and batch.advantages_S is not None and batch.correction_T is not None
        hidden_NE = response_hidden(self.model, micro, self._dense_attention(micro))
        logprobs_N, _ = token_logprobs(
            hidden_NE, self.model.logits, micro.targets_N, cfg.sampling.temperature, cfg.logprob_chunk
        )
        sequence_N = batch.sequence_T[micro.index_N]
        reference_N = self.reference_T[micro.index_N].to(self.device) if self.reference is not None else None
        inputs = LossInputs(
            logprobs_T=logprobs_N,
            old_logprobs_T=batch.dense_logprobs_T[micro.index_N].to(self.device),
            advantages_T=batch.advantages_S[sequence_N].to(self.device),
            correction_T=batch.correction_T[micro.index_N].to(self.device),
            sequence_T=micro.sequence_N,
            lengths_S=micro.response_lengths,
            ref_logprobs_T=reference_N,
        )
        output = self.loss(inputs)
        loss_N = output.loss_T
        if reference_N is not None:
            # A token that the correction removed contributes nothing here either.
            penalty_N = torch.where(inputs.correction_T != 0, kl_penalty(logprobs_N, reference_N), 0.0)
            loss_N = loss_N + cfg.kl_coef * penalty_N
        weights_N = self.aggregation.weights(micro.response_lengths, micro.sequence_N, totals)
        loss = (weights_N * loss_N).sum()
        ratio_N = (logprobs_N.detach() - inputs.old_logprobs_T).exp()
        metrics = {
            **output.metrics,
            "policy/ratio_error": (ratio_N - 1).abs().sum(),
            "nonfinite": (~logprobs_N.detach().isfinite()).sum(),
        }
        return loss, metrics

    def _distill(self, batch: RolloutBatch, micro_batches: list[MicroBatch]) -> dict[str, float]:
        assert self.distiller is not None and batch.dense_logprobs_T is not None

        def attention(micro: MicroBatch) -> Any:
            return self.cache.training(micro.lengths, micro.prompt_lengths, self.device)

        return self.distiller.step(
            micro_batches,
            attention,
            batch.dense_logprobs_T,
            self.cfg.sampling.temperature,
            self.cfg.logprob_chunk,
        )

    def _dense_attention(self, micro: MicroBatch) -> PackedCausal:
        return PackedCausal(micro.lengths, self.device)

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor:
        assert self.reference is not None
        hidden_NE = response_hidden(self.reference, micro, self._dense_attention(micro))
        head, temperature = self.reference.logits, self.cfg.sampling.temperature
        return token_logprobs(hidden_NE, head, micro.targets_N, temperature, self.cfg.logprob_chunk)[0]

    def _set_learning_rate(self) -> None:
        """Linear warm-up, times a linear way to `final_lr`."""
        warm = min((self.step + 1) / (self.cfg.lr_warmup_steps + 1), 1.0)
        share = warm * (1 - (1 - self.cfg.final_lr) * self.step / self.cfg.steps)
        for group, base in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = base * share

    def _finite(self, loss: float, grad_norm: float, tokens: float) -> bool:
        """Whether the step may be taken; otherwise it is counted, named, and after some in a row the run ends."""
        if math.isfinite(loss) and math.isfinite(grad_norm) and tokens == 0:
            self.nonfinite_in_a_row = 0
            return True
        self.nonfinite_in_a_row += 1
        what = f"loss {loss}, gradient norm {grad_norm}, {int(tokens)} tokens with a non-finite log-prob"
        if distributed.rank() == 0:
            print(f"warning: step {self.step + 1} skipped: {what}", file=sys.stderr, flush=True)
        if self.nonfinite_in_a_row >= self.cfg.max_nonfinite_steps:
            raise UserError(
                f"{self.nonfinite_in_a_row} steps in a row were not finite (max_nonfinite_steps "
                f"{self.cfg.max_nonfinite_steps}), the last one: {what}"
            )
        return False

    # Validation

    def _validate(self, validation: Validation) -> dict[str, float]:
        """Dense rollouts of the dense policy on held-out prompts."""
        numbers = range(distributed.rank(), validation.prompts, distributed.world_size())
        examples = [self.validation_data.example(number) for number in numbers]
        sampling = replace(self.cfg.sampling, temperature=validation.temperature)
        batch = self.validation_engine.generate(
            [self._encode(example) for example in examples],
            validation.num_samples,
            sampling,
            prompt_numbers=list(numbers),
            on_step=_stop_between_tokens,
        )
        columns = columns_per_sequence([example.columns for example in examples], batch.groups_S)
        rewards_S, _ = combine_rewards(self.rewards, decode_responses(batch, self.tokenizer), columns)
        rewards_S, lengths_S = distributed.gather(rewards_S), distributed.gather(batch.lengths_S)
        name = f"val/mean@{validation.num_samples}"
        return {name: float(rewards_S.nanmean()), "val/mean_length": float(lengths_S.float().mean())}

    def _encode(self, example: Example) -> list[int]:
        if isinstance(example.prompt, str):
            return self.tokenizer.encode(example.prompt)
        return self.tokenizer.apply_chat_template(example.prompt, self.cfg.enable_thinking)

    # State

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if distributed.rank() == 0:
            self.trackers.log_dict(metrics, step)

    def _save(self) -> None:
        if self.step == self.last_save:
            return
        if distributed.rank() == 0:
            save_run_state(self.saves, self.step, self._write_state, self.cfg.keep_last)
        distributed.barrier()
        self.last_save = self.step

    def _write_state(self, folder: Path) -> None:
        save_decoder(self.model, folder / "model", self.tokenizer.path)
        state = {
            "step": self.step,
            "version": self.engine.version,
            "nonfinite_in_a_row": self.nonfinite_in_a_row,
            "optimizer": self.optimizer.state_dict(),
            "trackers": self.trackers.state_dict(),
            "rng": torch.get_rng_state(),
            "distiller": None if self.distiller is None else self.distiller.state_dict(),
        }
        torch.save(state, folder / "state.pt")

    def _load_state(self, save: Path) -> None:
        state = torch.load(save / "state.pt", map_location="cpu", weights_only=True)
        self.step = self.last_save = state["step"]
        self.engine.version = state["version"]
        self.nonfinite_in_a_row = state["nonfinite_in_a_row"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.run_id = state["trackers"]["run_id"]
        torch.set_rng_state(state["rng"])
        if (state["distiller"] is None) != (self.distiller is None):
            raise UserError(f"resume: {save} was saved {'without' if self.distiller else 'with'} a distiller")
        if self.distiller is not None:
            self.distiller.load_state_dict(state["distiller"])

    def cleanup(self) -> None:
        self.trackers.close()


def _stop_between_tokens(tokens: int, sequences: int) -> None:
    # Ranks decode at their own pace: with several, only the check between steps is safe.
    if distributed.world_size() == 1 and stop_requested():
        raise Interrupted


@contextmanager
def _clock(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - started


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowGRPO, GRPOConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
