"""The state of the rows of a decode batch, as tensors that a step indexes by row.

Axes: R rows, B the active ones of a step, L longest response, N blocks per row, K top-k set, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.engine.sampler import Sample


class Rows:
    """Block tables, lengths and outputs of R rows.

    Args:
        hidden_size: E, where final hidden states are kept; 0 keeps none.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, max_new_tokens: int, top_k: int, hidden_size: int, device: torch.device,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self.block_table_RN = zeros(max_blocks)
        self.prompt_length_R = zeros()
        self.response_length_R = zeros()
        self.uniforms_RL = zeros(max_new_tokens, dtype=torch.float64)
        self.tokens_RL = zeros(max_new_tokens)
        self.logprobs_RL = zeros(max_new_tokens, dtype=torch.float32)
        self.top_ids_RLK = zeros(max_new_tokens, top_k)
        self.top_logprobs_RLK = zeros(max_new_tokens, top_k, dtype=torch.float32)
        self.hidden_RLE = zeros(max_new_tokens, hidden_size, dtype=dtype)

    def start(self, row: int, blocks: list[int], prompt_length: int, uniforms_L: Tensor) -> None:
        """Gives the row to a new sequence."""
        self.block_table_RN[row] = 0
        self.block_table_RN[row, : len(blocks)] = torch.tensor(blocks, device=self.block_table_RN.device)
        self.prompt_length_R[row] = prompt_length
        self.response_length_R[row] = 0
        self.uniforms_RL[row] = uniforms_L.to(self.uniforms_RL.device)

    def append(self, rows_B: Tensor, sample: Sample, hidden_BE: Tensor) -> None:
        """Adds one token to each row."""
        at = (rows_B, self.response_length_R[rows_B])
        self.tokens_RL[at] = sample.tokens_B
        self.logprobs_RL[at] = sample.logprobs_B
        self.top_ids_RLK[at] = sample.top_ids_BK
        self.top_logprobs_RLK[at] = sample.top_logprobs_BK
        if self.hidden_RLE.shape[-1]:
            self.hidden_RLE[at] = hidden_BE
        self.response_length_R[rows_B] += 1

    def last_tokens(self, rows_B: Tensor) -> Tensor:
        """The newest token of each row, [B]."""
        return self.tokens_RL[rows_B, self.response_length_R[rows_B] - 1]

    def cached_lengths(self, rows_B: Tensor) -> Tensor:
        """Tokens in the cache once the newest one is written, [B]."""
        return self.prompt_length_R[rows_B] + self.response_length_R[rows_B]

    def next_uniforms(self, rows_B: Tensor) -> Tensor:
        """The random number of each row's next token, fp64 [B]."""
        return self.uniforms_RL[rows_B, self.response_length_R[rows_B]]
