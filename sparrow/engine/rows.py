"""The state of the rows of a decode batch, on the device: a step reads and writes it without the host.

Axes: R rows, the null row among them, B the rows of a step, N blocks per row, L longest response.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.attention.pool import NULL_BLOCK
from sparrow.engine.sampler import Sample
from sparrow.engine.window import Look, Window
from sparrow.transfer import to_host


class Rows:
    """Block tables, lengths and newest tokens of `num_rows` rows, and of the null row behind them.

    The null row pads a batch to a fixed size: it is done, one token long, and that token is in the null block. A row
    that is done stays as it is, however often it is stepped, so tokens past a stop are never made.

    Args:
        max_blocks: N, of the longest prompt with the longest response.
        max_new_tokens: L; a row may be given a lower limit of its own.
        window: where a step leaves its outputs; made for the same rows.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, max_new_tokens: int, window: Window, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_rows + 1, *shape, dtype=dtype, device=device)

        self.null_row, self.max_new_tokens, self.window, self.device = num_rows, max_new_tokens, window, device
        self.block_table_RN = zeros(max_blocks)
        self.prompt_length_R = zeros()
        self.response_length_R = zeros()
        self.start_length_R = zeros()  # response length at the last look
        self.limit_R = zeros() + max_new_tokens
        self.last_token_R = zeros()
        self.done_R = zeros(dtype=torch.bool)
        self.terminated_R = zeros(dtype=torch.bool)
        self.uniforms_RL = zeros(max_new_tokens, dtype=torch.float64)
        self.prompt_length_R[self.null_row] = 1
        self.done_R[self.null_row] = True

    def start(
        self,
        row: int,
        blocks: list[int],
        prompt_length: int,
        uniforms_L: Tensor,
        length: int = 0,
        last_token: int = 0,
        limit: int | None = None,
    ) -> None:
        """Gives the row to a sequence: a new one, or one of `length` response tokens that was preempted.

        Args:
            limit: its longest response; `max_new_tokens` by default.
        """
        self.set_blocks({row: blocks})
        self.prompt_length_R[row] = prompt_length
        self.response_length_R[row] = self.start_length_R[row] = length
        self.last_token_R[row] = last_token
        self.limit_R[row] = self.max_new_tokens if limit is None else limit
        self.done_R[row] = self.terminated_R[row] = False
        self.uniforms_RL[row] = uniforms_L.to(self.device)

    def set_blocks(self, blocks_by_row: dict[int, list[int]]) -> None:
        """Replaces the block tables of some rows, in one copy to the device."""
        width = self.block_table_RN.shape[1]
        tables = [blocks + [NULL_BLOCK] * (width - len(blocks)) for blocks in blocks_by_row.values()]
        rows_B = torch.tensor(list(blocks_by_row), device=self.device)
        self.block_table_RN[rows_B] = torch.tensor(tables, device=self.device)

    def cached_lengths(self, rows_B: Tensor) -> Tensor:
        """Tokens in the cache once the newest one is written, [B]."""
        return self.prompt_length_R[rows_B] + self.response_length_R[rows_B]

    def next_uniforms(self, rows_B: Tensor) -> Tensor:
        """The random number of each row's next token, fp64 [B]."""
        # A row that is full has no next token; it gets a number that nobody uses.
        return self.uniforms_RL[rows_B, self.response_length_R[rows_B].clamp(max=self.max_new_tokens - 1)]

    def append(self, rows_B: Tensor, drawn: Sample, hidden_BE: Tensor, ended_B: Tensor) -> None:
        """Adds one token to each row that is not done; `ended_B` says which tokens are of the EOS set."""
        done_B, length_B = self.done_R[rows_B], self.response_length_R[rows_B]
        # Of a done row this is the first place past its tokens, which no look counts.
        self.window.write(length_B - self.start_length_R[rows_B], rows_B, drawn, hidden_BE)
        length_B = torch.where(done_B, length_B, length_B + 1)
        self.response_length_R[rows_B] = length_B
        self.last_token_R[rows_B] = torch.where(done_B, self.last_token_R[rows_B], drawn.tokens_B)
        self.terminated_R[rows_B] |= ended_B & ~done_B
        self.done_R[rows_B] = done_B | ended_B | (length_B == self.limit_R[rows_B])

    def look(self, rows: list[int]) -> Look:
        """Brings what these rows gained to the host, with one wait, and begins their next window."""
        rows_B = torch.tensor(rows, device=self.device)
        outputs = self.window.outputs(rows_B)
        state = (self.start_length_R, self.response_length_R, self.done_R, self.terminated_R)
        host = to_host([*outputs.values(), *(x[rows_B] for x in state)])
        self.start_length_R[rows_B] = self.response_length_R[rows_B]
        return Look(dict(zip(outputs, host, strict=False)), *host[len(outputs) :])
