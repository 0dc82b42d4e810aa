"""Micro-batches: which sequences go through the model together, and where their response tokens come out.

Axes: S sequences of the batch, T its response tokens, P packed input tokens of a micro-batch, N its response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.models.decoder import Decoder
from sparrow.protocols import Attention
from sparrow.rollout import RolloutBatch


@dataclass
class MicroBatch:
    """Whole sequences, packed. A sequence's last token predicts nothing and is left out of the input.

    Attributes:
        sequences: indices into the batch.
        lengths, prompt_lengths: input tokens of each sequence, and how many of them are its prompt.
        tokens_P, positions_P: the input.
        targets_N: the response tokens.
        predicts_N: packed position whose hidden state predicts each response token.
        index_N: where each response token stands on the batch's T axis.
        sequence_N: sequence of each response token, numbered within the micro-batch.
        response_lengths: response tokens of each sequence, int64.
    """

    sequences: list[int]
    lengths: list[int]
    prompt_lengths: list[int]
    tokens_P: Tensor
    positions_P: Tensor
    targets_N: Tensor
    predicts_N: Tensor
    index_N: Tensor
    sequence_N: Tensor
    response_lengths: Tensor


def pack(batch: RolloutBatch, sequences: Sequence[int], device: torch.device) -> MicroBatch:
    """Packs the given sequences of a batch, in this order."""
    tokens, positions, predicts, index, start = [], [], [], [], 0
    offsets = batch.offsets_S.tolist()
    responses = batch.lengths_S[list(sequences)]
    for s, response in zip(sequences, responses.tolist(), strict=True):
        prompt = torch.tensor(batch.prompts[s])
        whole = torch.cat((prompt, batch.tokens_T[offsets[s] : offsets[s] + response]))[:-1]
        tokens.append(whole)
        positions.append(torch.arange(len(whole)))
        predicts.append(start + len(prompt) - 1 + torch.arange(response))
        index.append(offsets[s] + torch.arange(response))
        start += len(whole)
    index_N = torch.cat(index)
    return MicroBatch(
        sequences=list(sequences),
        lengths=[len(x) for x in tokens],
        prompt_lengths=[len(batch.prompts[s]) for s in sequences],
        tokens_P=torch.cat(tokens).to(device),
        positions_P=torch.cat(positions).to(device),
        targets_N=batch.tokens_T[index_N].to(device),
        predicts_N=torch.cat(predicts).to(device),
        index_N=index_N,
        sequence_N=torch.repeat_interleave(torch.arange(len(responses)), responses).to(device),
        response_lengths=responses.to(device),
    )


def empty_micro_batch(device: torch.device) -> MicroBatch:
    """One token, of which nothing is asked: for a rank without sequences that must take part in the forward."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return MicroBatch(
        sequences=[],
        lengths=[1],
        prompt_lengths=[1],
        tokens_P=torch.zeros(1, dtype=torch.int64, device=device),
        positions_P=torch.zeros(1, dtype=torch.int64, device=device),
        targets_N=nothing.to(device),
        predicts_N=nothing.to(device),
        index_N=nothing,
        sequence_N=nothing.to(device),
        response_lengths=nothing.to(device),
    )


def split_by_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Groups indices so that no group's padded size, longest times count, exceeds `max_tokens`.

    Longest first, so that neighbours have like lengths and little padding; one sequence alone may exceed the limit.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def response_hidden(model: Decoder, micro: MicroBatch, attention: Attention) -> Tensor:
    """Final hidden states [N, E] that predict the response tokens; the one forward of dense pass and update alike."""
    return model(micro.tokens_P, micro.positions_P, attention)[micro.predicts_N]
