"""A short supervised warm-up: worked responses, token cross-entropy, a curriculum of stages.

    tune run sparrow_sft --config tiny_sft

Makes the checkpoint that a small model's reinforcement learning starts from; sparrow_grpo runs it by itself where its
`warmup` names a config and the checkpoint is not there. Dense attention; several processes share each batch.

Axes: P packed input tokens, N response tokens of one batch.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.components.data import PromptData
from sparrow.config import Component, Positional, load_config
from sparrow.errors import UserError
from sparrow.launch import check_stop, run_recipe
from sparrow.models.char_tokenizer import build_char_tokenizer
from sparrow.models.checkpoint import load_decoder, save_decoder
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.tokenizer import Tokenizer, tokenizer_of_model
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.training.learning_rate import LearningRate


@dataclass(kw_only=True)
class FreshModel:
    """A character-level model drawn from scratch.

    Attributes:
        alphabet: the characters, one token each; the vocabulary.
        eos: the character that ends a response.
        decoder: its shape; vocab_size is that of the alphabet.
        init: how the weights are drawn.
    """

    alphabet: str
    eos: str
    decoder: DecoderConfig
    init: InitOptions = field(default_factory=InitOptions)


@dataclass(kw_only=True)
class Stage:
    """Part of the curriculum.

    Attributes:
        data: prompts with a column `response`.
        steps: optimizer steps at most.
        batch_size: examples per step.
        until_accuracy: the stage ends when the running token accuracy reaches this.
    """

    data: Component
    steps: int
    batch_size: int
    until_accuracy: float = 1.1  # never


@dataclass(kw_only=True)
class SFTConfig:
    """Every key of a sparrow_sft config. The checkpoint goes to `output_dir`/model."""

    recipe: str = "sparrow_sft"
    output_dir: str
    model: str | None = None  # a Hugging Face folder to start from; exactly one of model and fresh
    fresh: FreshModel | None = None
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    stages: list[Stage]
    optimizer: Annotated[Component, Positional(1)]
    lr_warmup_steps: int = 10
    final_lr: float = 0.02  # share of the rate that the last step of the last stage has, linearly; 1 is constant
    log_every: int = 20


class SparrowSFT:
    """Supervised warm-up."""

    def __init__(self, cfg: SFTConfig) -> None:
        if (cfg.model is None) == (cfg.fresh is None):
            raise UserError("sparrow_sft: give exactly one of model (a Hugging Face folder) and fresh")
        if not cfg.stages:
            raise UserError("stages: the curriculum is empty")
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)
        self.step = 0

    def setup(self) -> None:
        """The model, loaded or drawn, its optimizer and the data of each stage."""
        self.device = resolve_device(self.cfg.device, self.cfg.threads)
        self.model, self.tokenizer = self._load() if self.cfg.fresh is None else self._draw(self.cfg.fresh)
        self.optimizer = self.cfg.optimizer.build(self.model.named_parameters())
        self.learning_rate = LearningRate(self.optimizer, self.cfg.lr_warmup_steps, self.cfg.final_lr)
        self.stages: list[PromptData] = [stage.data.build() for stage in self.cfg.stages]

    def train(self) -> None:
        """All stages, and the checkpoint at the end; there are no saves on the way."""
        self.started = time.perf_counter()
        for number in range(len(self.stages)):
            self._stage(number)
        if distributed.rank() == 0:
            save_decoder(self.model, self.output_dir / "model", self.tokenizer.path)
            seconds = time.perf_counter() - self.started
            print(f"warm-up  {self.step} steps in {seconds:.0f}s: {self.output_dir / 'model'}")
        distributed.barrier()

    def _stage(self, number: int) -> None:
        """Steps of one stage, until its number of steps or its accuracy is reached; the last one decays the rate."""
        stage, data = self.cfg.stages[number], self.stages[number]
        is_last = number == len(self.stages) - 1
        accuracy = 0.0
        for i in range(stage.steps):
            check_stop()
            self.learning_rate.set(self.step, i if is_last else 0, stage.steps)
            numbers = range(i * stage.batch_size, (i + 1) * stage.batch_size)
            loss, correct = self._step(data, numbers[distributed.rank() :: distributed.world_size()])
            accuracy = correct if i == 0 else 0.8 * accuracy + 0.2 * correct
            self.step += 1
            if self.step % self.cfg.log_every == 0 and distributed.rank() == 0:
                print(
                    f"warm-up  step {self.step}  stage {number + 1}/{len(self.stages)}  loss {loss:.4f}  "
                    f"token accuracy {accuracy:.4f}  {time.perf_counter() - self.started:.0f}s",
                    flush=True,
                )
            if accuracy >= stage.until_accuracy:
                break

    def _step(self, data: PromptData, numbers: range) -> tuple[float, float]:
        """One optimizer step; returns loss and share of response tokens that are the most probable ones."""
        tokens_P, targets_N, predicts_N, attention = self._batch(data, numbers)
        hidden_PE = self.model(tokens_P, attention.positions_T, attention)
        logits_NV = self.model.logits(hidden_PE[predicts_N])
        tokens = distributed.sum_values({"tokens": len(targets_N)})["tokens"]
        loss = F.cross_entropy(logits_NV, targets_N, reduction="sum") / tokens
        loss.backward()
        distributed.sum_gradients(self.model.parameters())
        correct = float((logits_NV.argmax(-1) == targets_N).sum())
        sums = distributed.sum_values({"loss": float(loss.detach()), "correct": correct})
        if not math.isfinite(sums["loss"]):
            raise UserError(f"the loss of step {self.step + 1} is {sums['loss']}: lower the learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums["loss"], sums["correct"] / tokens

    def _batch(self, data: PromptData, numbers: range) -> tuple[Tensor, Tensor, Tensor, PackedCausal]:
        tokens, targets, predicts, start = [], [], [], 0
        for number in numbers:
            example = data.example(number)
            if not isinstance(example.prompt, str) or "response" not in example.columns:
                raise UserError("stages.data: the warm-up wants plain-text prompts with a column `response`")
            prompt, response = self.tokenizer.encode(example.prompt), self.tokenizer.encode(example.columns["response"])
            tokens.append((prompt + response)[:-1])
            targets += response
            predicts.append(start + len(prompt) - 1 + torch.arange(len(response)))
            start += len(tokens[-1])
        attention = PackedCausal([len(x) for x in tokens], self.device)
        packed = torch.tensor([token for x in tokens for token in x], device=self.device)
        return packed, torch.tensor(targets, device=self.device), torch.cat(predicts).to(self.device), attention

    def _load(self) -> tuple[Decoder, Tokenizer]:
        assert self.cfg.model is not None
        tokenizer = tokenizer_of_model(self.cfg.model)
        return load_decoder(self.cfg.model, self.device, torch.float32), tokenizer

    def _draw(self, fresh: FreshModel) -> tuple[Decoder, Tokenizer]:
        folder = self.output_dir / "tokenizer"
        if distributed.rank() == 0:
            build_char_tokenizer(fresh.alphabet, folder, fresh.eos)
        distributed.barrier()
        tokenizer = Tokenizer(folder)
        if fresh.decoder.vocab_size != tokenizer.vocab_size:
            raise UserError(
                f"fresh.decoder.vocab_size: {fresh.decoder.vocab_size}, the alphabet has {tokenizer.vocab_size}"
            )
        model = Decoder(fresh.decoder)
        model.init_weights(self.cfg.seed, fresh.init)
        return model.to(self.device), tokenizer

    def cleanup(self) -> None:
        """Nothing is held."""


def ensure_warmup(config: str, model: Path) -> None:
    """Runs the sparrow_sft config, on all ranks together, unless its checkpoint `model` is there."""
    missing = distributed.gather_objects(not (model / "model.safetensors").is_file())[0]
    if not missing:
        return
    if model.name != "model":
        raise UserError(f"model: {model} must end in /model for the warm-up {config} to make it")
    if distributed.rank() == 0:
        print(f"warm-up  {model} is not there yet: running sparrow_sft with {config}", flush=True)
    recipe = SparrowSFT(replace(load_config(SFTConfig, config), output_dir=str(model.parent)))
    recipe.setup()
    recipe.train()


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowSFT, SFTConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
