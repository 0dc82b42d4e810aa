"""Continuous batching without reservation: samples get rows and blocks as they come free, in order, and grow block by
block; when the pool runs dry the youngest gives way.

A prompt is prefilled once, into blocks held until its last sample is admitted; each sample shares the full ones and
copies the partial last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparrow.engine.blocks import BlockAllocator
from sparrow.errors import UserError

# Share of the growth up to the expected length that admission sets blocks aside for. Rows grow at different times and
# some have ended before others need the memory: 1 leaves rows empty, 0 preempts more than it gains.
GROWTH_SHARE = 0.6
# Until responses have finished, their mean length is taken to be half the limit, as if this many had been seen.
PRIOR_SEQUENCES = 4


@dataclass
class Prompt:
    """A prompt, and while its samples are being admitted, the blocks of its prefill."""

    index: int
    tokens: list[int]
    waiting: int
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """One sample of a prompt.

    Attributes:
        row, blocks: of the batch and of the pool, while it is active.
        response_length: tokens sampled so far; the caller counts them.
        limit: longest response.
    """

    prompt: Prompt
    sample: int
    limit: int
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    response_length: int = 0

    @property
    def is_active(self) -> bool:
        return self.row >= 0

    @property
    def total_length(self) -> int:
        """Prompt and response."""
        return len(self.prompt.tokens) + self.response_length


@dataclass
class Admission:
    """A request that was given a row and blocks.

    Attributes:
        prefill: the prompt's blocks hold nothing yet.
        copy: block to copy and where to, for a prompt that ends within a block.
        resumed: it was preempted before; its blocks wait for what was saved of it.
    """

    request: Request
    prefill: bool = False
    copy: tuple[int, int] | None = None
    resumed: bool = False


@dataclass
class Preemption:
    """A request that lost its row; `blocks` held its tokens, and still do until something is written to the pool."""

    request: Request
    row: int
    blocks: list[int]


class Scheduler:
    """Admits first come, first served; `active` is in order of admission.

    It cannot deadlock: the oldest request is never preempted, and a pool that the constructor accepts holds it at its
    longest, beside the one prompt whose samples are being admitted.

    Args:
        prompts: token ids, one list each.
        num_samples: samples per prompt.
        num_rows: rows of the batch.
        max_new_tokens: longest response.
        limits: the same of each sequence, prompt-major, none above `max_new_tokens`. A request does not grow past its
            own; what admission expects of it does not follow from it.
        claim: called for the index of the next prompt when there is room for it; None says that there is none left.
            All of them, in order, by default.

    Attributes:
        claimed: indices of the prompts taken so far.

    Raises:
        UserError: the pool is too small for one sequence.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        num_rows: int,
        max_new_tokens: int,
        allocator: BlockAllocator,
        block_size: int,
        limits: Sequence[int] | None = None,
        claim: Callable[[], int | None] | None = None,
    ) -> None:
        self.allocator, self.block_size = allocator, block_size
        self.num_samples, self.num_rows = num_samples, num_rows
        self._limits = [max_new_tokens] * (len(prompts) * num_samples) if limits is None else limits
        self.active: list[Request] = []
        self._preempted: deque[Request] = deque()
        self.prompts, self.claimed = prompts, list[int]()
        in_order = iter(range(len(prompts)))
        self._claim = claim or (lambda: next(in_order, None))
        self._prompt: Prompt | None = None  # whose samples are being admitted
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._retired: list[int] = []
        self._finished = PRIOR_SEQUENCES
        self._finished_tokens = PRIOR_SEQUENCES * max_new_tokens / 2
        longest = max(map(len, prompts))
        need = self._blocks(longest + max_new_tokens) + self._blocks(longest)
        if need > allocator.num_blocks:
            raise UserError(
                f"engine.kv_tokens: the pool has {allocator.num_blocks * block_size} tokens; a prompt of {longest} "
                f"with max_new_tokens {max_new_tokens} needs {need * block_size}"
            )

    @property
    def done(self) -> bool:
        return not (self._preempted or self.active or self._next_prompt())

    def grow(self, steps: int) -> tuple[list[Request], list[Preemption]]:
        """Gives every active request the blocks for its next `steps` tokens, the oldest first.

        Where the pool runs dry, the youngest gives way and waits before all that are younger still.

        Returns:
            The requests whose block tables got longer, and those that were preempted: the caller saves their blocks
            before it writes to the pool.
        """
        self._release_retired()
        grown, preempted = [], []
        for request in tuple(self.active):
            need = self._blocks(self._cached_after(request, steps)) - len(request.blocks)
            while request.is_active and need > self.allocator.num_free:
                preempted.append(self._preempt())
            if not request.is_active:  # It gave way, and all that are younger did before.
                break
            if need > 0:
                request.blocks += self.allocator.allocate(need)
                grown.append(request)
        return grown, preempted

    def admit(self, steps: int) -> list[Admission]:
        """Gives free rows, and blocks for `steps` tokens, to the preempted requests, then to the prompts' samples.

        By the next call of `grow` the caller has prefilled and copied what this one asked for.
        """
        admitted: list[Admission] = []
        while self._free_rows and (admission := self._admit_preempted(steps) or self._admit_sample(steps)):
            admission.request.row = self._free_rows.pop()
            self.active.append(admission.request)
            admitted.append(admission)
        return admitted

    def finish(self, request: Request) -> None:
        """Takes back the row and the blocks of a request that ended."""
        self._finished += 1
        self._finished_tokens += request.response_length
        self._deactivate(request)

    def _preempt(self) -> Preemption:
        assert len(self.active) > 1, "the pool holds any one request"
        request = self.active[-1]
        # The newest token is not in the cache yet.
        preemption = Preemption(request, request.row, request.blocks[: self._blocks(request.total_length - 1)])
        self._deactivate(request)
        self._preempted.appendleft(request)  # It is older than those that gave way before it.
        return preemption

    def _deactivate(self, request: Request) -> None:
        self.active.remove(request)
        self.allocator.release(request.blocks)
        self._free_rows.append(request.row)
        request.row, request.blocks = -1, []

    def _admit_preempted(self, steps: int) -> Admission | None:
        if not self._preempted:
            return None
        request = self._preempted[0]
        need = self._blocks(self._cached_after(request, steps))
        if not self._fits(request, need, need):
            return None
        request.blocks = self.allocator.allocate(need)
        return Admission(self._preempted.popleft(), resumed=True)

    def _admit_sample(self, steps: int) -> Admission | None:
        if self._preempted or (prompt := self._next_prompt()) is None:
            return None
        sample = self.num_samples - prompt.waiting
        request = Request(prompt, sample, self._limits[prompt.index * self.num_samples + sample])
        prefill = not prompt.blocks
        full = len(prompt.tokens) // self.block_size
        total = self._blocks(self._cached_after(request, steps))
        own = total - full
        if not self._fits(request, total, own + (self._blocks(len(prompt.tokens)) if prefill else 0)):
            return None
        if prefill:
            prompt.blocks = self.allocator.allocate(self._blocks(len(prompt.tokens)))
        request.blocks = self.allocator.share(prompt.blocks[:full]) + self.allocator.allocate(own)
        copy = (prompt.blocks[full], request.blocks[full]) if len(prompt.blocks) > full else None
        prompt.waiting -= 1
        if prompt.waiting == 0:
            # Its blocks are still to be filled and copied from, so they are not free yet.
            self._retired += prompt.blocks
            self._prompt = None
        return Admission(request, prefill, copy)

    def _next_prompt(self) -> Prompt | None:
        """The prompt whose samples are next; claimed only now, because what one process claims no other can take."""
        if self._prompt is None and (index := self._claim()) is not None:
            self._prompt = Prompt(index, self.prompts[index], self.num_samples)
            self.claimed.append(index)
        return self._prompt

    def _fits(self, request: Request, total: int, need: int) -> bool:
        """Whether a request that takes `need` free blocks, to have `total`, leaves enough for growth.

        Preempting costs two copies of a whole sequence, so it is to be rare. Set aside are a block for each active
        row, or if that is more, `GROWTH_SHARE` of what all still grow up to the mean length of those that finished.
        """
        if not self.active:
            return True
        expected = self._finished_tokens / self._finished
        growth = sum(self._growth(other, len(other.blocks), expected) for other in self.active)
        growth += self._growth(request, total, expected)
        return need + max(growth, len(self.active)) <= self.allocator.num_free

    def _growth(self, request: Request, blocks: int, expected: float) -> int:
        """Blocks to set aside for a request that has `blocks`."""
        tokens = request.total_length + GROWTH_SHARE * max(expected - request.response_length, 0)
        return max(self._blocks(int(tokens)) - blocks, 0)

    def _release_retired(self) -> None:
        self.allocator.release(self._retired)
        self._retired = []

    def _cached_after(self, request: Request, steps: int) -> int:
        """Tokens in the cache after `steps` more; the first comes from the prefill, the last is never written."""
        response = max(request.response_length, 1)
        return len(request.prompt.tokens) + min(response + steps - 1, request.limit - 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
