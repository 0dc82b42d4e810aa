"""The memory plan: sizes against what PyTorch really keeps, totals by hand, refusals that name what helps."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torchao.optim.subclass_8bit import OptimState8bit

from sparrow.attention.packed import PackedCausal
from sparrow.attention.packed_flex import PackedFlex, filled_length
from sparrow.errors import UserError
from sparrow.memory_plan import GIB, PHASES, Job, MemoryPlan, check_fits, plan_memory, plan_table
from sparrow.memory_sizes import (
    Activations,
    OptimizerMemory,
    attention_saved_bytes,
    layer_saved_bytes,
    layer_working_bytes,
    offloaded_bytes,
    optimizer_memory,
    parameter_counts,
    recomputed_bytes,
    saved_bytes,
)
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training import layers
from sparrow.training.layers import prepare_layers
from sparrow.training.logprob import token_logprobs

SMALL = DecoderConfig(
    vocab_size=50, hidden_size=32, intermediate_size=80, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16
)
QWEN3_4B = DecoderConfig(
    vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, max_position_embeddings=40960,
)  # fmt: skip
SHAPES = {
    "tied": SMALL,
    "untied": replace(SMALL, tie_word_embeddings=False),
    "qwen2": replace(SMALL, qk_norm=False, qkv_bias=True),
    "llama": replace(SMALL, qk_norm=False, head_dim=8),
    "4b": QWEN3_4B,
}


def job(**changes: object) -> Job:
    """A job of round numbers; the pool has 8 blocks of 4 tokens of 100 bytes, and the null block."""
    plain = Job(
        config=SMALL, optimizer=OptimizerMemory(8.0), rollout_dtype=torch.bfloat16, kv_tokens=32, block_size=4,
        kv_bytes=100, prompt_tokens=4, max_new_tokens=8, micro_batch_tokens=20, logprob_chunk=2,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def sizes(plan: MemoryPlan) -> dict[str, int]:
    return {part.name: part.size for part in plan.parts}


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_decoder(shape: str) -> None:
    with torch.device("meta"):
        model = Decoder(SHAPES[shape])
    count = parameter_counts(SHAPES[shape])
    assert count.total == sum(p.numel() for p in model.parameters())
    assert count.layer == sum(p.numel() for p in model.model.layers[0].parameters())


def test_the_parameters_of_qwen3_4b() -> None:
    # 4.0B in the model card: 151,936 x 2,560 for the embedding, 36 layers of 100.9M.
    layer = 2560 * 6144 + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert parameter_counts(QWEN3_4B).total == 151936 * 2560 + 2560 + 36 * layer == 4_022_468_096


class Saved:
    """Hooks that sum the bytes of the storages that autograd saves."""

    def __init__(self, left_out: Decoder) -> None:
        self.parameters = {p.untyped_storage().data_ptr() for p in left_out.parameters()}
        self.kept: list[Tensor] = []  # alive, so that no storage is counted twice or reused

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.kept.append(tensor)
        return tensor

    @property
    def size(self) -> int:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self.kept}
        return sum(size for pointer, size in storages.items() if pointer not in self.parameters)


def trained(config: DecoderConfig, dtype: torch.dtype, activations: Activations) -> Decoder:
    model = Decoder(config).to(dtype)
    model.init_weights(0)
    prepare_layers(model, activations != "kept", activations == "offloaded", compiled=False)
    return model


@pytest.mark.parametrize("activations", get_args(Activations))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["tied", "untied", "qwen2", "llama"])
def test_activations_are_what_autograd_keeps(
    shape: str, dtype: torch.dtype, activations: Activations, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Equal heads in fp32, because only CUDA repeats grouped keys and values there.
    config = replace(SHAPES[shape], num_kv_heads=4 if dtype == torch.float32 else 2)
    model, tokens = trained(config, dtype, activations), 64
    device, host = Saved(model), Saved(model)
    # On the CPU save_on_cpu copies nothing: hooks in its place see what it is given.
    monkeypatch.setattr(layers, "save_on_cpu", lambda pin_memory: host.hooks())
    with device.hooks():
        model(torch.arange(tokens) % config.vocab_size, torch.arange(tokens), PackedCausal([tokens]))
    # Offloaded layers hold cosine, sine and the packing by reference, where autograd does not see them.
    unseen = 2 * config.head_dim * dtype.itemsize + 8 if activations == "offloaded" else 0
    assert device.size == tokens * (saved_bytes(config, dtype, activations, flex=False) - unseen)
    assert host.size == tokens * offloaded_bytes(config, dtype, activations)


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["kept", "recomputed"])
def test_activations_are_what_flex_attention_keeps(activations: Activations, device: torch.device) -> None:
    config = replace(SMALL, hidden_size=256, head_dim=64)
    tokens = filled_length(2000)
    model = trained(config, torch.bfloat16, activations).to(device)
    saved, ids = Saved(model), torch.arange(tokens, device=device)
    with saved.hooks():
        model(ids % config.vocab_size, ids, PackedFlex([tokens], device))
    expected = tokens * saved_bytes(config, torch.bfloat16, activations, flex=True)
    assert saved.size == pytest.approx(expected, rel=0.02), "apart from the lists of blocks"


@pytest.mark.parametrize("activations", get_args(Activations))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward_stay_below_the_plan(dtype: torch.dtype, activations: Activations) -> None:
    config = replace(SMALL, vocab_size=500, hidden_size=64, intermediate_size=192, num_layers=6, num_kv_heads=4)
    model, tokens, chunk = trained(config, dtype, activations), 1024, 128
    ids = torch.arange(tokens) % config.vocab_size
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        hidden = model(ids, torch.arange(tokens), PackedCausal([tokens]))
        logprobs, _ = token_logprobs(hidden, model.summing_head(), ids, 1.0, chunk)
        logprobs.sum().backward()
    assert next(model.parameters()).grad is not None
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    weights = sum(p.nbytes for p in model.parameters())
    plan = plan_memory(
        job(config=config, dtype=dtype, activations=activations, micro_batch_tokens=tokens, logprob_chunk=chunk)
    )
    # Here the host is the device. The masters are counted elsewhere.
    beyond = {"weights, fp32", "optimizer state", "gradients, fp32"}
    there = [part for part in plan.parts if "update" in part.phases and not part.allowance]
    planned = sum(part.size for part in there if part.name not in beyond and part.key != "model")
    planned += 2 * weights + sum(plan.host.values())
    assert 0.6 * planned < peak["Total"] <= planned


def test_activations_of_a_layer_by_hand() -> None:
    # E 32, q 64, k and v 32 each, MLP 80; bf16.
    norms = 2 * 32 * (4 + 2 + 2)
    head_norms = (64 + 32) * (4 + 2) + (4 + 2) * 4
    attention = (64 + 32 + 32 + 64) * 2 + 4 * 4 + 64 * 2
    statistics = 2 * 4
    by_hand = norms + head_norms + attention + 4 * 80 * 2 + statistics
    assert layer_saved_bytes(SMALL, torch.bfloat16, flex=False) == by_hand
    ends = 32 * 6 + 4 + 2 * 16 * 2 + 16
    assert saved_bytes(SMALL, torch.bfloat16, "kept", flex=False) == 2 * by_hand + ends
    assert saved_bytes(SMALL, torch.bfloat16, "recomputed", flex=False) == 2 * (32 * 2 + attention) + ends
    assert saved_bytes(SMALL, torch.bfloat16, "offloaded", flex=False) == ends
    assert offloaded_bytes(SMALL, torch.bfloat16, "offloaded") == 2 * 32 * 2
    assert offloaded_bytes(SMALL, torch.bfloat16, "recomputed") == 0
    # The half behind attention is the wider: a norm and the MLP.
    assert recomputed_bytes(SMALL, torch.bfloat16, "recomputed", flex=False) == norms // 2 + 4 * 80 * 2 + 4
    assert recomputed_bytes(SMALL, torch.bfloat16, "offloaded", flex=False) == 32 * 2 + by_hand
    # FlexAttention: E + 2 H D + 2 K D numbers and a sum of exponentials in fp32.
    assert attention_saved_bytes(SMALL, torch.bfloat16, flex=True) == (2 * 64 + 2 * 32) * 2 + 4 * 4
    assert attention_saved_bytes(SMALL, torch.float32, flex=True) == (2 * 64 + 2 * 32) * 4 + 4 * 4
    # fp32: keys and values of 32 each are repeated for 4 heads.
    assert (
        layer_saved_bytes(SMALL, torch.float32, flex=False)
        == 2 * 32 * 12 + 96 * 8 + 24 + 256 * 4 + 16 + 256 + 320 * 4 + 8
    )
    # 3 x 80 x 2 of the MLP against (2 x 64 + 2 x 32) x 6 of the attention
    assert layer_working_bytes(SMALL, torch.bfloat16) == 192 * 6 + 2 * 32 * 6


def test_states_of_adamw_are_what_it_keeps() -> None:
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(value.nbytes for value in optimizer.state[parameter].values() if value.ndim)
    assert kept == 4096 * optimizer_memory("torch.optim.AdamW", {"fused": True}).state


def test_states_of_eight_bits_are_what_torchao_keeps() -> None:
    state = OptimState8bit.zeros((64, 64), True, 256, "cpu")
    kept = state.codes.nbytes + state.scale.nbytes  # the map of 256 entries is shared by all elements
    assert 2 * kept == 4096 * optimizer_memory("torchao.optim.AdamW8bit", {}).state


@pytest.mark.parametrize(
    ("path", "arguments", "expected"),
    [
        ("torch.optim.AdamW", {}, OptimizerMemory(8, step=4)),
        ("torch.optim.AdamW", {"amsgrad": True, "fused": True}, OptimizerMemory(12)),
        ("torchao.optim.AdamW4bit", {}, OptimizerMemory(1.0625)),
        ("sparrow.components.offloaded_adamw.OffloadedAdamW", {}, OptimizerMemory(0, host=16)),
        ("torch.optim.SGD", {}, OptimizerMemory(0)),
        ("torch.optim.SGD", {"momentum": 0.9}, OptimizerMemory(4)),
        ("sparrow.components.optimizer.MuonWithAdamW", {}, OptimizerMemory(8, step=4)),
    ],
)
def test_optimizers_by_name(path: str, arguments: dict[str, object], expected: OptimizerMemory) -> None:
    assert optimizer_memory(path, arguments) == expected


def test_a_plan_by_hand() -> None:
    plan = plan_memory(job())
    total = parameter_counts(SMALL).total
    expected = {
        "weights, fp32": 4 * total,
        "optimizer state": 8 * total,
        "gradients, fp32": 4 * total,
        "engine's weights, bfloat16": 2 * total,
        "KV pool": 9 * 4 * 100,
        "activations kept": 20 * saved_bytes(SMALL, torch.float32, "kept", False),
        "activations of the layer at work": 20 * (layer_working_bytes(SMALL, torch.float32) + 3 * 32 * 4),
        "logits of a chunk": 4 * 2 * 50 * 4,
        "head's gradient, chunk by chunk": 2 * 50 * 32 * 4,
        "CUDA graphs, workspaces, fragments": 4 * GIB,
        "CUDA": GIB,
    }
    assert sizes(plan) == expected
    assert plan.total("rollout", allowances=False) == 14 * total + 3600
    assert plan.total("step", allowances=False) == 16 * total
    assert plan.total("step") == 16 * total + 5 * GIB
    assert plan.host == {}


def test_recomputed_and_offloaded_activations_in_a_plan() -> None:
    flex = {"dtype": torch.bfloat16, "flex": True}
    recomputed = plan_memory(job(activations="recomputed", **flex))
    # Per layer the input of 32, q and output of 64, k and v of 32 each; the norms' figures and what all layers share.
    assert sizes(recomputed)["activations kept"] == 20 * (2 * ((32 + 2 * 64 + 2 * 32) * 2 + 16) + 32 * 6 + 4 + 64 + 16)
    assert sizes(recomputed)["activations recomputed"] == 20 * recomputed_bytes(
        SMALL, torch.bfloat16, "recomputed", True
    )
    assert recomputed.host == {}
    offloaded = plan_memory(job(activations="offloaded", **flex))
    assert offloaded.host == {"inputs of layers": 20 * 2 * 32 * 2}
    assert offloaded.total("update") < plan_memory(job(**flex)).total("update")
    assert plan_table(offloaded, GIB)[-1].startswith("inputs of layers in the host's memory, for each GPU: 0.00")


def test_a_replay_has_no_engine() -> None:
    plan = plan_memory(job(replay=True))
    assert plan.total("rollout", allowances=False) == 12 * parameter_counts(SMALL).total


def test_what_does_not_stand_side_by_side() -> None:
    plan = plan_memory(job(optimizer=OptimizerMemory(8, step=4)))
    by_phase = {phase: {part.name for part in plan.parts if phase in part.phases} for phase in PHASES}
    assert not {"KV pool", "engine's weights, bfloat16"} & (by_phase["score"] | by_phase["update"] | by_phase["step"])
    assert "gradients, fp32" not in by_phase["rollout"] | by_phase["score"]
    assert "activations kept" not in by_phase["rollout"] | by_phase["score"] | by_phase["step"]
    assert all({"weights, fp32", "optimizer state"} <= names for names in by_phase.values())
    assert [phase for phase in PHASES if "temporaries of the step" in by_phase[phase]] == ["step"]


def test_shards_and_replicas() -> None:
    count = parameter_counts(SMALL)
    shards = sizes(plan_memory(job(gpus=4, dtype=torch.bfloat16)))
    own = -(-count.total // 4)
    assert shards["weights, fp32"] == shards["gradients, fp32"] == 4 * own
    assert shards["optimizer state"] == 8 * own
    assert shards["engine's weights, bfloat16"] == 2 * count.total, "each rank's engine has all of them"
    assert shards["layers gathered to compute, bfloat16"] == 2 * (2 * count.layer + count.root)
    assert shards["their gradients, before they are dealt out"] == 6 * (count.layer + count.root)
    pairs = plan_memory(job(gpus=4, replicate=2))
    assert sizes(pairs)["weights, fp32"] == sizes(pairs)["gradients, fp32"] == 4 * -(-count.total // 2)
    assert sizes(pairs)["layers gathered to compute, float32"] == 4 * (2 * count.layer + count.root)
    assert plan_table(pairs, GIB)[0].endswith("of 4 GPUs, the model in 2 shards, 2 copies of it")
    whole = plan_memory(job(gpus=4, replicate=4))
    assert sizes(whole)["weights, fp32"] == 4 * count.total
    assert plan_table(whole, GIB)[0].endswith("of 4 GPUs, the whole model on each")


def test_one_process_in_bf16_is_sharded_over_itself() -> None:
    count = parameter_counts(SMALL)
    one = sizes(plan_memory(job(dtype=torch.bfloat16)))
    assert one["weights, fp32"] == one["gradients, fp32"] == 4 * count.total
    assert one["layers gathered to compute, bfloat16"] == 2 * (2 * count.layer + count.root)
    assert not any("gathered" in name for name in sizes(plan_memory(job())))


def test_reference_offload_and_a_sequence_longer_than_a_micro_batch() -> None:
    total = parameter_counts(SMALL).total
    offloaded = optimizer_memory("sparrow.components.offloaded_adamw.OffloadedAdamW", {})
    plan = plan_memory(job(reference=True, optimizer=offloaded))
    assert sizes(plan)["reference weights, fp32"] == 4 * total
    assert "optimizer state" not in sizes(plan)
    assert plan.host == {"optimizer": 16 * total}
    assert plan_table(plan, GIB)[-1].startswith("optimizer in the host's memory")
    assert job(max_new_tokens=100).forward_tokens == 104
    two = sizes(plan_memory(job(gpus=2, reference=True)))
    assert two["reference weights, fp32"] == two["weights, fp32"], "it is sharded as the policy is"
    assert two["the reference's embedding and head"] == 4 * parameter_counts(SMALL).root


def fits(changed: Job, memory: int) -> bool:
    try:
        check_fits(plan_memory(changed), memory)
    except UserError:
        return False
    return True


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("engine.kv_tokens", {"kv_tokens": 40_000}),
        ("micro_batch_tokens", {"micro_batch_tokens": 400}),
        ("engine.max_new_tokens", {"max_new_tokens": 400}),
        ("logprob_chunk", {"logprob_chunk": 4000}),
    ],
)
def test_the_limit_that_a_refusal_names_is_the_largest_that_fits(key: str, changes: dict[str, int]) -> None:
    memory = 1_500_000
    assert fits(job(), memory)
    with pytest.raises(UserError) as caught:
        check_fits(plan_memory(job(**changes)), memory)
    (name,) = changes
    found = re.search(rf"{re.escape(key)} {changes[name]} can be (\d+) at most", str(caught.value))
    assert found, str(caught.value)
    limit = int(found[1])
    assert fits(job(**{name: limit}), memory)
    step = 4 if name == "kv_tokens" else 1  # whole blocks
    assert not fits(job(**{name: limit + step}), memory)


def test_shorter_responses_go_with_smaller_micro_batches() -> None:
    both = {"max_new_tokens": 396, "micro_batch_tokens": 420}
    with pytest.raises(UserError) as caught:
        check_fits(plan_memory(job(**both)), 1_500_000)
    found = re.search(
        r"max_new_tokens 396 can be (\d+) at most, micro_batch_tokens 420 can be (\d+)", str(caught.value)
    )
    assert found, str(caught.value)
    limits = {"max_new_tokens": int(found[1]), "micro_batch_tokens": int(found[2])}
    assert limits["micro_batch_tokens"] == limits["max_new_tokens"] + 4, "and the prompt"
    assert fits(job(**limits), 1_500_000)
    for name, limit in limits.items():
        assert not fits(job(**{**limits, name: limit + 1}), 1_500_000)


@pytest.mark.parametrize(
    ("activations", "option"),
    [
        ("kept", "activation_checkpointing: true keeps less, or "),
        ("recomputed", "offload_activations: true"),
        ("offloaded", ""),
    ],
)
def test_activations_that_do_not_fit_name_what_keeps_less(activations: Activations, option: str) -> None:
    with pytest.raises(UserError, match=r"micro_batch_tokens 2000 can be \d+ at most") as caught:
        check_fits(plan_memory(job(micro_batch_tokens=2000, activations=activations)), 1_500_000)
    assert option in str(caught.value) and ("true keeps less" in str(caught.value)) == bool(option)


def test_a_part_that_cannot_shrink_enough_says_so() -> None:
    with pytest.raises(UserError, match=r"engine.kv_tokens 40000 is not all that must be smaller"):
        check_fits(plan_memory(job(kv_tokens=40_000)), 300_000)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "optimizer state: optimizer: torchao.optim.AdamW8bit"),
        ({"optimizer": OptimizerMemory(2)}, "weights, fp32: model: "),
        ({"rollout_dtype": torch.float32, "optimizer": OptimizerMemory(0), "dtype": torch.bfloat16}, "model: "),
    ],
)
def test_a_refusal_names_the_largest_part(changes: dict[str, object], words: str) -> None:
    # A model so wide that its weights outweigh all else.
    wide = replace(SMALL, hidden_size=1024, intermediate_size=4096, vocab_size=2)
    with pytest.raises(UserError, match=r"^memory: the (rollout|update|step) phase needs") as caught:
        check_fits(plan_memory(job(config=wide, **changes)), 2**24)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_allowances_alone_refuse_nothing() -> None:
    plan = plan_memory(job())
    assert plan.total("rollout") > GIB
    check_fits(plan, GIB)


def test_the_table_adds_up() -> None:
    plan = plan_memory(job(config=QWEN3_4B, kv_tokens=7034 * 128, block_size=128, kv_bytes=147456))
    *heading, columns = plan_table(plan, 139 * GIB)[:4]
    rows = plan_table(plan, 139 * GIB)[4:]
    assert heading[0] == "memory in GiB, 139.0 on each of 1 GPU, the whole model on each"
    assert heading[1] == "computes in float32, activations kept, 20 tokens in a forward"
    assert heading[2].endswith("KV with landmarks 144")
    assert columns.split() == list(PHASES)
    totals = next(row.split()[1:] for row in rows if row.startswith("total"))
    left = next(row.split()[1:] for row in rows if row.startswith("left"))
    assert [float(a) + float(b) for a, b in zip(totals, left, strict=True)] == pytest.approx([139.0] * 4, abs=0.01)
    # 7,035 blocks of 128 tokens of 2 x 36 x 8 x 128 bf16 figures
    assert next(row.split()[-1] for row in rows if row.startswith("KV pool")) == "123.66"
