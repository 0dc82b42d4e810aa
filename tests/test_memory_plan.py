"""The memory plan: sizes against what PyTorch really keeps, totals by hand, refusals that name what helps."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchao.optim.subclass_8bit import OptimState8bit

from sparrow.attention.packed import PackedCausal
from sparrow.errors import UserError
from sparrow.memory_plan import GIB, PHASES, Job, MemoryPlan, check_fits, plan_memory, plan_table
from sparrow.memory_sizes import (
    OptimizerMemory,
    layer_saved_bytes,
    layer_working_bytes,
    optimizer_memory,
    parameter_counts,
    saved_bytes,
)
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig

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


def kept_by_autograd(config: DecoderConfig, dtype: torch.dtype, tokens: int) -> float:
    """Bytes a token that the real forward keeps for its backward, parameters apart."""
    model = Decoder(config).to(dtype)
    model.init_weights(0)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []  # alive, so that no storage is counted twice or reused

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.arange(tokens) % config.vocab_size, torch.arange(tokens), PackedCausal([tokens]))
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    return sum(size for pointer, size in storages.items() if pointer not in parameters) / tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["tied", "untied", "qwen2", "llama"])
def test_activations_are_what_autograd_keeps(shape: str, dtype: torch.dtype) -> None:
    # Equal heads in fp32, because only CUDA repeats grouped keys and values there.
    kv_heads = 4 if dtype == torch.float32 else 2
    config = replace(SHAPES[shape], num_kv_heads=kv_heads)
    assert kept_by_autograd(config, dtype, 64) == saved_bytes(config, dtype, checkpointing=False)


def test_activations_of_a_layer_by_hand() -> None:
    # E 32, q 64, k and v 32 each, MLP 80; bf16.
    norms = 2 * 32 * (4 + 2 + 2)
    head_norms = (64 + 32) * (4 + 2) + (4 + 2) * 4
    attention = (64 + 32 + 32 + 64) * 2 + 4 * 4 + 64 * 2
    statistics = 2 * 4
    by_hand = norms + head_norms + attention + 4 * 80 * 2 + statistics
    assert layer_saved_bytes(SMALL, torch.bfloat16) == by_hand
    ends = 32 * 6 + 4 + 2 * 16 * 2 + 16
    assert saved_bytes(SMALL, torch.bfloat16, checkpointing=False) == 2 * by_hand + ends
    assert saved_bytes(SMALL, torch.bfloat16, checkpointing=True) == 2 * 32 * 2 + by_hand + ends
    # fp32: keys and values of 32 each are repeated for 4 heads.
    assert layer_saved_bytes(SMALL, torch.float32) == 2 * 32 * 12 + 96 * 8 + 24 + 256 * 4 + 16 + 256 + 320 * 4 + 8
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
        ("sparrow.components.offloaded_adamw.OffloadedAdamW", {"lr": 1e-6}, OptimizerMemory(0, host=16)),
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
        "activations kept": 20 * saved_bytes(SMALL, torch.float32, False),
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
    assert plan.host == 0


def test_what_does_not_stand_side_by_side() -> None:
    plan = plan_memory(job(optimizer=OptimizerMemory(8, step=4)))
    by_phase = {phase: {part.name for part in plan.parts if phase in part.phases} for phase in PHASES}
    assert not {"KV pool", "engine's weights, bfloat16"} & (by_phase["score"] | by_phase["update"] | by_phase["step"])
    assert "gradients, fp32" not in by_phase["rollout"] | by_phase["score"]
    assert "activations kept" not in by_phase["rollout"] | by_phase["score"] | by_phase["step"]
    assert all({"weights, fp32", "optimizer state"} <= names for names in by_phase.values())
    assert [phase for phase in PHASES if "gradients summed, temporaries of the step" in by_phase[phase]] == ["step"]


def test_shards_and_replicas() -> None:
    count = parameter_counts(SMALL)
    shards = sizes(plan_memory(job(gpus=4, shards=4, dtype=torch.bfloat16)))
    own = -(-count.total // 4)
    assert shards["weights, fp32"] == shards["gradients, fp32"] == 4 * own
    assert shards["optimizer state"] == 8 * own
    assert shards["engine's weights, bfloat16"] == 2 * count.total, "each rank's engine has all of them"
    assert shards["layers gathered to compute, bfloat16"] == 2 * (2 * count.layer + count.root)
    assert shards["their gradients, before they are dealt out"] == 6 * (count.layer + count.root)
    replicas = sizes(plan_memory(job(gpus=4)))
    assert replicas["weights, fp32"] == 4 * count.total
    assert replicas["gradients summed, temporaries of the step"] == 4 * count.total
    assert not any("gathered" in name for name in replicas)


def test_reference_offload_and_a_sequence_longer_than_a_micro_batch() -> None:
    total = parameter_counts(SMALL).total
    plan = plan_memory(
        job(reference=True, optimizer=optimizer_memory("sparrow.components.offloaded_adamw.OffloadedAdamW", {}))
    )
    assert sizes(plan)["reference weights, fp32"] == 4 * total
    assert "optimizer state" not in sizes(plan)
    assert plan.host == 16 * total
    assert plan_table(plan, GIB)[-1].startswith("optimizer in the host's memory")
    assert job(max_new_tokens=100).forward_tokens == 104


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
