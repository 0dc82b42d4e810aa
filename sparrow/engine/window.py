"""What the steps between two looks of the host produce, on the device, and what a look brings to the host.

Axes: W tokens a row can gain between two looks, R rows, B the rows of a step or a look, K top-k set, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.engine.sampler import Sample


@dataclass
class Look:
    """What B rows gained since the look before, on the CPU.

    Attributes:
        outputs: `tokens` [B, W], `logprobs` [B, W], `top_ids` [B, W, K], `top_logprobs` [B, W, K] and `hidden`
            [B, W, E]; of each row the first `new_B` entries count.
        start_length_B, length_B: response lengths then and now.
        done_B: the row ended, by an EOS token where `terminated_B`.
    """

    outputs: dict[str, Tensor]
    start_length_B: Tensor
    length_B: Tensor
    done_B: Tensor
    terminated_B: Tensor

    @property
    def new_B(self) -> Tensor:
        return self.length_B - self.start_length_B


class Window:
    """Buffers of W tokens per row, so that outputs on the device do not grow with the length of the responses.

    Args:
        width: W.
        hidden_size: E, where final hidden states are kept; 0 keeps none.
    """

    def __init__(
        self, width: int, num_rows: int, top_k: int, hidden_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(width, num_rows, *shape, dtype=dtype, device=device)

        self.tokens_WR = zeros(dtype=torch.int64)
        self.logprobs_WR = zeros(dtype=torch.float32)
        self.top_ids_WRK = zeros(top_k, dtype=torch.int32)
        self.top_logprobs_WRK = zeros(top_k, dtype=torch.float32)
        self.hidden_WRE = zeros(hidden_size, dtype=dtype)

    def write(self, at_B: Tensor, rows_B: Tensor, drawn: Sample, hidden_BE: Tensor) -> None:
        """Stores one token of each row at its place in the window."""
        at = (at_B, rows_B)
        self.tokens_WR[at] = drawn.tokens_B
        self.logprobs_WR[at] = drawn.logprobs_B
        self.top_ids_WRK[at] = drawn.top_ids_BK.int()
        self.top_logprobs_WRK[at] = drawn.top_logprobs_BK
        if self.hidden_WRE.shape[-1]:
            self.hidden_WRE[at] = hidden_BE

    def outputs(self, rows_B: Tensor) -> dict[str, Tensor]:
        """Copies of the outputs of some rows, [B, W, ...], still on the device."""
        buffers = {
            "tokens": self.tokens_WR,
            "logprobs": self.logprobs_WR,
            "top_ids": self.top_ids_WRK,
            "top_logprobs": self.top_logprobs_WRK,
            "hidden": self.hidden_WRE,
        }
        return {name: buffer.index_select(1, rows_B).transpose(0, 1) for name, buffer in buffers.items()}
