"""Acceptance rates of a model under one sparse cache after the other, in either mode of sparrow_calibrate.

`generate` samples a trajectory for each cache, as training will; `teacher_forced` re-scores one set of dense
trajectories with the pages that decode would have read, which costs a forward instead of a rollout.

Axes: S sequences of this rank, T their response tokens, N those of one micro-batch, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.components.acceptance import AcceptanceTail, alpha_top_k, top_k_floor
from sparrow.components.data import PromptData
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.launch import check_stop
from sparrow.models.decoder import Decoder
from sparrow.models.tokenizer import Tokenizer
from sparrow.protocols import KVCache
from sparrow.recipes.calibrate_surface import Measured, joined
from sparrow.recipes.evaluate import encode_prompt
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.logprob import score_tokens
from sparrow.training.packing import MicroBatch, pack, response_hidden, split_by_tokens


class Settings(Protocol):
    """The keys of a config that sampling and scoring read; see `CalibrateConfig`."""

    seed: int
    num_samples: int
    enable_thinking: bool | None
    sampling: SamplingParams
    engine: EngineConfig
    micro_batch_tokens: int
    logprob_chunk: int


@dataclass(frozen=True)
class Trajectories:
    """What re-scoring needs of sampled sequences: S prompts, the lengths of their responses, and their T tokens."""

    prompts: list[list[int]]
    lengths_S: Tensor
    tokens_T: Tensor


class Sampler:
    """Trajectories of this rank's share of the prompts; random numbers follow the prompt, not rank or cache."""

    def __init__(self, cfg: Settings, data: PromptData, model: Decoder, tokenizer: Tokenizer, top_k: int) -> None:
        self.cfg, self.data, self.model, self.tokenizer, self.top_k = cfg, data, model, tokenizer, top_k

    def sample(self, cache: KVCache, prompts: range, keep_hidden: bool) -> RolloutBatch:
        """Responses to the prompts of these numbers; the engine and its pool last only as long as this call."""
        cfg = self.cfg
        numbers = list(prompts)[distributed.rank() :: distributed.world_size()]
        eos_ids, decode = self.tokenizer.eos_ids, self.tokenizer.decode
        engine = Engine(self.model, cache, eos_ids, cfg.engine, cfg.seed, self.top_k, decode)
        encoded = [self.encode(number) for number in numbers]
        batch = engine.generate(
            encoded,
            cfg.num_samples,
            cfg.sampling,
            prompt_numbers=numbers,
            keep_hidden=keep_hidden,
            on_step=_stop_alone,
        )
        engine.sleep()
        return batch

    def encode(self, number: int) -> list[int]:
        """Token ids of a prompt of the data."""
        return encode_prompt(self.tokenizer, self.data.example(number).prompt, self.cfg.enable_thinking)


class Scorer:
    """Acceptance rates of sampled tokens from the hidden states of both sides."""

    def __init__(self, cfg: Settings, model: Decoder, acceptance: AcceptanceTail, device: torch.device) -> None:
        self.cfg, self.model, self.acceptance, self.device = cfg, model, acceptance, device

    @torch.no_grad()
    def generated(self, batch: RolloutBatch) -> Measured:
        """Of a rollout that kept its hidden states, against a dense forward over the same tokens."""
        assert batch.hidden_TE is not None
        micros = self.pack(batch)
        sparse = (batch.hidden_TE[micro.index_N] for micro in micros)
        return self._measured(batch, micros, (self.dense_hidden(micro) for micro in micros), sparse)

    @torch.no_grad()
    def rescored(self, batch: RolloutBatch, cache: KVCache, dense: Sequence[Tensor] | None = None) -> Measured:
        """Of given tokens under a cache.

        Args:
            batch: trajectories; their own hidden states are not looked at.
            dense: `dense_hidden` of each micro-batch of `pack`, where they have been computed already.
        """
        micros = self.pack(batch)
        sparse = (
            response_hidden(self.model, micro, cache.training(micro.lengths, micro.prompt_lengths, self.device))
            for micro in micros
        )
        return self._measured(batch, micros, dense or (self.dense_hidden(micro) for micro in micros), sparse)

    def pack(self, batch: RolloutBatch) -> list[MicroBatch]:
        """Always the same micro-batches for the same batch."""
        lengths = [len(prompt) + int(n) - 1 for prompt, n in zip(batch.prompts, batch.lengths_S, strict=True)]
        return [pack(batch, group, self.device) for group in split_by_tokens(lengths, self.cfg.micro_batch_tokens)]

    @torch.no_grad()
    def dense_hidden(self, micro: MicroBatch) -> Tensor:
        """Final hidden states of the dense policy [N, E], in host memory: those of all tokens can be gigabytes."""
        return response_hidden(self.model, micro, PackedCausal(micro.lengths, self.device)).cpu()

    def _measured(
        self, batch: RolloutBatch, micros: list[MicroBatch], dense: Iterable[Tensor], sparse: Iterable[Tensor]
    ) -> Measured:
        alpha_T, floor_T = torch.zeros(2, batch.num_tokens).unbind()
        for micro, dense_NE, sparse_NE in zip(micros, dense, sparse, strict=True):
            _stop_alone()
            alpha_T[micro.index_N], floor_T[micro.index_N] = self._score(micro, dense_NE, sparse_NE)
        # The first token of a response comes from the dense prefill: it would only thin the tail out.
        kept_T = batch.response_position_T > 0
        sequence_T = sequence_numbers(
            batch.sequence_T, self.cfg.num_samples, distributed.rank(), distributed.world_size()
        )
        mine = Measured(alpha_T[kept_T], floor_T[kept_T], batch.cached_length_T[kept_T], sequence_T[kept_T])
        return joined(distributed.gather_objects(mine))

    def _score(self, micro: MicroBatch, dense_NE: Tensor, sparse_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Acceptance rate and top-k floor of each token."""
        temperature, top_k, chunk = self.cfg.sampling.temperature, self.acceptance.top_k, self.cfg.logprob_chunk
        dense_NE = dense_NE.to(self.device)
        exact = self.acceptance.estimator == "exact"
        arguments = (self.model.logits, micro.targets_N, temperature, top_k)
        scores = score_tokens(dense_NE, *arguments, sparse_NE if exact else None, chunk)
        floor_N = top_k_floor(scores.top_logprobs_NK).cpu()
        if scores.alpha_exact_N is not None:
            return scores.alpha_exact_N.cpu(), floor_N
        theirs = score_tokens(sparse_NE.to(dense_NE), *arguments, None, chunk)
        alpha_N = alpha_top_k(theirs.top_ids_NK, theirs.top_logprobs_NK, scores.top_ids_NK, scores.top_logprobs_NK)
        return alpha_N.cpu(), floor_N


def sequence_numbers(sequence_N: Tensor, num_samples: int, rank: int, world_size: int) -> Tensor:
    """The numbers over all ranks of a rank's sequences: prompts are dealt out in turn, each with all of its samples.

    They do not depend on the number of ranks, and neither do the resamples of sequences that go by them.
    """
    prompt_N, sample_N = sequence_N // num_samples, sequence_N % num_samples
    return (prompt_N * world_size + rank) * num_samples + sample_N


def joined_trajectories(parts: Sequence[Trajectories], num_samples: int) -> Trajectories:
    """Those of all ranks, in the order of their numbers."""
    world_size = len(parts)
    numbers = [
        sequence_numbers(torch.arange(len(part.prompts)), num_samples, rank, world_size)
        for rank, part in enumerate(parts)
    ]
    order = torch.cat(numbers).argsort().tolist()
    prompts = [prompt for part in parts for prompt in part.prompts]
    responses = [tokens for part in parts for tokens in part.tokens_T.split(part.lengths_S.tolist())]
    lengths_S = torch.cat([part.lengths_S for part in parts])
    return Trajectories([prompts[s] for s in order], lengths_S[order], torch.cat([responses[s] for s in order]))


def some_of(trajectories: Trajectories, first: int, last: int) -> Trajectories:
    """The sequences from number `first` to the one before `last`."""
    ends = [0, *trajectories.lengths_S.cumsum(0).tolist()]
    tokens_T = trajectories.tokens_T[ends[first] : ends[last]]
    return Trajectories(trajectories.prompts[first:last], trajectories.lengths_S[first:last], tokens_T)


def appended(first: Trajectories, second: Trajectories) -> Trajectories:
    """The sequences of both, the first ones' before."""
    lengths_S, tokens_T = (torch.cat([getattr(x, name) for x in (first, second)]) for name in ("lengths_S", "tokens_T"))
    return Trajectories(first.prompts + second.prompts, lengths_S, tokens_T)


def decoded_positions(trajectories: Trajectories) -> Measured:
    """The tokens that a re-scoring will yield, with the acceptance of dense against dense."""
    batch = share_of(trajectories, 1, 0, 1)
    kept_T = batch.response_position_T > 0
    ones_N = torch.ones(int(kept_T.sum()))
    return Measured(ones_N, ones_N, batch.cached_length_T[kept_T], batch.sequence_T[kept_T])


def share_of(trajectories: Trajectories, num_samples: int, rank: int, world_size: int) -> RolloutBatch:
    """A rank's sequences, as a batch without the engine's figures."""
    mine = [s for s in range(len(trajectories.prompts)) if s // num_samples % world_size == rank]
    prompts, lengths_S = [trajectories.prompts[s] for s in mine], trajectories.lengths_S[mine]
    responses = trajectories.tokens_T.split(trajectories.lengths_S.tolist())
    S, none = len(prompts), torch.empty(0)
    return RolloutBatch(
        prompts=prompts,
        groups_S=torch.arange(S),
        samples_S=torch.zeros(S, dtype=torch.int64),
        lengths_S=lengths_S,
        tokens_T=torch.cat([responses[s] for s in mine]),
        logprobs_T=none,
        top_ids_TK=none,
        top_logprobs_TK=none,
        pages_T=none,
        terminated_S=torch.zeros(S, dtype=torch.bool),
        versions_S=torch.zeros(S, dtype=torch.int64),
        numbers_S=torch.arange(S),
    )


def _stop_alone(*_: int) -> None:
    # Ranks go at their own pace: with several, only the check between budgets is safe.
    if distributed.world_size() == 1:
        check_stop()
