from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.attention.select import candidate_pages, physical_pages, select_pages


@given(
    num_pages=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    budget=st.integers(3, 20),
    seed=st.integers(0, 1000),
)
def test_lists_hold_the_reserved_pages_and_the_best_of_the_rest(num_pages, budget, seed):
    width = max(num_pages)
    scores = torch.randn(len(num_pages), 2, width, generator=torch.Generator().manual_seed(seed))
    pages_B = torch.tensor(num_pages)
    candidates = candidate_pages(pages_B, width, sink_pages=1, recent_pages=2)
    budget_B = torch.full_like(pages_B, budget)
    lists, counts = select_pages(scores, candidates, pages_B, budget_B, min(width, budget))
    for row, total in enumerate(num_pages):
        count = int(counts[row])
        assert count == min(total, budget)
        for head in range(2):
            kept = lists[row, head, :count].tolist()
            assert kept == sorted(set(kept)), "in order of position, none twice"
            reserved = {0, total - 1, max(total - 2, 0)}
            assert reserved <= set(kept)
            rest = sorted(range(1, total - 2), key=scores[row, head].tolist().__getitem__, reverse=True)
            assert set(kept) == reserved | set(rest[: count - len(reserved)])


def test_physical_pages_go_through_the_block_table():
    table = torch.tensor([[5, 2], [1, 9]])
    pages = torch.tensor([[[0, 3, 4]], [[1, 6, 7]]])
    # 4 pages a block: page 4 of row 0 is page 0 of its second block, 2 * 4 + 0.
    assert physical_pages(pages, table, 4).tolist() == [[[20, 23, 8]], [[5, 38, 39]]]
