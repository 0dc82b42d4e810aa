"""The update of the dense policy: loss of each micro-batch, gradients of each minibatch, a step where all is finite.

Axes: S sequences of this rank's batch, T their response tokens, N tokens of one micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sparrow.attention.dense import DenseAttention
from sparrow.components.aggregation import Aggregation, BatchTotals
from sparrow.components.loss import Loss, LossInputs, kl_penalty
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.recipes.grpo_minibatches import Minibatch, combine_metrics
from sparrow.rollout import RolloutBatch
from sparrow.tracking.console import Advance, say
from sparrow.training import distributed
from sparrow.training.learning_rate import LearningRate
from sparrow.training.logprob import token_logprobs
from sparrow.training.packing import MicroBatch, response_hidden
from sparrow.training.sharded_state import Optimizer
from sparrow.training.sharding import clip_gradients


class PolicyUpdate:
    """Optimizer steps on the dense weights from one batch of rollouts.

    Args:
        parameters: those of the dense policy; an adapter's are not among them.

    Attributes:
        nonfinite_in_a_row: optimizer steps that were skipped since the last one that was taken.
    """

    def __init__(
        self,
        cfg: GRPOConfig,
        model: Decoder,
        optimizer: Optimizer,
        parameters: Sequence[nn.Parameter],
        loss: Loss,
        aggregation: Aggregation,
        device: torch.device,
    ) -> None:
        self.cfg, self.model, self.device = cfg, model, device
        self.optimizer, self.parameters = optimizer, parameters
        self.loss, self.aggregation = loss, aggregation
        self.learning_rate = LearningRate(optimizer, cfg.lr_warmup_steps, cfg.final_lr)
        self.nonfinite_in_a_row = 0

    def run(self, batch: RolloutBatch, minibatches: list[Minibatch], step: int, advance: Advance) -> dict[str, float]:
        """One optimizer step for each minibatch that has something to learn from; returns metrics over all ranks.

        The others are left out even though their gradient is zero: momentum and weight decay would move the weights.

        Args:
            step: number of the step, from 0.
            advance: told the micro-batches that are done.
        """
        self.learning_rate.set(step, step, self.cfg.steps)
        self._done, self._advance = 0, advance
        metrics = [self._optimizer_step(batch, each, step) for each in minibatches if each.learning_tokens]
        lr = float(self.optimizer.param_groups[0]["lr"])  # torchao keeps it as a tensor
        return {"lr": lr, "update/noop": float(not metrics)} | combine_metrics(metrics)

    def _optimizer_step(self, batch: RolloutBatch, minibatch: Minibatch, step: int) -> dict[str, float]:
        """Leaves the weights alone where a value is not finite."""
        sums = distributed.sum_values(self._accumulate(batch, minibatch))
        norm = clip_gradients(self.parameters, self.cfg.max_grad_norm)
        loss = sums.pop("loss")
        finite = self._finite(step, loss=loss, grad_norm=norm, tokens=sums.pop("nonfinite"))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        shares = {name: value / minibatch.learning_tokens for name, value in sums.items()}
        return {"loss": loss, "grad_norm": norm, "update/skipped": float(not finite)} | shares

    def _accumulate(self, batch: RolloutBatch, minibatch: Minibatch) -> dict[str, float]:
        """Gradients of one minibatch on this rank; returns its loss, and metrics as sums over its tokens."""
        sums = {"loss": 0.0, "nonfinite": 0.0}
        for micro in minibatch.micro_batches:
            loss, metrics = self._micro_loss(batch, micro, minibatch.totals)
            loss.backward()
            self._done += 1
            self._advance(self._done, "micro-batches")
            for name, value in {**metrics, "loss": loss.detach()}.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def _micro_loss(
        self, batch: RolloutBatch, micro: MicroBatch, totals: BatchTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        assert batch.dense_logprobs_T is not None and batch.advantages_S is not None and batch.correction_T is not None
        hidden_NE = response_hidden(self.model, micro, DenseAttention(self.cfg.attention, micro.lengths, self.device))
        logprobs_N, _ = token_logprobs(
            hidden_NE, self.model.summing_head(), micro.targets_N, cfg.sampling.temperature, cfg.logprob_chunk
        )
        sequence_N = batch.sequence_T[micro.index_N]
        reference_T = batch.reference_logprobs_T
        reference_N = None if reference_T is None else reference_T[micro.index_N].to(self.device)
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

    def _finite(self, step: int, loss: float, grad_norm: float, tokens: float) -> bool:
        """Whether the step may be taken; otherwise it is counted, named, and after some in a row the run ends."""
        if math.isfinite(loss) and math.isfinite(grad_norm) and tokens == 0:
            self.nonfinite_in_a_row = 0
            return True
        self.nonfinite_in_a_row += 1
        what = f"loss {loss}, gradient norm {grad_norm}, {int(tokens)} tokens with a non-finite log-prob"
        if distributed.rank() == 0:
            say(f"warning: step {step + 1} skipped: {what}")
        if self.nonfinite_in_a_row >= self.cfg.max_nonfinite_steps:
            raise UserError(
                f"{self.nonfinite_in_a_row} steps in a row were not finite (max_nonfinite_steps "
                f"{self.cfg.max_nonfinite_steps}), the last one: {what}"
            )
        return False
