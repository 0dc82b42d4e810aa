"""The end of a decode step on CUDA in three kernels: what `sample` and `Rows.append` do in some sixty.

Axes: B rows of a step, V vocabulary, E hidden size.
"""

from __future__ import annotations

from torch import Tensor

from sparrow.engine.decode import Drawing
from sparrow.engine.rows import Rows
from sparrow.kernels.append import append
from sparrow.kernels.draw import draw


def append_drawn_fused(
    logits_BV: Tensor, uniform_B: Tensor, rows: Rows, rows_B: Tensor, hidden_BE: Tensor, drawing: Drawing
) -> None:
    """Draws a token for each row from the whole distribution and adds it, where the row is not done."""
    window = rows.window
    if window.hidden_WRE.shape[-1]:
        at_B = rows.response_length_R[rows_B] - rows.start_length_R[rows_B]
        window.hidden_WRE[at_B, rows_B] = hidden_BE
    append(
        rows_B,
        draw(logits_BV, uniform_B, drawing.sampling.temperature, drawing.top_k),
        drawing.eos_V,
        (window.tokens_WR, window.logprobs_WR, window.top_ids_WRK, window.top_logprobs_WRK),
        rows.response_length_R,
        rows.start_length_R,
        rows.last_token_R,
        rows.done_R,
        rows.terminated_R,
        rows.limit_R,
    )
