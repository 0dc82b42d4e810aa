"""Random lives of requests against a model of who owns what, and the rules of admission and preemption by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.scheduler import Scheduler
from sparrow.errors import UserError

BLOCK = 4


def ceil_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


class Driver:
    """Does what the engine does between two calls of the scheduler, and checks every state against the block tables.

    `held` is a model of the blocks of prompts whose samples are being admitted.
    """

    def __init__(self, lengths: list[int], num_samples: int, num_rows: int, limit: int, slack: int, steps: int) -> None:
        self.num_blocks = ceil_blocks(max(lengths) + limit) + ceil_blocks(max(lengths)) + slack
        self.allocator = BlockAllocator(self.num_blocks)
        self.scheduler = Scheduler([[0] * n for n in lengths], num_samples, num_rows, limit, self.allocator, BLOCK)
        self.limit, self.steps, self.num_samples = limit, steps, num_samples
        self.seen: list[tuple[int, int]] = []
        self.prefilled: list[int] = []
        self.waiting: list[tuple[int, int]] = []
        self.held: dict[int, list[int]] = {}
        self.operations: Counter[str] = Counter()

    def window(self) -> None:
        before = list(self.scheduler.active)
        _, preempted = self.scheduler.grow(self.steps)
        assert [p.request for p in preempted] == before[::-1][: len(preempted)], "the youngest give way"
        assert not before or before[0].is_active, "but never the oldest"
        for p in preempted:
            assert len(p.blocks) == ceil_blocks(p.request.total_length - 1)
            self.waiting.insert(0, (p.request.prompt.index, p.request.sample))
        admitted = Counter(prompt for prompt, _ in self.seen)
        self.held = {index: blocks for index, blocks in self.held.items() if admitted[index] < self.num_samples}
        self.check()
        self.admit()
        self.operations["grow"] += 1
        self.operations["preempt"] += len(preempted)

    def admit(self) -> None:
        for a in self.scheduler.admit(self.steps):
            request, tokens = a.request, len(a.request.prompt.tokens)
            key = (request.prompt.index, request.sample)
            self.operations["resume" if a.resumed else "admit"] += 1
            if a.resumed:
                assert key == self.waiting.pop(0), "the oldest is resumed first"
                continue
            assert not self.waiting, "no new sample overtakes a preempted one"
            self.seen.append(key)
            self.held[request.prompt.index] = request.prompt.blocks
            if a.prefill:
                self.prefilled.append(request.prompt.index)
            full = tokens // BLOCK
            assert request.blocks[:full] == request.prompt.blocks[:full]
            assert a.copy == ((request.prompt.blocks[full], request.blocks[full]) if tokens % BLOCK else None)
            request.response_length = 1
        self.check()
        assert self.scheduler.active or self.scheduler.done, "something always runs"
        for request in self.scheduler.active:
            last = len(request.prompt.tokens) + min(request.response_length + self.steps - 1, self.limit - 1)
            assert len(request.blocks) * BLOCK >= last, "the next window has its blocks"

    def step(self, rng: random.Random, ends: float) -> None:
        for request in tuple(self.scheduler.active):
            request.response_length = min(request.response_length + rng.randint(1, self.steps), self.limit)
            if request.response_length == self.limit or rng.random() < ends:
                self.scheduler.finish(request)
                self.operations["finish"] += 1
        self.check()

    def check(self) -> None:
        """No block is lost, and none has an owner too many: a block that is written has one."""
        owners: Counter[int] = Counter()
        for request in self.scheduler.active:
            owners.update(request.blocks)
            written = request.blocks[len(request.prompt.tokens) // BLOCK :]
            for other in self.scheduler.active:
                assert other is request or not set(written) & set(other.blocks)
            assert not any(set(written) & set(blocks) for blocks in self.held.values())
        for blocks in self.held.values():
            owners.update(blocks)
        assert 0 not in owners, "the null block has no owner"
        assert len(owners) + self.allocator.num_free == self.num_blocks
        assert all(self.allocator._references[block] == owners[block] for block in range(1, self.num_blocks + 1))
        rows = [request.row for request in self.scheduler.active]
        assert len(set(rows)) == len(rows)

    def run(self, rng: random.Random, ends: float) -> None:
        while not self.scheduler.done:
            self.window()
            self.step(rng, ends)
        self.scheduler.grow(1)
        assert self.allocator.num_free == self.num_blocks
        prompts = range(len(set(self.prefilled)))
        assert self.prefilled == list(prompts), "each prompt is prefilled once"
        assert self.seen == [(p, s) for p in prompts for s in range(self.num_samples)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 17), min_size=1, max_size=6),
    num_samples=st.integers(1, 4),
    num_rows=st.integers(1, 5),
    limit=st.integers(1, 30),
    slack=st.integers(0, 12),
    steps=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_every_sample_runs_once_and_every_block_has_its_owners(
    lengths, num_samples, num_rows, limit, slack, steps, seed
):
    driver = Driver(lengths, num_samples, num_rows, limit, slack, steps)
    driver.run(random.Random(seed), ends=seed % 3 / 10)


def test_ten_thousand_random_operations():
    rng, total = random.Random(0), Counter()
    while total.total() < 10_000 or total["preempt"] < 500:
        lengths = [rng.randint(1, 30) for _ in range(20)]
        driver = Driver(lengths, rng.randint(1, 8), 8, rng.choice((5, 20, 60)), rng.randint(0, 20), rng.choice((3, 7)))
        driver.run(rng, ends=rng.choice((0.0, 0.02, 0.2)))
        total += driver.operations
    assert total["admit"] == total["finish"] > 1000 and total["resume"] == total["preempt"]


def admitted(num_blocks: int, steps: int) -> int:
    """How many of nine prompts of one full block are admitted to an empty pool; responses of up to 36 tokens."""
    scheduler = Scheduler([[0] * BLOCK] * 9, 1, 9, 36, BlockAllocator(num_blocks), BLOCK)
    return len(scheduler.admit(steps))


def test_admission_sets_aside_what_is_expected_to_grow():
    # 18 tokens are expected, .6 of them are 10 and with the prompt 4 blocks; for one step a request gets 2. The third
    # needs 2 and sets aside 2 for each of three: 8, and the first two have left 8 of 12.
    assert admitted(12, steps=1) == 3
    assert admitted(11, steps=1) == 2


def test_admission_leaves_a_block_for_each_row():
    # For 13 steps a request gets 5 blocks, more than is expected. The fourth needs 5, and 3 for those before it.
    assert admitted(15 + 5 + 3, steps=13) == 4
    assert admitted(15 + 5 + 2, steps=13) == 3


@pytest.mark.parametrize(("length", "rows"), [(1, 5), (36, 2)])
def test_admission_learns_from_the_lengths_that_finished(length, rows):
    # The mean of 4 times 18 and 40 times `length` is 2.5 or 34.4; .6 of it and the prompt are 2 or 6 blocks.
    # With 2 no row grows, and the fifth needs 2 beside 4 free ones: 6 of 8. With 6, the second needs 2 + 2 * 4 of 14.
    scheduler = Scheduler([[0] * BLOCK] * 99, 1, 9, 36, BlockAllocator(16), BLOCK)
    for _ in range(40):
        scheduler.grow(1)
        scheduler.admit(1)
        scheduler.active[0].response_length = length
        scheduler.finish(scheduler.active[0])
    scheduler.grow(1)
    scheduler.admit(1)
    assert len(scheduler.active) == rows


def test_a_pool_too_small_for_one_sequence_is_refused():
    # 100 + 100 tokens are 50 blocks, the prompt beside it 25.
    with pytest.raises(UserError, match=r"kv_tokens: the pool has 296 tokens; .* needs 300"):
        Scheduler([[0] * 100], 1, 1, 100, BlockAllocator(74), BLOCK)
    Scheduler([[0] * 100], 1, 1, 100, BlockAllocator(75), BLOCK)


def test_double_release_is_a_bug():
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        allocator.release(blocks)


def test_a_prompt_is_claimed_when_there_is_room_for_it_and_not_before():
    claims = iter([2, 0])
    scheduler = Scheduler([[0]] * 3, 2, 2, 4, BlockAllocator(64), BLOCK, claim=lambda: next(claims, None))
    first = scheduler.admit(1)
    assert [(a.request.prompt.index, a.request.sample) for a in first] == [(2, 0), (2, 1)]
    assert scheduler.claimed == [2] and scheduler.admit(1) == [], "the next one is somebody else's to claim"
    for admission in first:
        scheduler.finish(admission.request)
    second = scheduler.admit(1)
    assert scheduler.claimed == [2, 0] and [a.request.prompt.index for a in second] == [0, 0]
    for admission in second:
        scheduler.finish(admission.request)
    assert scheduler.done and scheduler.claimed == [2, 0]
