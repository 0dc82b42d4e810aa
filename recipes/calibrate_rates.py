"""Acceptance rates of prompts under one cache after another, by either mode of calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from sparrow.components.kv_cache import DenseKVCache
from sparrow.protocols import KVCache
from sparrow.recipes.calibrate_measure import Sampler, Scorer, Trajectories, joined_trajectories, share_of
from sparrow.recipes.calibrate_surface import Measured
from sparrow.training import distributed


class TokenRates:
    """Of all prompts together, whichever rank has them; all methods are collective.

    Args:
        adapter: makes the context of every sparse rollout and forward; the dense side runs outside of it.
    """

    def __init__(
        self, num_samples: int, sampler: Sampler, scorer: Scorer, adapter: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.num_samples, self.sampler, self.scorer, self.adapter = num_samples, sampler, scorer, adapter

    def generated(self, cache: KVCache, prompts: range) -> Measured:
        """Of trajectories that the sparse policy sampled under this cache."""
        with self.adapter():
            batch = self.sampler.sample(cache, prompts, keep_hidden=True)
        return self.scorer.generated(batch)

    def rescoring(self, trajectories: Trajectories) -> Callable[[KVCache], Measured]:
        """Of dense trajectories, with the pages that decode would have read; their dense side is computed once."""
        batch = share_of(trajectories, self.num_samples, distributed.rank(), distributed.world_size())
        dense = [self.scorer.dense_hidden(micro) for micro in self.scorer.pack(batch)]

        def rescored(cache: KVCache) -> Measured:
            with self.adapter():
                return self.scorer.rescored(batch, cache, dense)

        return rescored

    def dense_trajectories(self, cache: KVCache, prompts: range) -> Trajectories:
        """Sampled from the dense policy, with pages and blocks like those of `cache`; says how many it took."""
        started = time.perf_counter()
        batch = self.sampler.sample(DenseKVCache(cache.page_size, cache.block_size), prompts, keep_hidden=False)
        mine = Trajectories(batch.prompts, batch.lengths_S, batch.tokens_T)
        whole = joined_trajectories(distributed.gather_objects(mine), self.num_samples)
        if distributed.rank() == 0:
            figures = f"{len(whole.prompts)} sequences, {len(whole.tokens_T):,} tokens"
            print(f"dense trajectories  {figures}  {time.perf_counter() - started:.0f}s", flush=True)
        return whole
