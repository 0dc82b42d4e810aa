from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sparrow.attention.packed import PackedCausal
from sparrow.components.budget import FixedBudget
from sparrow.components.distill_loss import FullKL, SampledK3, TopKKL, k3
from sparrow.components.distiller import DistillRun, LoRADistiller
from sparrow.components.kv_cache import SparseKVCache
from sparrow.components.loss import ClippedSurrogate
from sparrow.components.selector import CentroidSelector
from sparrow.engine import weights as weights_module
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.weights import MergedWeights
from sparrow.errors import UserError
from sparrow.models.checkpoint import load_decoder, save_decoder
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training.logprob import score_tokens
from sparrow.training.packing import pack, response_hidden

CONFIG = DecoderConfig(
    vocab_size=12, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
)
TOKENS = torch.arange(10)


def attached(**arguments) -> tuple[Decoder, LoRADistiller]:
    torch.manual_seed(0)
    model = Decoder(CONFIG)
    model.init_weights(0)
    distiller = LoRADistiller(**{"learning_rate": 1e-3, "rank": 2, **arguments})
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


def test_it_begins_with_an_exported_adapter(tmp_path):
    model, first = attached()
    with torch.no_grad():
        for parameter in first.adapter.values():
            parameter.normal_(std=0.2)
    first.export(tmp_path)
    other_model, second = attached(adapter=str(tmp_path))
    assert torch.equal(logits(other_model), logits(model)), "it is off"
    with first.rollout(), second.rollout():
        assert torch.equal(logits(other_model), logits(model))
    trained = {id(p) for group in second.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in second.adapter.values()}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 3}, "has r 2, the adapter that it is to begin has rank 3"),
        ({"alpha": 8}, "has lora_alpha 16, .* has alpha 8"),
        ({"targets": ["q_proj"]}, "does not fit the model: .* is no module of the model"),
        ({"adapter": "nowhere"}, "nowhere holds no adapter_config.json"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, other, message):
    attached()[1].export(tmp_path)
    with pytest.raises(UserError, match=rf"distiller\.adapter: .*{message}"):
        attached(**{"adapter": str(tmp_path), **other})


@pytest.mark.real
def test_of_a_real_model_too(real_checkpoint, tmp_path):
    """Dense log-probs to the last bit with the adapter loaded and disabled; logits equal after export and reload."""
    tokens_T = torch.randint(1000, (200,), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logprobs(model: Decoder) -> torch.Tensor:
        hidden_TE = model(tokens_T, torch.arange(200), PackedCausal([200]))
        return model.logits(hidden_TE).log_softmax(-1)

    model = load_decoder(real_checkpoint)
    before = logprobs(model)
    distiller = LoRADistiller(learning_rate=1e-3)
    distiller.attach(model)
    with torch.no_grad():
        for parameter in distiller.adapter.values():
            parameter.normal_(std=0.02)
    assert torch.equal(logprobs(model), before)
    with distiller.rollout():
        ours = logprobs(model)
    assert (ours - before).abs().max() > 1e-2
    assert torch.equal(logprobs(model), before)
    distiller.export(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(real_checkpoint, dtype=torch.float32)
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")(tokens_T[None]).logits[0].log_softmax(-1)
    print(f"\nafter export and reload by peft: max difference {(theirs - ours).abs().max():.2e} nats")
    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"learning_rate": 0.0},
        {"targets": ["lm_head"]},
        {"share": 0.0},
        {"share": 1.5},
        {"kl_weight": 0.0},
        {"teacher": "yesterday"},
        {"rate_factor": 5.0},
    ],
)
def test_bad_values_are_named(bad):
    with pytest.raises(UserError, match=next(iter(bad))):
        LoRADistiller(**{"learning_rate": 1e-3, **bad})


def test_whole_distributions_are_not_recorded():
    with pytest.raises(UserError, match="teacher: current"):
        LoRADistiller(learning_rate=1e-3, loss=FullKL())
    assert LoRADistiller(learning_rate=1e-3, loss=TopKKL(7)).recorded_top_k == 7
    assert LoRADistiller(learning_rate=1e-3, loss=TopKKL(7), teacher="current").recorded_top_k == 0
    assert LoRADistiller(learning_rate=1e-3).recorded_top_k == 0


@pytest.mark.parametrize(("share", "count"), [(1.0, 300), (0.1, 30), (0.3, 90), (1 / 3, 100)])
def test_the_share_is_exact_spread_out_and_goes_by_the_prompt(share, count):
    distiller = LoRADistiller(learning_rate=1e-3, share=share)
    numbers_S = torch.arange(300).repeat_interleave(2)
    chosen_S = distiller.chosen(numbers_S)
    assert chosen_S[::2].sum() == count and torch.equal(chosen_S[::2], chosen_S[1::2])
    gaps = chosen_S[::2].nonzero().flatten().diff()
    assert gaps.max() - gaps.min() <= 1
    order = torch.randperm(600)
    assert torch.equal(distiller.chosen(numbers_S[order]), chosen_S[order])


CACHE = SparseKVCache(FixedBudget(pages=3), CentroidSelector(), page_size=2, block_size=8, dense_layers=0)


def rolled_out(distiller: LoRADistiller, model: Decoder, top_k: int = 2):
    """A batch of sparse rollouts with its dense scores, and one micro-batch of it all."""
    model.init_weights(0, InitOptions(std=0.3, embedding_std=0.3))
    engine = Engine(model, CACHE, (0,), EngineConfig(max_rows=16, kv_tokens=1024, max_new_tokens=24), top_k=2)
    with distiller.rollout():
        batch = engine.generate([[1, 2, 3], [4, 5, 6]], 8, SamplingParams())
    engine.sleep()
    micro = pack(batch, range(16), torch.device("cpu"))
    batch.dense_logprobs_T = torch.zeros(batch.num_tokens)
    batch.dense_top_ids_TK = torch.zeros(batch.num_tokens, top_k, dtype=torch.int64)
    batch.dense_top_logprobs_TK = torch.zeros(batch.num_tokens, top_k)
    with torch.no_grad():
        hidden = response_hidden(model, micro, PackedCausal(micro.lengths))
        scores = score_tokens(hidden, model.logits, micro.targets_N, 1.0, top_k)
    batch.dense_logprobs_T[micro.index_N] = scores.logprobs_N
    batch.dense_top_ids_TK[micro.index_N] = scores.top_ids_NK
    batch.dense_top_logprobs_TK[micro.index_N] = scores.top_logprobs_NK
    return batch, micro


def sparse_logprobs(distiller: LoRADistiller, model: Decoder, micro) -> torch.Tensor:
    """The whole distributions of the sparse policy, [N, V]."""
    with distiller.rollout(), torch.no_grad():
        hidden = response_hidden(model, micro, run_of(CACHE).attention(micro))
        return model.logits(hidden).log_softmax(-1)


@pytest.mark.parametrize(
    ("loss", "teacher"),
    [
        (SampledK3(), "before_step"),
        (SampledK3(), "current"),
        (TopKKL(4), "before_step"),
        (TopKKL(4, "reverse"), "current"),
        (FullKL(), "current"),
        (FullKL("reverse"), "current"),
    ],
)
def test_steps_on_one_batch_bring_the_sparse_policy_nearer(loss, teacher):
    """Rollouts once, then the same batch again and again: the loss falls, and the exact divergence with it."""
    model, distiller = attached(loss=loss, teacher=teacher, learning_rate=2e-3)
    batch, micro = rolled_out(distiller, model, top_k=5)
    with torch.no_grad():
        dense_NV = model.logits(response_hidden(model, micro, PackedCausal(micro.lengths))).log_softmax(-1)

    def exact() -> float:
        return float((dense_NV.exp() * (dense_NV - sparse_logprobs(distiller, model, micro))).sum(-1).mean())

    start = exact()
    losses = [distiller.step(batch, [micro], run_of(CACHE))["distill/kl"] for _ in range(30)]
    if isinstance(loss, SampledK3):
        rollouts = float(k3(batch.logprobs_T, batch.dense_logprobs_T).mean())
        torch.testing.assert_close(losses[0], rollouts, atol=1e-5, rtol=0)
    assert losses[0] > 1e-3 and losses[-1] < 0.7 * losses[0]
    assert exact() < start


def test_the_two_teachers_differ_once_the_dense_weights_have_moved():
    values = {}
    for teacher in ("before_step", "current"):
        model, distiller = attached(loss=TopKKL(4), teacher=teacher)
        batch, micro = rolled_out(distiller, model, top_k=4)
        first = distiller.step(batch, [micro], run_of(CACHE))["distill/kl"]
        with torch.no_grad():
            for parameter in distiller.base:
                parameter.mul_(1.2)
        values[teacher] = first, distiller.step(batch, [micro], run_of(CACHE))["distill/kl"]
    assert values["before_step"][0] == pytest.approx(values["current"][0], abs=1e-6)
    assert abs(values["before_step"][1] - values["current"][1]) > 1e-3


def test_the_ppo_term_is_the_clipped_surrogate_of_the_sparse_policy_plus_lambda_times_the_divergence():
    gradients = {}
    for name, arguments in {
        "both": {"ppo": ClippedSurrogate(), "kl_weight": 0.1},
        "ppo": {"ppo": ClippedSurrogate(), "kl_weight": 1e-9},
        "kl": {},
    }.items():
        model, distiller = attached(max_grad_norm=1e9, **arguments)
        batch, micro = rolled_out(distiller, model)
        batch.advantages_S = torch.linspace(-1, 1, 16)
        seen: dict[str, torch.Tensor] = {}
        distiller.optimizer.register_step_pre_hook(
            lambda *_, seen=seen, distiller=distiller: seen.update(
                {name: p.grad.clone() for name, p in distiller.adapter.items()}
            )
        )
        metrics = distiller.step(batch, [micro], run_of(CACHE))
        gradients[name] = seen
        if name == "both":
            # On the first step the ratio is 1: the loss is minus the mean advantage over tokens, and nothing is cut.
            mean = float(batch.advantages_S[batch.sequence_T].mean())
            assert metrics["distill/ppo_loss"] == pytest.approx(-mean, abs=1e-4)
            assert metrics["distill/ppo_clipped"] == 0.0
        else:
            assert ("distill/ppo_loss" in metrics) is (name == "ppo")
    for name, gradient in gradients["both"].items():
        torch.testing.assert_close(gradient, gradients["ppo"][name] + 0.1 * gradients["kl"][name], atol=1e-6, rtol=1e-3)


def test_the_rate_follows_the_base_rate_where_it_is_a_factor():
    model, distiller = attached(learning_rate=None, rate_factor=5.0)
    batch, micro = rolled_out(distiller, model)
    rates = [distiller.step(batch, [micro], run_of(CACHE, base))["distill/lr"] for base in (1e-4, 2e-5)]
    assert rates == pytest.approx([5e-4, 1e-4])
    assert distiller.optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)


def test_a_step_without_a_token_leaves_all_as_it_is():
    model, distiller = attached()
    batch, _ = rolled_out(distiller, model)
    before = {name: p.detach().clone() for name, p in distiller.adapter.items()}
    assert distiller.step(batch, [], run_of(CACHE)) == {"distill/tokens": 0.0}
    assert all(torch.equal(before[name], p) for name, p in distiller.adapter.items())


def test_an_adapter_of_a_half_precision_model_is_fp32():
    model = Decoder(CONFIG).to(torch.bfloat16)
    distiller = LoRADistiller(learning_rate=1e-3, rank=2)
    distiller.attach(model)
    assert {p.dtype for p in distiller.adapter.values()} == {torch.float32}
    with distiller.rollout():
        assert logits(model).isfinite().all()


def filled(distiller: LoRADistiller) -> None:
    with torch.no_grad():
        for parameter in distiller.adapter.values():
            parameter.normal_(std=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_in_the_engine_leaves_no_rounding_behind(dtype):
    """The rollout is that of the adapter; afterwards the dense log-probs are those of before, to the last bit."""
    model, distiller = attached()
    model.init_weights(0, InitOptions(std=0.3, embedding_std=0.3))
    model.to(dtype)
    filled(distiller)
    before, weights = logits(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    limits = EngineConfig(max_rows=16, kv_tokens=1024, max_new_tokens=24)
    batches = []
    for own in (MergedWeights(model), None):
        engine = Engine(model, CACHE, (0,), limits, top_k=2, weights=own)
        with distiller.rollout():
            batches.append(engine.generate([[1, 2, 3], [4, 5, 6]], 8, SamplingParams()))
            if own is not None:
                assert all(layer.merged for layer in distiller.layers)
                assert 0 < own.probe_difference < 0.25, "the probe has seen both"
            engine.sleep()
        assert not any(layer.merged for layer in distiller.layers)
        assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
        assert torch.equal(logits(model), before)
    merged, beside = batches
    if dtype == torch.float32:
        assert torch.equal(merged.tokens_T, beside.tokens_T)
        torch.testing.assert_close(merged.logprobs_T, beside.logprobs_T, atol=1e-5, rtol=1e-5)


def test_an_interrupted_rollout_takes_the_adapter_out_of_the_weights():
    model, distiller = attached()
    filled(distiller)
    before = logits(model)
    engine = Engine(
        model, CACHE, (0,), EngineConfig(max_rows=16, kv_tokens=1024, max_new_tokens=24), weights=MergedWeights(model)
    )

    def stop(tokens: int, sequences: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), distiller.rollout():
        engine.generate([[1, 2, 3]], 2, SamplingParams(), on_step=stop)
    assert torch.equal(logits(model), before)


def test_a_merge_that_makes_another_model_is_found(monkeypatch):
    """A delta of the wrong adapter, or added twice."""
    model, distiller = attached()
    filled(distiller)
    before = logits(model)
    monkeypatch.setattr(weights_module, "effective_weight", lambda layer: layer.base_layer.weight * 3)
    own = MergedWeights(model)
    with distiller.rollout(), pytest.raises(RuntimeError, match="merged"):
        own.wake()
    assert torch.equal(logits(model), before), "and is taken back"
