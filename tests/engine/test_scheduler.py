from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.scheduler import Scheduler
from sparrow.errors import UserError

BLOCK = 4


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=6),
    num_samples=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    new_tokens=st.integers(1, 13),
    slack=st.integers(0, 12),
    data=st.data(),
)
def test_every_sample_runs_once_and_no_block_is_lost_or_shared_by_mistake(
    lengths, num_samples, num_rows, new_tokens, slack, data
):
    longest = max(lengths)
    blocks = -(-longest // BLOCK) + -(-(longest + new_tokens) // BLOCK) + slack
    allocator = BlockAllocator(blocks)
    prompts = [[0] * n for n in lengths]
    scheduler = Scheduler(prompts, num_samples, num_rows, new_tokens, allocator, BLOCK)
    running, seen, prefilled = {}, [], []
    while not scheduler.done:
        admitted = scheduler.admit()
        for a in admitted:
            seen.append((a.prompt.index, a.sample))
            if a.prefill:
                prefilled.append(a.prompt.index)
            assert 0 not in a.blocks, "the null block has no owner"
            assert len(a.blocks) * BLOCK >= len(a.prompt.tokens) + new_tokens - 1
            shared = len(a.prompt.tokens) // BLOCK
            assert a.row not in running
            for other, count in running.values():
                own = set(a.blocks[shared:])
                assert not own & set(other), "a block that is written belongs to one sequence"
                assert not set(other[count:]) & set(a.blocks)
            running[a.row] = (a.blocks, shared)
            assert (a.copy is None) == (len(a.prompt.tokens) % BLOCK == 0)
        assert running, "something always runs"
        row = data.draw(st.sampled_from(sorted(running)))
        del running[row]
        scheduler.finish(row)
    assert seen == [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
    assert prefilled == list(range(len(prompts))), "each prompt is prefilled once"
    scheduler.admit()
    assert allocator.num_free == blocks


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(UserError, match="kv_tokens"):
        Scheduler([[0] * 100], 1, 1, 100, BlockAllocator(10), BLOCK)


def test_double_release_is_a_bug():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(blocks)
