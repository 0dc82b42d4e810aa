"""FLOPs against what PyTorch counts, and by hand."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training.flops import UPDATE_FORWARDS, forward_flop

CONFIG = DecoderConfig(
    vocab_size=61, hidden_size=32, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip


def test_linear_layers_and_head_are_what_pytorch_counts() -> None:
    model = Decoder(CONFIG)
    model.init_weights(0)
    tokens_T = torch.arange(40)
    with FlopCounterMode(display=False) as forward:
        hidden_TE = model(tokens_T, tokens_T, lambda layer, q, k, v: q)  # attention left out
        logits_NV = model.logits(hidden_TE[:25])
    with FlopCounterMode(display=False) as backward:
        (hidden_TE.sum() + logits_NV.sum()).backward()
    attention = 4 * 3 * 4 * 16 * (40 * 41 / 2)
    ours = forward_flop(CONFIG, [40], 25) - attention
    assert ours == forward.get_total_flops()
    # The values have no gradient here, and so neither their projection: 2 FLOPs a weight and token, twice.
    values = 2 * 2 * 3 * 32 * 2 * 16 * 40
    keys = values
    assert (UPDATE_FORWARDS - 1) * ours - values - keys == backward.get_total_flops()


def test_documents_do_not_see_each_other() -> None:
    both = forward_flop(CONFIG, [30, 10], 0)
    assert both == forward_flop(CONFIG, [30], 0) + forward_flop(CONFIG, [10], 0)
    # 40 tokens as one document look at 30 x 10 pairs more.
    assert forward_flop(CONFIG, [40], 0) - both == 4 * 3 * 4 * 16 * 300
