"""Accounting and construction of the caches; their attention is tested in tests/attention."""

from __future__ import annotations

import pytest
import torch

from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, QuestSelector
from sparrow.errors import UserError


def test_what_is_read_by_hand():
    cache = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), page_size=16, dense_layers=2)
    lengths = torch.tensor([1, 64, 65, 160])
    assert cache.pages_read(lengths).tolist() == [1, 4, 4, 4]
    # 5 layers, 2 of them dense. 64 tokens are 4 pages: all are kept and nothing is scored. 65 are 5 pages: the sparse
    # layers read 64 tokens and 5 landmarks of half an entry. 160 are 10 pages: 64 and 10 halves.
    assert cache.tokens_read(lengths, 5).tolist() == [5, 5 * 64, 2 * 65 + 3 * 66.5, 2 * 160 + 3 * 69]
    quest = SparseKVCache(FixedBudget(pages=4), QuestSelector(), page_size=16, dense_layers=2)
    assert quest.tokens_read(lengths, 5)[3] == 2 * 160 + 3 * 74
    assert DenseKVCache().tokens_read(lengths, 5).tolist() == [5, 320, 325, 800]


def test_a_model_with_fewer_layers_than_dense_ones_is_dense():
    cache = SparseKVCache(FixedBudget(pages=4), CentroidSelector(), dense_layers=9)
    assert cache.tokens_read(torch.tensor([1000]), 5).item() == 5000


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"page_size": 24}, "block_size 128 must be a multiple of page_size 24"),
        ({"page_size": 0}, "page_size 0"),
        ({"recent_pages": 0}, "recent_pages 0"),
        ({"sink_pages": 2, "recent_pages": 3}, "4 pages at length 0 do not hold the 2 sink and 3"),
    ],
)
def test_impossible_settings_are_named(kwargs, words):
    with pytest.raises(UserError, match=words):
        SparseKVCache(FixedBudget(pages=4), CentroidSelector(), **kwargs)


def test_the_released_schedule_is_held_against_the_run():
    schedule = StepSchedule(path="qwen3-4b-0.86")
    assert SparseKVCache(schedule, CentroidSelector()).check("/models/Qwen3-4B", 1.0) == []
    with pytest.raises(UserError, match="selector is"):
        SparseKVCache(schedule, QuestSelector()).check("/models/Qwen3-4B", 1.0)
    allowed = StepSchedule(path="qwen3-4b-0.86", allow_foreign=True)
    assert len(SparseKVCache(allowed, QuestSelector(), page_size=32).check("/models/Qwen3-8B", 0.6)) == 4
