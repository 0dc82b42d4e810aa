"""Which batches and contexts get a graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparrow.engine.graphs import SHORTEST_CONTEXT, batch_buckets, context_buckets, graph_buckets


def test_buckets_by_hand():
    assert batch_buckets(1) == [1] and batch_buckets(3) == [1, 2, 4] and batch_buckets(20) == [1, 2, 4, 8, 12, 16, 20]
    assert batch_buckets(90)[6:] == [20, 24, 32, 40, 48, 56, 64, 80, 96]
    assert context_buckets(290, 128) == [64, 128, 290]  # 256 would be too near to be worth a graph
    assert context_buckets(64, 128) == [64] and context_buckets(3, 128) == [3]
    assert graph_buckets(2, 100, 128) == [(1, 64), (1, 100), (2, 64), (2, 100)]


@given(st.integers(1, 2000))
def test_a_batch_is_padded_by_a_third_at_the_most(num_rows):
    buckets = batch_buckets(num_rows)
    assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] >= num_rows
    assert all(bucket < num_rows for bucket in buckets[:-1]), "none that no batch needs"
    for rows in range(1, num_rows + 1):
        bucket = min(b for b in buckets if b >= rows)
        assert bucket - rows < max(4, rows / 3)


@given(max_blocks=st.integers(1, 5000), block_size=st.sampled_from([16, 128, 16384]))
def test_a_context_is_padded_to_less_than_three_times_its_blocks(max_blocks, block_size):
    buckets = context_buckets(max_blocks, block_size)
    assert buckets == sorted(set(buckets)) and buckets[-1] == max_blocks
    for blocks in {1, max_blocks // 3 + 1, max_blocks // 2 + 1, max_blocks}:
        width = min(n for n in buckets if n >= blocks)
        assert 3 * width < 8 * blocks or 3 * width * block_size <= 4 * SHORTEST_CONTEXT
