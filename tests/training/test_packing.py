from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparrow.attention.packed import PackedCausal
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rollout import RolloutBatch
from sparrow.training.packing import pack, response_hidden, split_by_tokens


def rollouts() -> RolloutBatch:
    prompts, lengths = [[1, 2], [1, 2], [3, 4, 5]], [3, 1, 2]
    total = sum(lengths)
    nothing = torch.zeros(total)
    return RolloutBatch(
        prompts=prompts,
        groups_S=torch.tensor([0, 0, 1]),
        samples_S=torch.tensor([0, 1, 0]),
        lengths_S=torch.tensor(lengths),
        tokens_T=torch.tensor([6, 7, 8, 9, 10, 11]),
        logprobs_T=nothing,
        top_ids_TK=torch.zeros(total, 1, dtype=torch.int64),
        top_logprobs_TK=nothing[:, None],
        pages_T=torch.zeros(total, dtype=torch.int64),
        terminated_S=torch.tensor([True, True, False]),
        versions_S=torch.zeros(3, dtype=torch.int64),
        numbers_S=torch.tensor([4, 4, 9]),
    )


def test_axes_of_a_batch_by_hand():
    batch = rollouts()
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.response_position_T.tolist() == [0, 1, 2, 0, 0, 1]
    # The first response token is sampled with the prompt in the cache, the next with one token more.
    assert batch.cached_length_T.tolist() == [2, 3, 4, 2, 3, 4]
    assert batch.tokens_T[batch.slice_of(2)].tolist() == [10, 11]


def test_a_micro_batch_by_hand():
    micro = pack(rollouts(), [2, 0], torch.device("cpu"))
    # Sequences 3 4 5 10 (11 predicts nothing) and 1 2 6 7 (8 predicts nothing).
    assert micro.tokens_P.tolist() == [3, 4, 5, 10, 1, 2, 6, 7]
    assert micro.positions_P.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert micro.predicts_N.tolist() == [2, 3, 5, 6, 7]
    assert micro.targets_N.tolist() == [10, 11, 6, 7, 8]
    assert micro.index_N.tolist() == [4, 5, 0, 1, 2]
    assert micro.sequence_N.tolist() == [0, 0, 1, 1, 1]
    assert (micro.lengths, micro.prompt_lengths, micro.response_lengths.tolist()) == ([4, 4], [3, 2], [2, 3])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 120))
def test_groups_hold_every_sequence_once_within_the_limit(lengths, limit):
    groups = split_by_tokens(lengths, limit)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= limit


def test_packed_hidden_states_are_those_of_each_sequence_alone():
    config = DecoderConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
    )
    model = Decoder(config)
    model.init_weights(0)
    batch = rollouts()
    micro = pack(batch, [0, 1, 2], torch.device("cpu"))
    with torch.no_grad():
        hidden_NE = response_hidden(model, micro, PackedCausal(micro.lengths))
        for s, prompt in enumerate(batch.prompts):
            alone = torch.tensor(prompt + batch.tokens_T[batch.slice_of(s)].tolist())
            states = model(alone, torch.arange(len(alone)), PackedCausal([len(alone)]))[len(prompt) - 1 : -1]
            torch.testing.assert_close(hidden_NE[micro.index_N.argsort()][batch.slice_of(s)], states)
