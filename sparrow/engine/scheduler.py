"""Continuous batching: a queue of prompts x samples, admitted to rows as rows and blocks come free, in order.

A prompt is prefilled once, into blocks held until its last sample is admitted; each sample shares the full ones and
copies the partial last one. A sequence is admitted with the blocks of its longest possible response, so that a running
one never waits for memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sparrow.engine.blocks import BlockAllocator
from sparrow.errors import UserError


@dataclass
class Prompt:
    """A prompt, and while its samples are being admitted, the blocks of its prefill."""

    index: int
    tokens: list[int]
    waiting: int
    blocks: list[int] = field(default_factory=list)


@dataclass
class Admission:
    """A sample that was given a row.

    Attributes:
        row: of the batch.
        prompt, sample: what it answers.
        blocks: its block table.
        prefill: the prompt's blocks hold nothing yet.
        copy: block to copy and where to, for a prompt that ends within a block.
    """

    row: int
    prompt: Prompt
    sample: int
    blocks: list[int]
    prefill: bool
    copy: tuple[int, int] | None


class Scheduler:
    """Admits samples first come, first served.

    Args:
        prompts: token ids, one list each.
        num_samples: samples per prompt.
        num_rows: rows of the batch.
        max_new_tokens: longest response.
    """

    def __init__(
        self,
        prompts: list[list[int]],
        num_samples: int,
        num_rows: int,
        max_new_tokens: int,
        allocator: BlockAllocator,
        block_size: int,
    ) -> None:
        self.allocator, self.block_size, self.max_new_tokens = allocator, block_size, max_new_tokens
        self.num_samples = num_samples
        self._queue = deque(Prompt(i, tokens, num_samples) for i, tokens in enumerate(prompts))
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._blocks_of_row: dict[int, list[int]] = {}
        self._retired: list[int] = []
        longest = max(self._queue, key=lambda prompt: len(prompt.tokens))
        need = self._prompt_blocks(longest) + self._own_blocks(longest)
        if need > allocator.num_blocks:
            raise UserError(
                f"engine.kv_tokens: the pool has {allocator.num_blocks * block_size} tokens; a prompt of "
                f"{len(longest.tokens)} with max_new_tokens {max_new_tokens} needs {need * block_size}"
            )

    @property
    def done(self) -> bool:
        return not self._queue and not self._blocks_of_row

    def admit(self) -> list[Admission]:
        """Gives free rows and blocks to the samples at the head of the queue.

        By the next call the caller has prefilled and copied what this one asked for.
        """
        self.allocator.release(self._retired)
        self._retired = []
        admitted = []
        while self._queue and self._free_rows:
            prompt = self._queue[0]
            prefill = not prompt.blocks
            need = self._own_blocks(prompt) + (self._prompt_blocks(prompt) if prefill else 0)
            if need > self.allocator.num_free:
                break
            admitted.append(self._place(prompt, prefill))
            if prompt.waiting == 0:
                # Its blocks are still to be filled and copied from, so they are not free yet.
                self._retired += prompt.blocks
                self._queue.popleft()
        return admitted

    def finish(self, row: int) -> None:
        """Takes back the row and the blocks of a sequence that ended."""
        self.allocator.release(self._blocks_of_row.pop(row))
        self._free_rows.append(row)

    def _place(self, prompt: Prompt, prefill: bool) -> Admission:
        if prefill:
            prompt.blocks = self.allocator.allocate(self._prompt_blocks(prompt))
        full = len(prompt.tokens) // self.block_size
        own = self.allocator.allocate(self._own_blocks(prompt))
        blocks = self.allocator.share(prompt.blocks[:full]) + own
        copy = (prompt.blocks[full], own[0]) if len(prompt.blocks) > full else None
        row = self._free_rows.pop()
        self._blocks_of_row[row] = blocks
        sample = self.num_samples - prompt.waiting
        prompt.waiting -= 1
        return Admission(row, prompt, sample, blocks, prefill, copy)

    def _prompt_blocks(self, prompt: Prompt) -> int:
        return -(-len(prompt.tokens) // self.block_size)

    def _own_blocks(self, prompt: Prompt) -> int:
        """Blocks of a sample beyond the full ones it shares. The last sampled token is never written to the cache."""
        total = -(-(len(prompt.tokens) + self.max_new_tokens - 1) // self.block_size)
        return max(total - len(prompt.tokens) // self.block_size, 0)
