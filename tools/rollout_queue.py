"""A queue of requests on the engine's own loop: scheduler, rows, graphs and kernels are those of `Engine.generate`.

`Engine` itself wants a trainer's model beside the rollout's; here there is none, and its memory belongs to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rollout_meter import Clock, MeteredCache, MeteredModel, MeteredStarts, MeteredStepper
from rollout_shapes import RandomModel, fill_with_noise, model_config
from torch import Tensor

from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.decode import Drawing, EagerStepper, Stepper
from sparrow.engine.engine import CUDA_STEPS_PER_LOOK
from sparrow.engine.generation import Generation
from sparrow.engine.graphs import GraphStepper, graph_buckets
from sparrow.engine.philox import uniforms
from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Scheduler
from sparrow.engine.window import Window
from sparrow.errors import UserError
from sparrow.protocols import KVCache

KEPT_FREE = 8 * 2**30  # bytes of device memory for graphs, activations and windows
TOP_K = 20


@dataclass(frozen=True)
class RequestQueue:
    """Prompts, each with `samples` responses, whose lengths are `limits`, prompt-major; no token ends one."""

    prompts: list[list[int]]
    samples: int
    limits: list[int]
    max_new_tokens: int

    @property
    def longest_prompt(self) -> int:
        """In tokens."""
        return max(map(len, self.prompts))


@dataclass(frozen=True)
class EngineSizes:
    """See `sparrow.engine.engine.EngineConfig`; `kv_tokens` None takes what memory is free.

    Attributes:
        stride: decode steps that one stands for, 1 where each is taken.
    """

    max_rows: int
    kv_tokens: int | None
    prefill_tokens: int = 16384
    steps_per_look: int = CUDA_STEPS_PER_LOOK
    stride: int = 1

    @property
    def window(self) -> int:
        """Steps between two looks of this run."""
        return self.stride if self.stride > 1 else self.steps_per_look


def make_queue(
    model: str, samples: int, prompt: int, limits: list[int], max_new_tokens: int, seed: int
) -> RequestQueue:
    """Random prompts of about `prompt` tokens: from half to one and a half of it."""
    if len(limits) % samples:
        raise UserError(f"--requests {len(limits)} is no multiple of --samples {samples}")
    config = model_config(model)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(max(1, prompt // 2), prompt * 3 // 2 + 1, (len(limits) // samples,), generator=generator)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator).tolist() for n in lengths.tolist()]
    longest, positions = max(map(len, prompts)) + max_new_tokens, config.max_position_embeddings
    if longest > positions:
        raise UserError(
            f"--longest {max_new_tokens}: with the prompt {longest} tokens, {model} has {positions} positions"
        )
    return RequestQueue(prompts, samples, limits, max_new_tokens)


def pool_tokens(model: RandomModel, cache: KVCache, queue: RequestQueue, kv_tokens: int | None) -> int:
    """What was asked for, or what fits: all that is free but `KEPT_FREE`, and no more than the queue can ever need."""
    if kv_tokens is not None:
        return kv_tokens
    # Every sequence at once at its longest, its prompt held beside it, and two blocks that are not full.
    wanted = len(queue.limits) * (2 * queue.longest_prompt + queue.max_new_tokens + 2 * cache.block_size)
    if model.device.type != "cuda":
        return wanted
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(model.device)
    return min(wanted, (free - KEPT_FREE) // cache.bytes_per_token(model.config, model.dtype))


class QueueRun:
    """The queue on a pool of its own, graphs captured, nothing decoded yet; `close` gives the pool back.

    Attributes:
        generation: the engine's loop; `clock`, `starts` and `stepper` measure it.
        num_blocks: of the pool.
    """

    def __init__(self, model: RandomModel, cache: KVCache, queue: RequestQueue, sizes: EngineSizes) -> None:
        self.model, self.cache, self.queue, self.sizes = model, cache, queue, sizes
        self.num_blocks = pool_tokens(model, cache, queue, sizes.kv_tokens) // cache.block_size
        scheduler = self._scheduler(queue.limits)  # refuses a pool that is too small before it is made
        cache.allocate(model.config, self.num_blocks, model.device, model.dtype)
        fill_with_noise(cache, torch.Generator(model.device).manual_seed(0))
        self.rows = self._rows(scheduler.num_rows)
        eos_V = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=model.device)
        self.drawing = Drawing(SamplingParams(), eos_V, TOP_K)
        self.clock = Clock(model.device)
        self.starts = MeteredStarts(self._uniforms, self.clock)
        with torch.no_grad():
            self.stepper = MeteredStepper(self._stepper(), self.rows, self.clock, sampled=sizes.stride > 1)
        self.generation = self._generation(scheduler)

    @torch.no_grad()
    def warm_up(self) -> None:
        """Sends the queue through once, with short responses, so that nothing is compiled while it is measured."""
        short = [min(limit, self.sizes.steps_per_look) for limit in self.queue.limits]
        warming = self._generation(self._scheduler(short))
        while not warming.done:
            warming.window()
        self.clock.seconds.clear()
        self.starts.order.clear()

    def close(self) -> None:
        """Gives pool and graphs back."""
        del self.generation, self.stepper, self.rows
        self.cache.release()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _generation(self, scheduler: Scheduler) -> Generation:
        return Generation(
            MeteredModel(self.model.decoder, self.clock), MeteredCache(self.cache, self.clock), scheduler, self.rows,
            self.stepper, self.drawing, self.starts, None, self.sizes.window, self.sizes.prefill_tokens,
        )  # fmt: skip

    def _scheduler(self, limits: list[int]) -> Scheduler:
        queue, block_size = self.queue, self.cache.block_size
        num_rows = min(self.sizes.max_rows, len(limits))
        allocator = BlockAllocator(self.num_blocks)
        return Scheduler(queue.prompts, queue.samples, num_rows, queue.max_new_tokens, allocator, block_size, limits)

    def _uniforms(self, prompt: int, sample: int) -> Tensor:
        return uniforms(0, prompt, sample, self.queue.max_new_tokens, self.model.device)

    def _rows(self, num_rows: int) -> Rows:
        device, limit = self.model.device, self.queue.max_new_tokens
        window = Window(self.sizes.window + 1, num_rows + 1, TOP_K, 0, device, self.model.dtype)
        return Rows(num_rows, -(-(self.queue.longest_prompt + limit) // self.cache.block_size), limit, window, device)

    def _stepper(self) -> Stepper:
        model, cache, rows = self.model, self.cache, self.rows
        if model.device.type == "cuda" and cache.capturable:
            buckets = graph_buckets(rows.null_row, rows.block_table_RN.shape[1], cache.block_size)
            return GraphStepper(model.decoder, cache, rows, self.drawing, buckets)
        return EagerStepper(model.decoder, cache, rows, self.drawing)
