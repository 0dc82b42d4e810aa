"""Who owns which block of the KV pool, by reference count: the samples of a prompt share its full blocks."""

from __future__ import annotations

from sparrow.attention.pool import NULL_BLOCK


class BlockAllocator:
    """Hands out blocks 1 .. num_blocks; the null block is never handed out. `peak_used` is the most that were owned."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, NULL_BLOCK, -1))
        self._references = [0] * (num_blocks + 1)
        self.peak_used = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        self.peak_used = max(self.peak_used, self.num_blocks - self.num_free)
        return blocks

    def share(self, blocks: list[int]) -> list[int]:
        """Adds a reference to each block."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Drops a reference from each; the last one frees the block."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
