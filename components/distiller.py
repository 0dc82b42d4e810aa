"""DistillSparse: a LoRA adapter that is on in rollouts only and pulls the sparse policy towards the dense one (paper).

After each update of the dense weights, the adapter takes a step on the k3 estimate of KL(sparse, dense) at the sampled
tokens, with the base frozen and the dense log-probs of the rollout's weights as the teacher. The sparse forward sees
the pages that the rollout saw. What the adapter is off for: every dense log-prob, the dense update, validation.

Axes: T response tokens of the batch, N of one micro-batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.protocols import Attention
from sparrow.training import distributed
from sparrow.training.logprob import LOG_RATIO_LIMIT, token_logprobs
from sparrow.training.packing import MicroBatch, response_hidden

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Distiller(Protocol):
    """What the recipe asks of a distiller."""

    def attach(self, model: Decoder) -> None:
        """Adds the adapter to the model, switched off; once, before any forward."""
        ...

    def rollout(self) -> Any:
        """Context manager: the adapter is on inside, off outside."""
        ...

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        attention: Callable[[MicroBatch], Attention],
        dense_logprobs_T: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> dict[str, float]:
        """One update of the adapter; `attention` gives the sparse training attention of a micro-batch."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def export(self, path: Path) -> None:
        """Writes the adapter into a folder, for use outside of Sparrow."""
        ...


class LoRADistiller:
    """LoRA through `peft`, trained by k3 on the sampled token.

    Args:
        rank, alpha: LoRA's (paper: alpha 16; its rank is unpublished).
        learning_rate: of the adapter's own AdamW (paper: 5 times the base rate).
        targets: modules to adapt (paper: all linear layers); the head never, so that it is one for both policies.
        max_grad_norm: clips the adapter's gradient.

    Raises:
        UserError: a size or rate out of range, or a target the decoder has not.
    """

    def __init__(
        self,
        learning_rate: float,
        rank: int = 16,
        alpha: int = 16,
        targets: list[str] | None = None,
        max_grad_norm: float = 1.0,
    ) -> None:
        self.targets = list(targets or ALL_LINEAR)
        for key, value in (("rank", rank), ("alpha", alpha), ("learning_rate", learning_rate)):
            if value <= 0:
                raise UserError(f"distiller.{key}: {value} must be above 0")
        for target in self.targets:
            if target not in ALL_LINEAR:
                raise UserError(f"distiller.targets: {target!r} is not one of {', '.join(ALL_LINEAR)}")
        self.rank, self.alpha, self.learning_rate, self.max_grad_norm = rank, alpha, learning_rate, max_grad_norm

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
        self.optimizer = torch.optim.AdamW(self.adapter.values(), lr=self.learning_rate, weight_decay=0.0)
        self._enable(False)

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """The adapter is on inside."""
        self._enable(True)
        try:
            yield
        finally:
            self._enable(False)

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        attention: Callable[[MicroBatch], Attention],
        dense_logprobs_T: Tensor,
        temperature: float,
        chunk_size: int,
    ) -> dict[str, float]:
        """One AdamW step on the token mean of k3 over all ranks' tokens."""
        tokens = sum(len(micro.index_N) for micro in micro_batches)
        total = distributed.sum_values({"tokens": tokens})["tokens"]
        loss = 0.0
        with self.rollout(), self._frozen_base():
            for micro in micro_batches:
                hidden_NE = response_hidden(self.model, micro, attention(micro))
                logprobs_N, _ = token_logprobs(hidden_NE, self.model.logits, micro.targets_N, temperature, chunk_size)
                teacher_N = dense_logprobs_T[micro.index_N].to(logprobs_N.device)
                part = k3(logprobs_N, teacher_N).sum() / total
                part.backward()
                loss += float(part.detach())
            distributed.sum_gradients(self.adapter.values())
        norm = nn.utils.clip_grad_norm_(self.adapter.values(), self.max_grad_norm)
        skipped = not bool(norm.isfinite())
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = distributed.sum_values({"loss": loss})["loss"]
        return {"distill/kl": loss, "distill/grad_norm": float(norm), "distill/skipped": float(skipped)}

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

    def _enable(self, enabled: bool) -> None:
        for layer in self.layers:
            layer.enable_adapters(enabled)

    @contextmanager
    def _frozen_base(self) -> Iterator[None]:
        for parameter in self.base:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.base:
                parameter.requires_grad_(True)


def _whole_output(layer: Any) -> None:
    """As many outputs as the base has: of a mesh with two dimensions, peft takes this rank's share for the whole."""
    rows = layer.base_layer.out_features
    for lora_b in layer.lora_B.values():
        if lora_b.out_features != rows:
            layer.out_features = lora_b.out_features = rows
            lora_b.weight = nn.Parameter(lora_b.weight.new_zeros(rows, lora_b.in_features))  # zero is where LoRA starts


def k3(sparse_logprobs_N: Tensor, dense_logprobs_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = dense - sparse clamped to +-20 and the result to 20; fp32 [N] (paper, DistillSparse)."""
    delta_N = (dense_logprobs_N - sparse_logprobs_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(delta_N) - delta_N).clamp(max=LOG_RATIO_LIMIT)
