"""The packed decoder with its fused kernels against the trainer's, through prefill and decode on one cache each.

Axes: T tokens, B rows, E hidden size, V vocabulary, X = (H + 2 K) * D, I intermediate size.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention.packed import PackedCausal
from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, HeadSoftmaxSelector, QuestSelector
from sparrow.kernels.options_file import cache_file
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.rollout_decoder import RolloutDecoder

pytestmark = pytest.mark.gpu

SHAPES = {
    "qwen3": {"num_heads": 8, "num_kv_heads": 2, "qk_norm": True, "tie_word_embeddings": True},
    "qwen2": {"num_heads": 10, "num_kv_heads": 2, "qk_norm": False, "qkv_bias": True, "tie_word_embeddings": False},
    "llama": {"num_heads": 4, "num_kv_heads": 4, "qk_norm": False, "tie_word_embeddings": False},
}
LENGTHS = [17, 160, 255, 256, 333]
BLOCKS, STEPS = 3, 12  # blocks per row; 12 steps take every row over the edge of a page, two over that of a block


class StrongestHeadSelector:
    """One that no kernel knows: the largest product of a page's centroid with any head's query."""

    landmarks_per_page = 1
    kernel = None

    def landmarks(self, keys: Tensor) -> Tensor:
        return keys.mean(-2, keepdim=True)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        return torch.einsum("bkgd,bkpd->bkgp", q_BKGD.float(), landmarks_BKPMD[..., 0, :].float()).amax(2)


SELECTORS = [CentroidSelector(), HeadSoftmaxSelector(), QuestSelector(), StrongestHeadSelector()]
BY_NAME = {"ids": lambda selector: "dense" if selector is None else type(selector).__name__}
CACHES = pytest.mark.parametrize("selector", [None, *SELECTORS], **BY_NAME)


def kv_cache(selector, backend: str) -> DenseKVCache | SparseKVCache:
    if selector is None:
        return DenseKVCache(backend=backend)
    return SparseKVCache(StepSchedule(pages=[4, 5, 7], bin_width=100), selector, dense_layers=1, backend=backend)


def decoder(kind: str, device: torch.device, seed: int = 0) -> Decoder:
    """Norms away from one and biases away from zero: at their defaults they could be forgotten unnoticed."""
    config = DecoderConfig(
        vocab_size=304, hidden_size=128, intermediate_size=256, num_layers=3, head_dim=32, max_position_embeddings=512,
        **SHAPES[kind],
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(seed, InitOptions(std=0.1, embedding_std=0.1))
    rng = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=rng)
    return model.to(device)


def packed(model: Decoder, device: torch.device, dtype: torch.dtype = torch.float32) -> RolloutDecoder:
    copy = RolloutDecoder(model.config, device, dtype)
    copy.load(model)
    return copy


@pytest.fixture(autouse=True)
def options(device, tmp_path, monkeypatch) -> Callable[..., None]:
    """Keeps this user's measured options out, and writes others for batches of up to 16 rows."""
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path))

    def write(config: DecoderConfig, shares: int, dtype: torch.dtype = torch.float32) -> None:
        E, D, size = config.hidden_size, config.head_dim, config.intermediate_size
        width = (config.num_heads + 2 * config.num_kv_heads) * D
        prefix = f"{torch.cuda.get_device_name(device)} {str(dtype).removeprefix('torch.')} 16x"
        split = [(width, E), (E, config.num_heads * D), (E, size), (config.vocab_size, E)]
        table = {f"{prefix}{n}x{k}": [16, 32, shares, 4, 3, 0] for n, k in split}
        table[f"{prefix}{2 * size}x{E} gated"] = [16, 32, 1, 4, 3, 0]
        cache_file().parent.mkdir()
        cache_file().write_text(json.dumps(table))

    return write


@torch.no_grad()
def logits(model, cache, config: DecoderConfig, device: torch.device, dtype=torch.float32) -> Tensor:
    """[1 + STEPS, B, V]: after a packed prefill of all prompts, and after each decode step over given tokens."""
    rng = torch.Generator().manual_seed(7)
    tokens = [torch.randint(config.vocab_size, (n + STEPS,), generator=rng).to(device) for n in LENGTHS]
    table_BN = (torch.randperm(BLOCKS * len(LENGTHS), generator=rng) + 1).view(-1, BLOCKS).to(device)
    cache.allocate(config, table_BN.numel(), device, dtype)
    positions = [torch.arange(n, device=device) for n in LENGTHS]
    slots = [row[at // 128] * 128 + at % 128 for row, at in zip(table_BN, positions, strict=True)]
    prompts_T = torch.cat([t[:n] for t, n in zip(tokens, LENGTHS, strict=True)])
    hidden_TE = model(prompts_T, torch.cat(positions), cache.prefill(torch.cat(slots), LENGTHS))
    lengths_B = torch.tensor(LENGTHS, device=device)
    found = [model.logits(hidden_TE[lengths_B.cumsum(0) - 1])]
    for step in range(STEPS):
        tokens_B = torch.stack([t[n + step] for t, n in zip(tokens, LENGTHS, strict=True)])
        hidden_BE = model(tokens_B, lengths_B + step, cache.decode(table_BN, lengths_B + step + 1))
        found.append(model.logits(hidden_BE))
    return torch.stack(found)


@CACHES
@pytest.mark.parametrize(
    ("kind", "shares"), [("qwen3", 0), ("qwen3", 1), ("qwen3", 2), ("qwen2", 2), ("llama", 1)],
    ids=["qwen3-library", "qwen3-1", "qwen3-2", "qwen2-2", "llama-1"],
)  # fmt: skip
def test_logits_are_the_trainers(device, options, kind, shares, selector):
    model = decoder(kind, device)
    if shares:
        options(model.config, shares)
    expected = logits(model, kv_cache(selector, "gather"), model.config, device)
    got = logits(packed(model, device), kv_cache(selector, "triton"), model.config, device)
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@CACHES
def test_in_bf16_it_is_as_far_from_fp32_as_the_trainers_model_in_bf16(device, selector):
    """By the mean difference of log-probs: of a selection, rounding may flip pages that nearly tie, in either."""
    model = decoder("qwen3", device)
    exact = logits(model, kv_cache(selector, "gather"), model.config, device).log_softmax(-1)
    copy = packed(model, device, torch.bfloat16)
    rounded = model.to(torch.bfloat16)
    theirs, ours = (
        logits(m, kv_cache(selector, backend), model.config, device, torch.bfloat16).log_softmax(-1)
        for m, backend in ((rounded, "gather"), (copy, "triton"))
    )
    trainers_error, our_error = (float((x - exact).abs().mean()) for x in (theirs, ours))
    assert 1e-4 < trainers_error < 0.1, "rounding shows, and is no other model"
    assert our_error < 1.5 * trainers_error


@torch.no_grad()
@pytest.mark.parametrize("shares", [0, 1, 2], ids=["library", "1", "2"])
def test_a_bias_is_added_before_the_projection_is_rounded(device, options, shares):
    """Values of the first layer in the cache, from prefill and from decode: rounded twice, a quarter would differ."""
    model = decoder("qwen2", device).to(torch.bfloat16)
    if shares:
        options(model.config, shares, torch.bfloat16)
    table_B1 = torch.arange(1, 17, device=device)[:, None]
    tokens_2B = torch.randint(304, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    zeros_B, slots_B = torch.zeros(16, dtype=torch.long, device=device), table_B1[:, 0] * 128
    found = []
    for runner, backend in ((model, "gather"), (packed(model, device, torch.bfloat16), "triton")):
        cache = DenseKVCache(backend=backend)
        cache.allocate(model.config, 16, device, torch.bfloat16)
        runner(tokens_2B[0], zeros_B, cache.prefill(slots_B, [1] * 16))
        runner(tokens_2B[1], zeros_B + 1, cache.decode(table_B1, zeros_B + 2))
        values_KSD = cache.pool.values_KSD[0]
        found.append(torch.stack((values_KSD[:, slots_B], values_KSD[:, slots_B + 1])))
    differing = (found[0] != found[1]).double().mean((1, 2, 3))
    # A sum in another order is rounded to the neighbour now and then.
    assert differing.max() < 0.03


@pytest.mark.parametrize("selector", [None, HeadSoftmaxSelector()], ids=["dense", "sparse"])
def test_flex_and_gather_serve_it_too(device, selector):
    """FlexAttention reads its lists as Triton does; gather takes q, k and v after eager norms and rotation."""
    model = decoder("qwen2", device)
    copy = packed(model, device)
    expected = logits(model, kv_cache(selector, "gather"), model.config, device)
    for backend in ("flex", "gather"):
        got = logits(copy, kv_cache(selector, backend), model.config, device)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


@torch.no_grad()
def packed_logits(model, config: DecoderConfig, device: torch.device) -> Tensor:
    """Of one sequence without a cache."""
    tokens_T = torch.arange(40, device=device) * 7 % config.vocab_size
    attention = PackedCausal([40], device)
    return model.logits(model(tokens_T, torch.arange(40, device=device), attention))


def test_a_load_fills_the_same_memory(device):
    """CUDA graphs keep the addresses."""
    first, second = decoder("qwen2", device), decoder("qwen2", device, seed=1)
    copy = packed(first, device)
    weights = [copy.embedding_VE, copy.head_VE, *(layer.qkv_XE for layer in copy.layers)]
    addresses = [weight.data_ptr() for weight in weights]
    copy.load(second)
    assert [weight.data_ptr() for weight in weights] == addresses
    got, expected = (packed_logits(model, first.config, device) for model in (copy, second))
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def test_active_adapters_are_part_of_the_weights(device):
    model = decoder("qwen3", device)
    base = packed_logits(model, model.config, device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted = packed_logits(model, model.config, device)
    assert (adapted - base).abs().max() > 0.1
    torch.testing.assert_close(packed_logits(packed(model, device), model.config, device), adapted, atol=2e-4, rtol=0)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.enable_adapters(False)
    torch.testing.assert_close(packed_logits(packed(model, device), model.config, device), base, atol=2e-4, rtol=0)
