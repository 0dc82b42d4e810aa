"""DistillSparse: a LoRA adapter that is on in rollouts only and pulls the sparse policy towards the dense one (paper).

After each update of the dense weights, the adapter takes a step on a divergence between the sparse policy and the dense
one, with the base frozen; a PPO term of the sparse policy may stand beside it. The sparse forward sees the pages that
the rollout saw. What the adapter is off for: every dense log-prob, the dense update, validation.

Axes: T response tokens of the batch, N of one micro-batch, S sequences.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparrow.components.distill_loss import DistillLoss, SampledK3, Teacher, distill_terms
from sparrow.components.loss import Loss, LossInputs
from sparrow.errors import UserError
from sparrow.models.adapted import adapters_on, switch_adapters
from sparrow.models.decoder import Decoder
from sparrow.models.head import HALF
from sparrow.models.merge import check_beginning, fill_adapter
from sparrow.protocols import Attention
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.logprob import score_tokens
from sparrow.training.packing import MicroBatch, response_hidden

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TEACHERS = ("before_step", "current")


@dataclass(frozen=True)
class DistillRun:
    """What a step takes over from the run.

    Attributes:
        attention, dense_attention: of a micro-batch: the training attention of the rollout's pages, and of all.
        chunk_size: tokens whose logits are held.
        base_rate: learning rate of the dense policy; None where it is not trained.
    """

    attention: Callable[[MicroBatch], Attention]
    dense_attention: Callable[[MicroBatch], Attention]
    temperature: float
    chunk_size: int
    base_rate: float | None


class Distiller(Protocol):
    """What the recipes ask of a distiller."""

    merge_in_engine: bool | None
    ppo: Loss | None
    rate_factor: float | None

    @property
    def recorded_top_k(self) -> int:
        """Size of the dense policy's top-k set that a batch is to keep from before the update; 0 for none."""
        ...

    def attach(self, model: Decoder) -> None:
        """Adds the adapter to the model, switched off; once, before any forward."""
        ...

    def rollout(self) -> Any:
        """Context manager: the adapter is on inside, off outside."""
        ...

    def chosen(self, numbers_S: Tensor) -> Tensor:
        """Which sequences are distilled on, by the numbers of their prompts, bool [S]."""
        ...

    def step(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], run: DistillRun) -> dict[str, float]:
        """One update of the adapter; collective."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def export(self, path: Path) -> None:
        """Writes the adapter into a folder, for use outside of Sparrow."""
        ...


class LoRADistiller:
    """LoRA through `peft`, trained on L_KL, or on L_PPO + kl_weight * L_KL (paper).

    Args:
        learning_rate: of the adapter's own AdamW, constant.
        rate_factor: or so many times the dense policy's rate of the step (paper: 5); exactly one of the two.
        rank, alpha: LoRA's (paper: alpha 16; its rank is unpublished).
        targets: modules to adapt (paper: all linear layers); the head never, so that it is one for both policies.
        loss: L_KL, a class of `components.distill_loss`; `SampledK3` by default.
        teacher: the dense policy `before_step`, as the dense pass recorded it, or the `current` one, at the cost of
            another forward.
        ppo: L_PPO, a class of `components.loss`, of the sparse policy against its own log-probs in the rollout.
        kl_weight: lambda (paper: .001); without L_PPO it only scales the gradient before its clip.
        share: of the prompts, whose sequences are distilled on.
        merge_in_engine: whether the rollout adds the adapter to a copy of the weights first. By default it does where
            the engine has weights of its own, on CUDA and with several processes, and does not where it shares the
            trainer's.
        max_grad_norm: clips the adapter's gradient.
        adapter: folder of peft that it begins with, of the same rank, alpha and targets, as `sparrow_distill` and saves
            hold one; without it, it begins with one that changes nothing.

    Raises:
        UserError: a size or rate out of range, a target the decoder has not, or a loss that the teacher cannot serve.
            `attach`: an adapter of another kind or for another model.
    """

    def __init__(
        self,
        learning_rate: float | None = None,
        rate_factor: float | None = None,
        rank: int = 16,
        alpha: int = 16,
        targets: list[str] | None = None,
        loss: DistillLoss | None = None,
        teacher: str = "before_step",
        ppo: Loss | None = None,
        kl_weight: float = 1.0,
        share: float = 1.0,
        merge_in_engine: bool | None = None,
        max_grad_norm: float = 1.0,
        adapter: str | None = None,
    ) -> None:
        self.targets = list(targets or ALL_LINEAR)
        if (learning_rate is None) == (rate_factor is None):
            raise UserError("distiller: give exactly one of learning_rate and rate_factor")
        rate = {"learning_rate": learning_rate} if rate_factor is None else {"rate_factor": rate_factor}
        for key, value in {"rank": rank, "alpha": alpha, "kl_weight": kl_weight, **rate}.items():
            if value is not None and value <= 0:
                raise UserError(f"distiller.{key}: {value} must be above 0")
        for target in self.targets:
            if target not in ALL_LINEAR:
                raise UserError(f"distiller.targets: {target!r} is not one of {', '.join(ALL_LINEAR)}")
        if not 0 < share <= 1:
            raise UserError(f"distiller.share: {share} must be above 0 and at most 1")
        self.loss: DistillLoss = SampledK3() if loss is None else loss
        _check_teacher(teacher, self.loss)
        self.rank, self.alpha, self.max_grad_norm = rank, alpha, max_grad_norm
        self.beginning = None if adapter is None else Path(adapter)
        if self.beginning is not None:
            with _its_key():
                check_beginning(self.beginning, rank, alpha)
        self.learning_rate, self.rate_factor = learning_rate, rate_factor
        self.teacher, self.ppo, self.kl_weight = teacher, ppo, kl_weight
        # A fraction, because .1 * 30 is above 3 in floating point.
        self.share, self.merge_in_engine = Fraction(share).limit_denominator(10**6), merge_in_engine

    @property
    def recorded_top_k(self) -> int:
        """That of the loss, where the teacher is the one before the step."""
        return self.loss.top_k if self.teacher == "before_step" else 0

    def attach(self, model: Decoder) -> None:
        """Wraps the target modules in place; the base stays trainable, the adapter is off."""
        # Seconds of import that only runs with a distiller should pay for.
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=self.targets, task_type="CAUSAL_LM")
        inject_adapter_in_model(self.config, model)
        for parameter in trainable:  # peft freezes the base; here it is what GRPO trains.
            parameter.requires_grad_(True)
        self.model, self.base = model, trainable
        self.layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        for layer in self.layers:
            _whole_output(layer)
        self.adapter = {name: p for name, p in model.named_parameters() if "lora_" in name}
        for parameter in self.adapter.values():
            if parameter.dtype in HALF:  # its steps are too small for them
                parameter.data = parameter.data.float()
        if self.beginning is not None:
            with _its_key():
                fill_adapter(model, self.beginning, self.rank, self.alpha)
        # The rate is set at each step.
        self.optimizer = torch.optim.AdamW(self.adapter.values(), lr=0.0, weight_decay=0.0)
        switch_adapters(self.layers, False)

    def rollout(self) -> AbstractContextManager[None]:
        """The adapter is on inside."""
        return adapters_on(self.layers)

    def chosen(self, numbers_S: Tensor) -> Tensor:
        """Every 1 / share-th prompt, the same ones on any number of processes; with all of its samples."""
        over, under = self.share.numerator, self.share.denominator
        return (numbers_S + 1) * over // under > numbers_S * over // under

    def step(self, batch: RolloutBatch, micro_batches: Sequence[MicroBatch], run: DistillRun) -> dict[str, float]:
        """One AdamW step on the token mean over all ranks; none where no rank has a token."""
        tokens = distributed.sum_values({"tokens": sum(len(micro.index_N) for micro in micro_batches)})["tokens"]
        if tokens == 0:
            return {"distill/tokens": 0.0}
        sums: dict[str, float] = {}
        with self._frozen_base():
            for micro in micro_batches:
                for name, value in self._backward(batch, micro, run, tokens).items():
                    sums[name] = sums.get(name, 0.0) + value
            distributed.sum_gradients(self.adapter.values())
        rate = self._set_rate(run.base_rate)
        norm = nn.utils.clip_grad_norm_(self.adapter.values(), self.max_grad_norm)
        skipped = not bool(norm.isfinite())
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        means = {f"distill/{name}": value / tokens for name, value in distributed.sum_values(sums).items()}
        figures = {"grad_norm": float(norm), "skipped": float(skipped), "tokens": tokens, "lr": rate}
        return means | {f"distill/{name}": value for name, value in figures.items()}

    def _backward(self, batch: RolloutBatch, micro: MicroBatch, run: DistillRun, tokens: float) -> dict[str, float]:
        """Adds a micro-batch's share to the gradient; returns sums over its tokens."""
        teacher = self._teacher(batch, micro, run)
        with self.rollout():
            hidden_NE = response_hidden(self.model, micro, run.attention(micro))
            logprobs_N, kl_N = distill_terms(
                self.loss, hidden_NE, self.model.logits, micro.targets_N, teacher, run.temperature, run.chunk_size
            )
            loss_N, metrics = self.kl_weight * kl_N, {"kl": float(kl_N.detach().sum())}
            if self.ppo is not None:
                output = self.ppo(_ppo_inputs(batch, micro, logprobs_N))
                loss_N = loss_N + output.loss_T
                clipped = [float(value) for name, value in output.metrics.items() if name.startswith("clip_ratio/")]
                metrics |= {"ppo_loss": float(output.loss_T.detach().sum()), "ppo_clipped": sum(clipped)}
            (loss_N.sum() / tokens).backward()
        return metrics

    def _teacher(self, batch: RolloutBatch, micro: MicroBatch, run: DistillRun) -> Teacher:
        # Where nothing was recorded, nothing is updated either: offline the two teachers are one.
        if self.teacher == "before_step" and batch.dense_logprobs_T is not None:
            at, recorded = micro.index_N, (batch.dense_logprobs_T, batch.dense_top_ids_TK, batch.dense_top_logprobs_TK)
            logprobs_N, ids_NK, top_NK = (None if x is None else x[at].to(micro.targets_N.device) for x in recorded)
            return Teacher(logprobs_N, ids_NK, top_NK)
        with torch.no_grad():
            hidden_NE = response_hidden(self.model, micro, run.dense_attention(micro))
        if self.loss.needs == "all":
            return Teacher(hidden_NE=hidden_NE)
        head, top_k = self.model.logits, max(self.loss.top_k, 1)
        scores = score_tokens(hidden_NE, head, micro.targets_N, run.temperature, top_k, None, run.chunk_size)
        return Teacher(scores.logprobs_N, scores.top_ids_NK, scores.top_logprobs_NK)

    def _set_rate(self, base_rate: float | None) -> float:
        rate = self.learning_rate
        if self.rate_factor is not None:
            assert base_rate is not None, "a recipe without a base rate refuses the factor"
            rate = self.rate_factor * base_rate
        assert rate is not None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def state_dict(self) -> dict[str, Any]:
        """Adapter weights and optimizer."""
        adapter = {name: parameter.detach().cpu() for name, parameter in self.adapter.items()}
        return {"adapter": adapter, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After `attach`."""
        if state["adapter"].keys() != self.adapter.keys():
            raise UserError("resume: the saved adapter has other modules than this distiller's targets")
        with torch.no_grad():
            for name, parameter in self.adapter.items():
                parameter.copy_(state["adapter"][name])
        self.optimizer.load_state_dict(state["optimizer"])

    def export(self, path: Path) -> None:
        """Writes what `peft.PeftModel.from_pretrained` loads onto transformers' model of the exported base.

        `path` gets adapter_config.json and adapter_model.safetensors; it is made if need be.
        """
        path.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(path))
        weights, config = path / "adapter_model.safetensors", path / "adapter_config.json"
        # peft's file knows neither the adapter's name nor that the model was wrapped in place.
        tensors = {f"base_model.model.{name.replace('.default.', '.')}": p for name, p in self.adapter.items()}
        save_file({name: p.detach().cpu().contiguous() for name, p in tensors.items()}, weights, {"format": "pt"})
        shutil.copymode(config, weights)  # safetensors makes its files readable by their owner only

    @contextmanager
    def _frozen_base(self) -> Iterator[None]:
        for parameter in self.base:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.base:
                parameter.requires_grad_(True)


@contextmanager
def _its_key() -> Iterator[None]:
    """What reads an adapter calls it so; here the key is another."""
    try:
        yield
    except UserError as error:
        raise UserError(f"distiller.{error}") from None


def _whole_output(layer: Any) -> None:
    """As many outputs as the base has: of a mesh with two dimensions, peft takes this rank's share for the whole."""
    rows = layer.base_layer.out_features
    for lora_b in layer.lora_B.values():
        if lora_b.out_features != rows:
            layer.out_features = lora_b.out_features = rows
            lora_b.weight = nn.Parameter(lora_b.weight.new_zeros(rows, lora_b.in_features))  # zero is where LoRA starts


def _ppo_inputs(batch: RolloutBatch, micro: MicroBatch, logprobs_N: Tensor) -> LossInputs:
    """The sparse policy's own ratio: its log-probs of the rollout are the old ones, and nothing has to be corrected."""
    assert batch.advantages_S is not None
    at, device = micro.index_N, logprobs_N.device
    return LossInputs(
        logprobs_T=logprobs_N,
        old_logprobs_T=batch.logprobs_T[at].to(device),
        advantages_T=batch.advantages_S[batch.sequence_T[at]].to(device),
        correction_T=torch.ones_like(logprobs_N),
        sequence_T=micro.sequence_N,
        lengths_S=micro.response_lengths,
    )


def _check_teacher(teacher: str, loss: DistillLoss) -> None:
    if teacher not in TEACHERS:
        raise UserError(f"distiller.teacher: {teacher!r} is neither 'before_step' nor 'current'")
    if teacher == "before_step" and loss.needs == "all":
        raise UserError(
            "distiller.teacher: before_step has no whole distributions, which the loss needs: the head has been "
            "updated since; take teacher: current, or a loss over the top-k set"
        )
