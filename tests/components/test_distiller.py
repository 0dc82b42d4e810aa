from __future__ import annotations

import math

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sparrow.attention.packed import PackedCausal
from sparrow.components.budget import FixedBudget
from sparrow.components.distill_loss import k3
from sparrow.components.distiller import DistillRun, LoRADistiller
from sparrow.components.kv_cache import SparseKVCache
from sparrow.components.selector import CentroidSelector
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.models.checkpoint import save_decoder
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training.logprob import token_logprobs
from sparrow.training.packing import pack, response_hidden

CONFIG = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
)
TOKENS = torch.arange(10)


def attached() -> tuple[Decoder, LoRADistiller]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    model.init_weights(0)
    distiller = LoRADistiller(learning_rate=1e-3, rank=2)
    distiller.attach(model)
    return model, distiller


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    return model.logits(model(TOKENS, TOKENS, PackedCausal([10])))


def run_of(cache: SparseKVCache, base_rate: float | None = None) -> DistillRun:
    return DistillRun(
        attention=lambda micro: cache.training(micro.lengths, micro.prompt_lengths, torch.device("cpu")),
        dense_attention=lambda micro: PackedCausal(micro.lengths),
        temperature=1.0,
        chunk_size=1024,
        base_rate=base_rate,
    )


def test_k3_by_hand():
    dense, sparse = torch.tensor([-1.0, -1.0, -40.0]), torch.tensor([-1.0, -1.5, -1.0])
    # d = 0: 0. d = .5: e^.5 - 1.5. d = -39, clamped to -20: e^-20 + 19.
    expected = torch.tensor([0.0, math.exp(0.5) - 1.5, math.exp(-20) + 19])
    torch.testing.assert_close(k3(sparse, dense), expected)
    assert k3(torch.tensor([-50.0]), torch.tensor([0.0])) == 20.0


def test_on_in_rollouts_off_elsewhere_and_bit_identical_when_off():
    plain = Decoder(CONFIG)
    plain.init_weights(0)
    before = logits(plain)
    model, distiller = attached()
    with torch.no_grad():
        for name, parameter in distiller.adapter.items():
            parameter.fill_(0.1 if "lora_B" in name else 0.2)
    assert torch.equal(logits(model), before), "loaded and disabled"
    with distiller.rollout():
        assert (logits(model) - before).abs().max() > 1e-3
    assert torch.equal(logits(model), before)


def test_the_adapter_is_off_again_after_an_error():
    model, distiller = attached()
    with pytest.raises(RuntimeError), distiller.rollout():
        raise RuntimeError
    assert all(layer.disable_adapters for layer in distiller.layers)
    assert all(p.requires_grad for name, p in model.named_parameters() if "lora_" not in name), "GRPO trains the base"


def test_state_round_trip():
    model, distiller = attached()
    with torch.no_grad():
        for parameter in distiller.adapter.values():
            parameter.normal_()
    state = distiller.state_dict()
    other_model, other = attached()
    other.load_state_dict(state)
    with distiller.rollout(), other.rollout():
        assert torch.equal(logits(model), logits(other_model))
    wrong = LoRADistiller(learning_rate=1e-3, targets=["q_proj"])
    wrong.attach(Decoder(CONFIG))
    with pytest.raises(UserError, match="other modules"):
        wrong.load_state_dict(state)


def test_peft_loads_the_exported_adapter_onto_transformers_model(tmp_path):
    model, distiller = attached()
    with torch.no_grad():
        for parameter in distiller.adapter.values():
            parameter.normal_(std=0.2)
    save_decoder(model, tmp_path / "model", None)
    distiller.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with distiller.rollout():
        ours = logits(model)
    with torch.no_grad():
        assert (base(TOKENS[None]).logits[0] - ours).abs().max() > 1e-2
        # LoRA on all linear layers: a key that were missed would leave its matrix B at zero.
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(TOKENS[None]).logits[0]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [{"rank": 0}, {"learning_rate": 0.0}, {"targets": ["lm_head"]}])
def test_bad_values_are_named(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        LoRADistiller(**{"learning_rate": 1e-3, **bad})


def test_steps_on_one_batch_bring_the_sparse_policy_nearer():
    """Rollouts once, then the same batch again and again: the loss is that of the rollout first, and falls."""
    model, distiller = attached()
    model.init_weights(0, InitOptions(std=0.3, embedding_std=0.3))
    cache = SparseKVCache(FixedBudget(pages=3), CentroidSelector(), page_size=2, block_size=8, dense_layers=0)
    engine = Engine(model, cache, (0,), EngineConfig(max_rows=16, kv_tokens=1024, max_new_tokens=24), top_k=2)
    with distiller.rollout():
        batch = engine.generate([[1, 2, 3], [4, 5, 6]], 8, SamplingParams())
    micro = pack(batch, range(16), torch.device("cpu"))
    dense_T = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        hidden = response_hidden(model, micro, PackedCausal(micro.lengths))
        dense_T[micro.index_N] = token_logprobs(hidden, model.logits, micro.targets_N, 1.0)[0]

    batch.dense_logprobs_T = dense_T
    losses = [distiller.step(batch, [micro], run_of(cache))["distill/kl"] for _ in range(40)]
    torch.testing.assert_close(losses[0], float(k3(batch.logprobs_T, dense_T).mean()), atol=1e-5, rtol=0)
    assert losses[0] > 1e-3 and losses[-1] < 0.7 * losses[0]
