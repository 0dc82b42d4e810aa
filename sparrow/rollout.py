"""The batch of rollouts that travels through one training step.

Axes: S sequences, T response tokens of all sequences packed one after the other, K the top-k set, E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor


@dataclass
class RolloutBatch:
    """S sampled sequences. The engine fills the first block, the recipe the rest, in the order of the step.

    Attributes:
        prompts: S lists of prompt token ids.
        groups_S: index of the prompt each sequence answers, int64; the samples of a prompt share it.
        samples_S: number of the sample within its group, int64.
        lengths_S: response tokens per sequence, int64; sums to T.
        tokens_T: sampled token ids, int64.
        logprobs_T: log-prob of the token under the *sampling* distribution (temperature, top-k, top-p, min-p), fp32.
        top_ids_TK, top_logprobs_TK: the K most probable tokens at that temperature before any truncation, fp32.
        pages_T: KV pages that a sparse layer read to make this token (its budget, or all there are), int64.
        hidden_TE: final hidden states that the head turned into logits, for the exact acceptance rate, or None.
        terminated_S: True where the response ended by itself, with a token of the EOS set or with one that completes a
            stop string; False where it was cut.
        versions_S: per-sequence generator_version, the weights that made it (`Engine.version`), int64.
        numbers_S: number of the sequence's prompt in the data, the same on any number of processes, int64.
        columns: per group, what the data set said besides the prompt (gold answer, ...), for the reward functions.
        texts: S decoded responses, for rewards and the sample table; training never re-tokenises them.
        rewards_S: weighted sum of the reward functions; NaN where none had an opinion.
        reward_parts: per sequence the unweighted reward of each function that had an opinion, by its name.
        advantages_S: within the group, fp32.
        keep_S: whether the loss counts the sequence in its denominators (`Advantages.keep_S`), bool.
        dense_logprobs_T: log-prob of the token under the dense policy before the update, at the sampling temperature.
        dense_top_ids_TK, dense_top_logprobs_TK: its most probable tokens then, for a distiller that asks for them.
        entropy_T: of the dense policy, nats.
        reference_logprobs_T: the token's log-prob under the frozen reference, for the KL term.
        alpha_T: acceptance rate, by the chosen estimator.
        correction_T: constant weight of the token's loss, from dense over rollout log-prob.
    """

    prompts: list[list[int]]
    groups_S: Tensor
    samples_S: Tensor
    lengths_S: Tensor
    tokens_T: Tensor
    logprobs_T: Tensor
    top_ids_TK: Tensor
    top_logprobs_TK: Tensor
    pages_T: Tensor
    terminated_S: Tensor
    versions_S: Tensor
    numbers_S: Tensor
    hidden_TE: Tensor | None = None
    columns: list[dict[str, Any]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    # Filled by the recipe.
    rewards_S: Tensor | None = None
    reward_parts: list[dict[str, float]] = field(default_factory=list)
    advantages_S: Tensor | None = None
    keep_S: Tensor | None = None
    dense_logprobs_T: Tensor | None = None
    dense_top_ids_TK: Tensor | None = None
    dense_top_logprobs_TK: Tensor | None = None
    entropy_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    alpha_T: Tensor | None = None
    correction_T: Tensor | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_T.numel())

    @property
    def sequence_T(self) -> Tensor:
        """Index of the sequence each response token belongs to, int64 [T]."""
        return torch.repeat_interleave(torch.arange(self.num_sequences), self.lengths_S)

    @property
    def offsets_S(self) -> Tensor:
        """Start of each sequence's slice of the T axis, int64 [S]."""
        return self.lengths_S.cumsum(0) - self.lengths_S

    @property
    def response_position_T(self) -> Tensor:
        """Position within the response, from 0, int64 [T]."""
        return torch.arange(self.num_tokens) - self.offsets_S[self.sequence_T]

    @property
    def cached_length_T(self) -> Tensor:
        """Tokens in the KV cache when this token was sampled (prompt and the response before it), int64 [T].

        The one coordinate of budget schedule, calibration and acceptance bins.
        """
        prompt_S = torch.tensor([len(prompt) for prompt in self.prompts])
        return prompt_S[self.sequence_T] + self.response_position_T

    def slice_of(self, sequence: int) -> slice:
        """The T slice of one sequence."""
        start = int(self.offsets_S[sequence])
        return slice(start, start + int(self.lengths_S[sequence]))

    def select(self, sequences: Sequence[int]) -> RolloutBatch:
        """Some of the sequences, in the order given; a group keeps its columns."""
        index_S = torch.tensor(sequences, dtype=torch.int64)
        slices = [torch.arange(self.num_tokens)[self.slice_of(s)] for s in sequences]
        index_T = torch.cat([torch.zeros(0, dtype=torch.int64), *slices])
        values: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor):
                values[name] = value[index_S if name.endswith("_S") else index_T]
            elif name == "columns" or not value:
                values[name] = value
            else:
                values[name] = [value[s] for s in sequences]
        groups, values["groups_S"] = values["groups_S"].unique(return_inverse=True)
        values["columns"] = [self.columns[group] for group in groups.tolist()] if self.columns else []
        return RolloutBatch(**values)


def join(parts: Sequence[RolloutBatch]) -> RolloutBatch:
    """All sequences of several batches; those that answer the same prompt become one group."""
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(RolloutBatch)):
        column = [getattr(part, name) for part in parts]
        if isinstance(column[0], Tensor):
            values[name] = torch.cat(column)
        else:
            values[name] = None if column[0] is None else [value for part in column for value in part]
    numbers, values["groups_S"] = values["numbers_S"].unique(return_inverse=True)
    if values["columns"]:
        by_number = {
            int(part.numbers_S[part.groups_S == group][0]): columns
            for part in parts
            for group, columns in enumerate(part.columns)
        }
        values["columns"] = [by_number[number] for number in numbers.tolist()]
    return RolloutBatch(**values)
