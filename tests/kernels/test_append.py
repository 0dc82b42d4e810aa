"""What a step leaves behind, by one kernel and by `Rows.append`.

Axes: B rows of a step, K top-k set, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.engine.rows import Rows
from sparrow.engine.sampler import Sample
from sparrow.engine.window import Window
from sparrow.kernels.append import append

pytestmark = pytest.mark.gpu

NUM_ROWS, LIMIT, TOP_K, VOCAB, WINDOW = 6, 5, 5, 50, 6
EOS = 7
LENGTHS = [0, 1, 2, 3, 4, LIMIT]  # the fifth reaches the limit with its next token, the last has; the second's is 3
STATE = ("response_length_R", "start_length_R", "last_token_R", "done_R", "terminated_R")


def rows_of(device: torch.device) -> Rows:
    rows = Rows(NUM_ROWS, 2, LIMIT, Window(WINDOW, NUM_ROWS + 1, TOP_K, 0, device, torch.float32), device)
    for row, length in enumerate(LENGTHS):
        limit = 3 if row == 1 else None
        rows.start(row, [row + 1], 4, torch.zeros(LIMIT, dtype=torch.float64), length, last_token=row + 20, limit=limit)
    rows.done_R[[2, 5]] = True
    rows.terminated_R[2] = True
    return rows


def sampled(count: int, randn) -> Sample:
    ids_BK = randn(count, VOCAB).topk(TOP_K).indices.int()
    return Sample(ids_BK[:, 0].long(), randn(count), ids_BK, randn(count, TOP_K))


def append_by_kernel(rows: Rows, rows_B: torch.Tensor, drawn: Sample, eos_V: torch.Tensor) -> None:
    window = rows.window
    append(
        rows_B, (drawn.tokens_B, drawn.logprobs_B, drawn.top_ids_BK, drawn.top_logprobs_BK), eos_V,
        (window.tokens_WR, window.logprobs_WR, window.top_ids_WRK, window.top_logprobs_WRK), rows.response_length_R,
        rows.start_length_R, rows.last_token_R, rows.done_R, rows.terminated_R, rows.limit_R,
    )  # fmt: skip


def test_rows_and_window_are_those_of_rows_append(device, randn):
    """Steps over changing rows, done ones and padding among them; one of them draws the EOS token."""
    ours, theirs = rows_of(device), rows_of(device)
    null = ours.null_row
    eos_V = torch.zeros(VOCAB, dtype=torch.bool, device=device)
    eos_V[EOS] = True
    for step, which in enumerate(([0, 1, 2, 3, 4, 5], [3, 0, null, null], [5, 4, 1, 0], [0, 1])):
        rows_B, drawn = torch.tensor(which, device=device), sampled(len(which), randn)
        if step == 1:
            drawn.tokens_B[0] = EOS
        append_by_kernel(ours, rows_B, drawn, eos_V)
        theirs.append(rows_B, drawn, torch.empty(len(which), 0, device=device), eos_V[drawn.tokens_B])
        for name in STATE:
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (step, name)
    assert ours.response_length_R.tolist() == [4, 3, 2, 5, 5, 5, 0]
    assert ours.terminated_R.tolist() == [False, False, True, True, False, False, False]
    looks = [rows.look(list(range(NUM_ROWS))) for rows in (ours, theirs)]
    for name in ("tokens", "logprobs", "top_ids", "top_logprobs"):
        assert torch.equal(looks[0].outputs[name], looks[1].outputs[name]), name
    assert looks[0].new_B.tolist() == [4, 2, 0, 2, 1, 0]
