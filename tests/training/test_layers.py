"""Layers that recompute, offload or compile: the same gradients, and less that is kept for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparrow.attention.packed import PackedCausal
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training.layers import prepare_layers

CONFIG = DecoderConfig(
    vocab_size=61, hidden_size=32, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=256, qk_norm=True,
)  # fmt: skip
LENGTHS = [30, 1, 33]
TOKENS = sum(LENGTHS)
KINDS = {"recompute": (True, False, False), "offload": (True, True, False)}


def build(*kind: bool, device: torch.device | str = "cpu") -> Decoder:
    model = Decoder(CONFIG)
    model.init_weights(0)
    if kind:
        prepare_layers(model, *kind)
    return model.to(device)


def final_states(model: Decoder, lengths: list[int] = LENGTHS) -> Tensor:
    device = model.head_weight.device
    attention = PackedCausal(lengths, device)
    tokens_T = torch.arange(sum(lengths), device=device) % CONFIG.vocab_size
    return model(tokens_T, attention.positions_T, attention)


def gradients(model: Decoder, lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    model.zero_grad()
    final_states(model, lengths).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: Decoder) -> int:
    """Held for the backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}
    alive = []

    def count(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        alive.append(x)  # else another tensor may get its address
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        final_states(model, [TOKENS])
    return sum(nbytes for address, nbytes in saved.items() if address not in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_bit_equal(kind: str) -> None:
    plain, prepared = build(), build(*KINDS[kind])
    assert torch.equal(final_states(prepared), final_states(plain))
    expected = gradients(plain)
    ours = gradients(prepared)
    assert ours.keys() == expected.keys() and len(ours) == len(list(plain.parameters()))
    for name in expected:
        assert torch.equal(ours[name], expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_layers_have_the_same_gradients(kind: str, process_group: None) -> None:
    """Sharded first, as the trainer does: a layer's weights are whole again when its halves are recomputed."""
    expected, model = gradients(build()), build()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    prepare_layers(model, *KINDS[kind])
    for name, gradient in gradients(model).items():
        assert isinstance(gradient, DTensor)
        torch.testing.assert_close(gradient.to_local(), expected.pop(name), atol=1e-6, rtol=1e-5)
    assert not expected


def test_what_is_kept_for_the_backward() -> None:
    plain, recomputed, offloaded = (saved_bytes(build(*kind)) for kind in ((), *KINDS.values()))
    per_token = 2 * (4 + 2) * 16 + CONFIG.hidden_size  # q and output, k and v, the layer's input
    expected = TOKENS * CONFIG.num_layers * per_token * 4
    assert expected < recomputed < 1.5 * expected
    assert plain > 3 * recomputed
    assert offloaded < 5 * TOKENS * CONFIG.hidden_size * 4, "nothing of the layers: the final norm, tokens, factors"


def test_a_layer_without_gradient_is_not_recomputed() -> None:
    calls = []
    model = build(*KINDS["recompute"])
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        final_states(model)
    assert len(calls) == 1
    gradients(model)
    assert len(calls) == 3, "once forward, once backward"


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_layers_serve_all_lengths(device: torch.device, recompute: bool) -> None:
    torch._dynamo.reset()
    plain, prepared = build(device=device), build(recompute, False, True, device=device)
    counter = torch._dynamo.utils.counters["stats"]
    for number, lengths in enumerate(([30, 1, 33], [64], [100, 7], [19, 80, 2])):
        expected, ours = gradients(plain, lengths), gradients(prepared, lengths)
        for name in expected:
            torch.testing.assert_close(ours[name], expected[name], atol=1e-4, rtol=1e-3)
        if number == 0:
            compiled = counter["unique_graphs"]
    assert counter["unique_graphs"] == compiled > 0, "later lengths and layers compile nothing"
