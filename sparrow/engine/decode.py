"""One decode step, made of device operations only, and who repeats it.

Axes: T packed tokens, B rows of a step, N blocks of the longest of them, E hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams, sample
from sparrow.protocols import Attention, KVCache


class RolloutModel(Protocol):
    """All that the engine asks of a model: the trainer's own on the CPU, a packed copy of its weights elsewhere."""

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, /) -> Tensor:
        """Final hidden states [T, E]."""
        ...

    def logits(self, hidden_NE: Tensor, /) -> Tensor:
        """fp32 logits [N, V]."""
        ...


@dataclass(frozen=True, eq=False)
class Drawing:
    """How tokens are drawn, the same for all steps of a `generate` call.

    Attributes:
        eos_V: True for the tokens that end a response.
        top_k: size of the top-k set that is returned.
    """

    sampling: SamplingParams
    eos_V: Tensor
    top_k: int


class Stepper(Protocol):
    """Takes the steps between two looks of the host."""

    def run(self, rows: list[int], longest: int, steps: int) -> None:
        """`steps` tokens for each of the rows.

        Args:
            longest: cached tokens of the longest row in the last step; no step needs a wider block table.
        """
        ...


def decode_step(
    model: RolloutModel, cache: KVCache, rows: Rows, rows_B: Tensor, num_blocks: int, drawing: Drawing
) -> None:
    """One token for each row of `rows_B` that is not done.

    Nothing reaches the host and no shape depends on data: a CUDA graph can hold it, with a cache of that kind.

    Args:
        rows_B: rows to step; the null row may stand in it any number of times.
        num_blocks: N, blocks of each row to look at; no row may be longer.
    """
    lengths_B = rows.cached_lengths(rows_B)
    attention = cache.decode(rows.block_table_RN[rows_B, :num_blocks], lengths_B)
    hidden_BE = model(rows.last_token_R[rows_B], lengths_B - 1, attention)
    append_drawn(model, rows, rows_B, hidden_BE, drawing)


def append_drawn(model: RolloutModel, rows: Rows, rows_B: Tensor, hidden_BE: Tensor, drawing: Drawing) -> None:
    """Draws each row's next token from its final hidden state."""
    logits_BV, uniform_B = model.logits(hidden_BE), rows.next_uniforms(rows_B)
    if logits_BV.is_cuda and not drawing.sampling.truncates:
        from sparrow.engine.fused import append_drawn_fused  # Triton is not installed where there is no GPU

        append_drawn_fused(logits_BV, uniform_B, rows, rows_B, hidden_BE, drawing)
    else:
        drawn = sample(logits_BV, uniform_B, drawing.sampling, drawing.top_k)
        rows.append(rows_B, drawn, hidden_BE, drawing.eos_V[drawn.tokens_B])


class EagerStepper:
    """Runs `decode_step` as it stands, on any device."""

    def __init__(self, model: RolloutModel, cache: KVCache, rows: Rows, drawing: Drawing) -> None:
        self.model, self.cache, self.rows, self.drawing = model, cache, rows, drawing

    def run(self, rows: list[int], longest: int, steps: int) -> None:
        """See `Stepper`."""
        rows_B = torch.tensor(rows, device=self.rows.device)
        num_blocks = -(-longest // self.cache.block_size)
        for _ in range(steps):
            decode_step(self.model, self.cache, self.rows, rows_B, num_blocks, self.drawing)
