"""A decode step on done rows and padding: nothing of them changes, and nothing that is returned."""

from __future__ import annotations

import pytest
import torch

from sparrow.engine.decode import Drawing, decode_step
from sparrow.engine.philox import uniforms
from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.window import Window

LIMIT = 12


@pytest.fixture
def rows(model) -> Rows:
    """Rows 0 to 2 of prompts without a past: one block each, the prompt's keys are zeros."""
    window = Window(LIMIT, 4, 5, 32, torch.device("cpu"), torch.float32)
    rows = Rows(3, 2, LIMIT, window, torch.device("cpu"))
    for row in range(3):
        rows.start(row, [row + 1], 4, uniforms(0, row, 0, LIMIT), length=1, last_token=row + 5)
    return rows


def steps(model, cache, rows: Rows, which: list[int], count: int, eos: tuple[int, ...] = ()) -> None:
    cache.allocate(model.config, 3, torch.device("cpu"), torch.float32)
    eos_V = torch.zeros(23, dtype=torch.bool)
    eos_V[list(eos)] = True
    with torch.no_grad():
        for _ in range(count):
            decode_step(model, cache, rows, torch.tensor(which), 2, Drawing(SamplingParams(), eos_V, 5))


def state(rows: Rows, row: int) -> list:
    tensors = (rows.block_table_RN, rows.prompt_length_R, rows.response_length_R, rows.last_token_R, rows.done_R)
    return [x[row].tolist() for x in tensors]


def test_a_done_row_stays_as_it_is(exact_model, cache, rows):
    rows.done_R[1] = True
    before = state(rows, 1)
    steps(exact_model, cache("sparse"), rows, [0, 1, 2], 5)
    assert state(rows, 1) == before
    look = rows.look([1, 0])
    assert look.new_B.tolist() == [0, 5] and look.done_B.tolist() == [True, False]


def test_padding_changes_nothing(exact_model, cache, rows):
    null = rows.null_row
    before = state(rows, null)
    steps(exact_model, cache("sparse"), rows, [0, null, 2, null, null], 5)
    assert state(rows, null) == before
    padded = rows.look([0, 2])
    for row in (0, 2):
        rows.start(row, [row + 1], 4, uniforms(0, row, 0, LIMIT), length=1, last_token=row + 5)
    steps(exact_model, cache("sparse"), rows, [0, 2], 5)
    alone = rows.look([0, 2])
    for name, output in alone.outputs.items():
        assert torch.equal(output[:, :5], padded.outputs[name][:, :5]), name


def test_a_row_ends_at_its_limit_and_at_an_eos_token(model, cache, rows):
    steps(model, cache("dense"), rows, [0, 1, 2], 20)
    look = rows.look([0, 1, 2])
    assert look.length_B.tolist() == [LIMIT] * 3 and look.new_B.tolist() == [LIMIT - 1] * 3
    assert look.done_B.all() and not look.terminated_B.any()
    third = int(look.outputs["tokens"][0, 2])
    end = look.outputs["tokens"][0].tolist().index(third) + 1
    rows.start(0, [1], 4, uniforms(0, 0, 0, LIMIT), length=1, last_token=5)
    steps(model, cache("dense"), rows, [0], 20, eos=(third,))
    look = rows.look([0])
    assert look.new_B.tolist() == [end] and look.outputs["tokens"][0, end - 1] == third
    assert look.done_B.all() and look.terminated_B.all()


def test_a_look_begins_a_new_window(model, cache, rows):
    steps(model, cache("dense"), rows, [0, 1], 2)
    first = rows.look([0, 1])
    steps(model, cache("dense"), rows, [0, 1], 3)
    second = rows.look([0, 1])
    assert first.new_B.tolist() == [2, 2] and second.new_B.tolist() == [3, 3]
    assert second.start_length_B.tolist() == first.length_B.tolist()
