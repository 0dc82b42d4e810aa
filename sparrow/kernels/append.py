"""What a decode step leaves behind, in one kernel: outputs to the window, lengths, newest tokens, who is done.

The same as `sparrow.engine.rows.Rows.append`, which takes some thirty small kernels.

Axes: B rows of a step, R rows of the engine, W tokens of a window, K top-k set, V vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _append_kernel(
    rows, drawn, drawn_logprobs, drawn_ids, drawn_top, eos, tokens, logprobs, top_ids, top_logprobs, response_length,
    start_length, last_token, done, terminated, limit, num_rows, top_k, K: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row = tl.load(rows + b)
    was_done = tl.load(done + row) != 0
    length = tl.load(response_length + row)
    place = (length - tl.load(start_length + row)) * num_rows + row
    token = tl.load(drawn + b)
    k = tl.arange(0, K)
    tl.store(tokens + place, token)
    tl.store(logprobs + place, tl.load(drawn_logprobs + b))
    tl.store(top_ids + place * top_k + k, tl.load(drawn_ids + b * top_k + k, mask=k < top_k), mask=k < top_k)
    tl.store(top_logprobs + place * top_k + k, tl.load(drawn_top + b * top_k + k, mask=k < top_k), mask=k < top_k)
    if not was_done:
        ended = tl.load(eos + token) != 0
        tl.store(response_length + row, length + 1)
        tl.store(last_token + row, token)
        tl.store(terminated + row, ended)
        tl.store(done + row, ended | (length + 1 == tl.load(limit + row)))


def append(
    rows_B: Tensor, drawn: tuple[Tensor, Tensor, Tensor, Tensor], eos_V: Tensor,
    window: tuple[Tensor, Tensor, Tensor, Tensor], response_length_R: Tensor, start_length_R: Tensor,
    last_token_R: Tensor, done_R: Tensor, terminated_R: Tensor, limit_R: Tensor,
) -> None:  # fmt: skip
    """Adds one token to each row that is not done.

    Args:
        rows_B: rows to step; one may stand in it more than once if it is done.
        drawn: tokens [B], log-probs [B], top-K ids [B, K] int32 and log-probs [B, K].
        window: the same, [W, R] and [W, R, K].
        limit_R: tokens of each response at the most.
    """
    top_k = drawn[2].shape[1]
    _append_kernel[(len(rows_B),)](
        rows_B, *drawn, eos_V, *window, response_length_R, start_length_R, last_token_R, done_R, terminated_R,
        limit_R, len(done_R), top_k, triton.next_power_of_2(top_k), num_warps=1,
    )  # fmt: skip
