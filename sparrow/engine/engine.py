"""The rollout engine: batched generation with continuous batching over a paged KV cache.

The host plans a window of steps, the device takes them, the host looks at what came out. On the CPU the engine runs
the trainer's own model object, on CUDA a packed copy of its weights, in CUDA graphs. A sync is a new version number;
pool and copy are dropped, so that nothing of the old weights is left. What the engine returns is on the CPU.

Axes: T all response tokens, E hidden size, V vocabulary, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.decode import Drawing, EagerStepper, RolloutModel, Stepper
from sparrow.engine.generation import EngineStats, Generation
from sparrow.engine.graphs import GraphStepper, graph_buckets
from sparrow.engine.memory import check_pool_fits
from sparrow.engine.philox import uniforms
from sparrow.engine.rows import Rows
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Scheduler
from sparrow.engine.stop import StopStrings
from sparrow.engine.weights import CopiedWeights, PackedWeights, RolloutWeights, SharedWeights
from sparrow.engine.window import Window
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.protocols import KVCache
from sparrow.rollout import RolloutBatch
from sparrow.training.distributed import SharedQueue
from sparrow.training.sharding import is_sharded

CUDA_STEPS_PER_LOOK = 16
BLOCKS_ROUNDED = 8  # of a row's table


@dataclass(kw_only=True)
class EngineConfig:
    """Limits of the engine.

    Attributes:
        max_rows: sequences decoded at once.
        kv_tokens: capacity of the KV pool in tokens, over all sequences.
        max_new_tokens: longest response; one that reaches it is cut.
        prefill_tokens: prompt tokens per prefill pass; a longer prompt is prefilled in chunks.
        steps_per_look: decode steps between two looks of the host; 1 on the CPU, 16 on CUDA by default. A row that
            ends within a window stays as it is.
        dtype: of the rollout's weights and KV cache on CUDA; the trainer's by default, and always on the CPU, where the
            weights are shared.
        tune: measure launch options of shapes that no table knows, once per machine and model (about a minute).
    """

    max_rows: int
    kv_tokens: int
    max_new_tokens: int
    prefill_tokens: int = 16384
    steps_per_look: int | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    tune: bool = True

    def __post_init__(self) -> None:
        for key in ("max_rows", "kv_tokens", "max_new_tokens", "prefill_tokens", "steps_per_look"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError(f"engine.{key}: {value} must be at least 1")


class Engine:
    """Generates rollouts. The KV pool is made by the first `generate` and kept until `sleep` or `sync`.

    Args:
        model: the decoder that is trained.
        cache: the KV cache component.
        eos_ids: any of these ends a response, and is part of it.
        seed: of the counter-based random numbers.
        top_k: size of the top-k set returned per token (paper: 20).
        decode: text of token ids, for stop strings.
        weights: where the rollout's model comes from; the trainer's own on the CPU, a packed copy on CUDA by default.

    Attributes:
        version: of the weights.
        stats: of the last `generate`.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        eos_ids: Sequence[int],
        config: EngineConfig,
        seed: int = 0,
        top_k: int = 20,
        decode: Callable[[list[int]], str] | None = None,
        weights: RolloutWeights | None = None,
    ) -> None:
        self.model, self.cache, self.config, self.seed, self.decode = model, cache, config, seed, decode
        self.top_k = min(top_k, model.config.vocab_size)
        self.version = 0
        self.stats = EngineStats()
        parameter = next(model.parameters())
        self.device = parameter.device
        self.dtype = parameter.dtype if config.dtype is None else getattr(torch, config.dtype)
        self.weights = self._weights(parameter.dtype) if weights is None else weights
        self.eos_V = self._eos_mask(eos_ids)
        default = CUDA_STEPS_PER_LOOK if self.device.type == "cuda" else 1
        self.steps_per_look = config.steps_per_look or default
        self.decoder: RolloutModel | None = None  # None while the engine sleeps

    def _weights(self, trained_in: torch.dtype) -> RolloutWeights:
        if self.device.type == "cuda":
            return PackedWeights(self.model, self.device, self.dtype, self.config.max_rows, self.config.tune)
        if is_sharded(self.model):
            return CopiedWeights(self.model, self.device, self.dtype)
        if self.dtype != trained_in:
            raise UserError(
                f"engine.dtype: {self.config.dtype} on the CPU, where the rollout shares the trainer's weights in "
                f"{str(trained_in).removeprefix('torch.')}; leave it out"
            )
        return SharedWeights(self.model)

    def sync(self) -> None:
        """The weights changed: what follows is generated by a new version. No key of the old one is kept."""
        self.sleep()
        self.version += 1

    def sleep(self) -> None:
        """Releases the KV pool and the copy of the weights; the next `generate` makes new ones."""
        if self.decoder is not None:
            self.decoder = None
            self.weights.sleep()
            self.cache.release()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        sampling: SamplingParams,
        prompt_numbers: Sequence[int] | None = None,
        keep_hidden: bool = False,
        on_step: Callable[[int, int], None] | None = None,
        limits: Sequence[int] | None = None,
        queue: SharedQueue | None = None,
    ) -> RolloutBatch:
        """Samples `num_samples` responses to each prompt.

        Args:
            prompts: token ids.
            sampling: distribution to draw from.
            prompt_numbers: numbers that key each prompt's random numbers; its position by default.
            keep_hidden: also return the final hidden states.
            on_step: called after each window with the tokens and sequences finished so far; may raise to stop.
            limits: longest response of each sequence, ordered by prompt, then sample; `max_new_tokens` by default.
            queue: hands the prompts out to several processes that all call this with the same ones; what each returns
                is those that it claimed, in the order of `prompts`.

        Raises:
            UserError: an empty prompt, one too long for the model, a pool too small for one sequence, an impossible
                limit, not a number or a limit for each, or stop strings without `decode`; before any work. Whatever is
                raised, the pool is released.
        """
        self._check(prompts, num_samples, sampling)
        if limits is not None:
            self._check_limits(limits, len(prompts) * num_samples)
        numbers = range(len(prompts)) if prompt_numbers is None else prompt_numbers
        if len(numbers) != len(prompts):
            raise UserError(f"engine.generate: {len(numbers)} prompt_numbers for {len(prompts)} prompts")
        scheduler = self._scheduler(prompts, num_samples, limits, queue)
        try:
            decoder = self._wake()
            generation = self._generation(decoder, scheduler, max(map(len, prompts)), sampling, numbers, keep_hidden)
            while not generation.done:
                generation.window()
                if on_step is not None:
                    on_step(generation.num_tokens, generation.num_finished)
        except BaseException:
            self.sleep()
            raise
        self.stats = generation.stats
        return self._batch(prompts, num_samples, generation, numbers)

    def _check(self, prompts: Sequence[list[int]], num_samples: int, sampling: SamplingParams) -> None:
        if not prompts or num_samples < 1:
            raise UserError(f"engine.generate: {len(prompts)} prompts with {num_samples} samples each")
        if sampling.stop and self.decode is None:
            raise UserError(f"sampling.stop: {sampling.stop} needs text, and the engine was made without `decode`")
        room = self.model.config.max_position_embeddings - self.config.max_new_tokens
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"engine.generate: prompt {index} is empty")
            if not 0 <= min(prompt) <= max(prompt) < self.model.config.vocab_size:
                raise UserError(
                    f"engine.generate: prompt {index} has token ids from {min(prompt)} to {max(prompt)}; the "
                    f"vocabulary has {self.model.config.vocab_size}"
                )
            if len(prompt) > room:
                raise UserError(
                    f"engine.generate: prompt {index} has {len(prompt)} tokens; max_position_embeddings "
                    f"{self.model.config.max_position_embeddings} minus engine.max_new_tokens "
                    f"{self.config.max_new_tokens} leaves room for {room}"
                )

    def _check_limits(self, limits: Sequence[int], num_sequences: int) -> None:
        if len(limits) != num_sequences:
            raise UserError(f"engine.generate: {len(limits)} limits for {num_sequences} sequences")
        for index, limit in enumerate(limits):
            if not 1 <= limit <= self.config.max_new_tokens:
                raise UserError(
                    f"engine.generate: limit {index} is {limit}; it must be from 1 to engine.max_new_tokens "
                    f"{self.config.max_new_tokens}"
                )

    def _eos_mask(self, eos_ids: Sequence[int]) -> Tensor:
        """True for the tokens that end a response, [V]."""
        vocab_size = self.model.config.vocab_size
        for token in eos_ids:
            if not 0 <= token < vocab_size:
                raise UserError(f"engine: EOS id {token} is not in the model's vocabulary of {vocab_size}")
        eos_V = torch.zeros(vocab_size, dtype=torch.bool)
        eos_V[list(eos_ids)] = True
        return eos_V.to(self.device)

    @property
    def _num_blocks(self) -> int:
        return self.config.kv_tokens // self.cache.block_size

    def _scheduler(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        limits: Sequence[int] | None,
        queue: SharedQueue | None,
    ) -> Scheduler:
        claim, share = None, len(prompts)
        if queue is not None:
            share = queue.share
            # Where all have a row at once, there is nothing to wait for and to be taken by who is first.
            claim = queue.deal() if share * num_samples <= self.config.max_rows else queue.claim
        # No more rows than an equal share needs: the first to ask must not take what would leave others idle.
        return Scheduler(
            prompts,
            num_samples,
            min(self.config.max_rows, share * num_samples),
            self.config.max_new_tokens,
            BlockAllocator(self._num_blocks),
            self.cache.block_size,
            limits,
            claim,
        )

    def _wake(self) -> RolloutModel:
        if self.decoder is None:
            decoder = self.weights.wake()
            try:
                check_pool_fits(self.model.config, self.cache, self.config.kv_tokens, self.device, self.dtype)
                self.cache.allocate(self.model.config, self._num_blocks, self.device, self.dtype)
            except BaseException:
                self.weights.sleep()
                raise
            self.decoder = decoder
        return self.decoder

    def _generation(
        self,
        decoder: RolloutModel,
        scheduler: Scheduler,
        longest_prompt: int,
        sampling: SamplingParams,
        numbers: Sequence[int],
        keep_hidden: bool,
    ) -> Generation:
        rows = self._rows(scheduler.num_rows, longest_prompt, keep_hidden)
        drawing = Drawing(sampling, self.eos_V, self.top_k)
        return Generation(
            decoder,
            self.cache,
            scheduler,
            rows,
            self._stepper(decoder, rows, drawing),
            drawing,
            lambda prompt, sample: uniforms(
                self.seed, numbers[prompt], sample, self.config.max_new_tokens, self.device
            ),
            StopStrings(sampling.stop, self.decode) if sampling.stop and self.decode is not None else None,
            self.steps_per_look,
            self.config.prefill_tokens,
        )

    def _rows(self, num_rows: int, longest_prompt: int, keep_hidden: bool) -> Rows:
        limit = self.config.max_new_tokens
        hidden_size = self.model.config.hidden_size if keep_hidden else 0
        # One more than the steps: the first token of a sequence comes from its prefill.
        window = Window(self.steps_per_look + 1, num_rows + 1, self.top_k, hidden_size, self.device, self.dtype)
        # Rounded up, so that the shapes of the kernels do not change with each call's longest prompt.
        blocks = -(-(longest_prompt + limit) // self.cache.block_size)
        return Rows(num_rows, -(-blocks // BLOCKS_ROUNDED) * BLOCKS_ROUNDED, limit, window, self.device)

    def _stepper(self, decoder: RolloutModel, rows: Rows, drawing: Drawing) -> Stepper:
        """Who runs the decode steps on this device; the pool is there already."""
        if self.device.type == "cuda" and self.cache.capturable:
            buckets = graph_buckets(rows.null_row, rows.block_table_RN.shape[1], self.cache.block_size)
            return GraphStepper(decoder, self.cache, rows, drawing, buckets)
        return EagerStepper(decoder, self.cache, rows, drawing)

    def _batch(
        self, prompts: Sequence[list[int]], num_samples: int, generation: Generation, numbers: Sequence[int]
    ) -> RolloutBatch:
        """The sequences of the claimed prompts, ordered by prompt, then sample."""
        claimed = sorted(generation.scheduler.claimed)
        sequences = [prompt * num_samples + sample for prompt in claimed for sample in range(num_samples)]
        lengths_S, outputs = generation.transcript.packed(len(prompts) * num_samples)
        hidden_TE = outputs["hidden"]
        batch = RolloutBatch(
            prompts=[prompts[prompt] for prompt in claimed for _ in range(num_samples)],
            groups_S=torch.arange(len(claimed)).repeat_interleave(num_samples),
            samples_S=torch.arange(num_samples).repeat(len(claimed)),
            lengths_S=lengths_S[sequences],
            tokens_T=outputs["tokens"],
            logprobs_T=outputs["logprobs"],
            top_ids_TK=outputs["top_ids"].long(),
            top_logprobs_TK=outputs["top_logprobs"],
            pages_T=torch.empty(0, dtype=torch.int64),
            terminated_S=torch.tensor([s in generation.terminated for s in sequences]),
            versions_S=torch.full((len(sequences),), self.version),
            numbers_S=torch.tensor([numbers[prompt] for prompt in claimed]).repeat_interleave(num_samples),
            hidden_TE=hidden_TE if hidden_TE.shape[-1] else None,
        )
        batch.pages_T = self.cache.pages_read(batch.cached_length_T)
        return batch
