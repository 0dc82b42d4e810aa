from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparrow.errors import UserError
from sparrow.models.checkpoint import load_decoder, plain_state_dict, save_decoder
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig, read_config

TOKENS_T = torch.randint(61, (30,), generator=torch.Generator().manual_seed(0))
SLIDING = {"use_sliding_window": True, "sliding_window": 16}


@torch.no_grad()
def logits(model: Decoder, attention_class) -> torch.Tensor:
    return model.logits(model(TOKENS_T, torch.arange(30), attention_class([30])))


@torch.no_grad()
def huggingface_logits(model) -> torch.Tensor:
    return model(TOKENS_T[None]).logits[0]


def edit_config(folder, **changes) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_weights(folder, change) -> None:
    file = folder / "model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file, metadata={"format": "pt"})


@pytest.fixture
def qwen3_folder(huggingface_model, tmp_path):
    huggingface_model("qwen3").save_pretrained(tmp_path / "qwen3")
    return tmp_path / "qwen3"


# Query heads, KV heads, head dim: groups of 1, 2, 4 and 5 query heads, and the head dims of real models.
HEADS = [(4, 4, 12), (4, 2, 12), (4, 1, 12), (5, 1, 12), (10, 2, 12), (4, 2, 64), (5, 1, 128)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_loads_what_transformers_saved(huggingface_model, packed_attention, tmp_path, model_type, tied, heads):
    """And transformers loads what is saved of that: q/k-norm in Qwen3, biases in Qwen2, neither in Llama."""
    shape = dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), heads, strict=True))
    reference = huggingface_model(model_type, tie_word_embeddings=tied, **shape)
    reference.save_pretrained(tmp_path / "theirs")
    model = load_decoder(tmp_path / "theirs")
    ours, theirs = logits(model, packed_attention), huggingface_logits(reference)
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    save_decoder(model, tmp_path / "ours", source=tmp_path / "theirs", max_shard_bytes=20_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(huggingface_logits(again), theirs)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("switches", [{"qk_norm": True}, {"qkv_bias": True, "qk_norm": False}, {"qk_norm": False}])
def test_transformers_loads_what_was_saved(packed_attention, tmp_path, switches, tied):
    config = DecoderConfig(
        vocab_size=61,
        hidden_size=40,
        intermediate_size=72,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        rope_theta=7_000.0,
        rms_norm_eps=1e-4,
        tie_word_embeddings=tied,
        **switches,
    )
    model = Decoder(config)
    model.init_weights(1, InitOptions(std=0.15, embedding_std=0.2, qk_norm_gain=1.3))
    save_decoder(model, tmp_path, source=None)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reference).__name__.startswith(
        {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[config.model_type]
    )
    assert reference.config.eos_token_id is None
    torch.testing.assert_close(huggingface_logits(reference), logits(model, packed_attention), atol=1e-4, rtol=0)
    assert read_config(tmp_path) == config


def test_round_trip_keeps_bfloat16_and_every_bit(qwen3_folder, tmp_path):
    model = load_decoder(qwen3_folder, dtype=torch.bfloat16)
    save_decoder(model, tmp_path / "copy", source=qwen3_folder)
    again = load_decoder(tmp_path / "copy", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, again.state_dict()[name])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy").dtype == torch.bfloat16


def test_saving_carries_the_companions_and_token_ids_over(qwen3_folder, tmp_path):
    edit_config(qwen3_folder, eos_token_id=[5, 6], pad_token_id=7)
    (qwen3_folder / "tokenizer.json").write_text("{}")
    (qwen3_folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    save_decoder(load_decoder(qwen3_folder), tmp_path / "out", source=qwen3_folder)
    written = {file.name for file in (tmp_path / "out").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == ([5, 6], 7)
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1


def test_saving_over_its_own_source(qwen3_folder):
    model = load_decoder(qwen3_folder)
    torch.nn.init.zeros_(model.model.norm.weight)
    save_decoder(model, qwen3_folder, source=qwen3_folder)
    assert not load_decoder(qwen3_folder).model.norm.weight.any()


def test_loaded_weights_do_not_depend_on_the_file(qwen3_folder):
    model = load_decoder(qwen3_folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = qwen3_folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.write(b"\1" * file.stat().st_size)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_loaded_weights_can_be_trained(qwen3_folder):
    assert all(parameter.requires_grad for parameter in load_decoder(qwen3_folder).parameters())


def test_loads_shards(huggingface_model, packed_attention, tmp_path):
    reference = huggingface_model("qwen2")
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    torch.testing.assert_close(
        logits(load_decoder(tmp_path), packed_attention), huggingface_logits(reference), atol=1e-4, rtol=0
    )


def shards(folder) -> list[str]:
    return sorted(file.name for file in folder.glob("*.safetensors*"))


def test_saves_shards_that_both_read(qwen3_folder, packed_attention, tmp_path):
    model = load_decoder(qwen3_folder)
    save_decoder(model, tmp_path / "out", qwen3_folder, max_shard_bytes=30_000)
    files = [tmp_path / "out" / name for name in shards(tmp_path / "out")]
    index = json.loads(files.pop().read_text())
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 32_000 for file in files), "headers come on top"
    state = model.state_dict()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert index["weight_map"] == {name: file.name for file in files for name in load_file(file)}
    again = load_decoder(tmp_path / "out").state_dict()
    assert again.keys() == state.keys() and all(torch.equal(state[name], again[name]) for name in state)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(huggingface_logits(theirs), logits(model, packed_attention), atol=1e-4, rtol=0)


def test_weights_that_were_there_before_are_replaced(qwen3_folder):
    model = load_decoder(qwen3_folder)
    for limit in (30_000, 60_000, 10**9, 30_000):
        torch.nn.init.constant_(model.model.norm.weight, limit)
        save_decoder(model, qwen3_folder, qwen3_folder, max_shard_bytes=limit)
        assert (load_decoder(qwen3_folder).model.norm.weight == limit).all()
        names = shards(qwen3_folder)
        assert (names == ["model.safetensors"]) is (limit == 10**9)
        assert len(names) == 1 or names[0].endswith(f"-of-{len(names) - 1:05d}.safetensors"), "none of the former"


def test_a_tensor_above_the_limit_has_a_file_of_its_own(qwen3_folder, tmp_path):
    save_decoder(load_decoder(qwen3_folder), tmp_path / "out", None, max_shard_bytes=1)
    assert all(len(load_file(file)) == 1 for file in (tmp_path / "out").glob("*.safetensors"))


def test_an_index_that_does_not_fit_its_shards(qwen3_folder):
    save_decoder(load_decoder(qwen3_folder), qwen3_folder, None, max_shard_bytes=30_000)
    file = qwen3_folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    shard = index["weight_map"]["model.norm.weight"]
    for change, words in (
        ({"model.no.weight": shard}, f"{shard} has no tensor model.no.weight, which model.safetensors.index"),
        ({"model.norm.weight": 3}, "weight_map: model.norm.weight: 3 is no name of a file"),
    ):
        file.write_text(json.dumps(index | {"weight_map": index["weight_map"] | change}))
        with pytest.raises(UserError, match=words):
            load_decoder(qwen3_folder)
    file.write_text(json.dumps({"metadata": {}}))
    with pytest.raises(UserError, match=r"index.json: the key 'weight_map' is missing or empty"):
        load_decoder(qwen3_folder)


def test_a_truncated_shard_is_named_before_anything_is_read(qwen3_folder):
    save_decoder(load_decoder(qwen3_folder), qwen3_folder, None, max_shard_bytes=30_000)
    last = sorted(qwen3_folder.glob("model-*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(UserError, match=f"{last.name} is truncated"):
        load_decoder(qwen3_folder)


# VmHWM, because ru_maxrss of a child starts from what its parent had.
PEAK = """
import sys
import threading
import psutil
import torch
from sparrow.models.checkpoint import load_decoder, save_decoder

load_decoder(sys.argv[3])  # a small one: what the code takes is not the weights'
process, done = psutil.Process(), threading.Event()
before = peak = process.memory_info().rss

def watch():
    # The system's own peak is of the whole process, and imports take more than these weights for a moment.
    global peak
    while not done.wait(0.0005):
        peak = max(peak, process.memory_info().rss)

watcher = threading.Thread(target=watch)
watcher.start()
model = load_decoder(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
done.set()
watcher.join()
print(sum(p.nbytes for p in model.parameters()), peak - before)
"""


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 10**9), ("bfloat16", 50_000_000)])
def test_loading_holds_the_weights_once(qwen3_folder, tmp_path, dtype, shard_bytes):
    """Peak memory of a process that loads 160 MB in fp32 from one file, or 80 MB in bf16 from shards of fp32."""
    config = DecoderConfig(
        vocab_size=1_000,
        hidden_size=512,
        intermediate_size=2_048,
        num_layers=10,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
    )
    save_decoder(Decoder(config), tmp_path, source=None, max_shard_bytes=shard_bytes)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path), dtype, str(qwen3_folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    size, loaded = map(int, done.stdout.split())
    assert size > 70_000_000
    assert 0.7 * size < loaded < 1.3 * size + 8_000_000, "4 MB: the largest tensor"


def test_a_missing_shard_is_named(huggingface_model, tmp_path):
    huggingface_model("qwen2").save_pretrained(tmp_path, max_shard_size="30KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} does not exist"):
        load_decoder(tmp_path)


def test_a_tied_head_may_stand_in_the_file(huggingface_model, packed_attention, tmp_path):
    reference = huggingface_model("llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda state: state.update({"lm_head.weight": state["model.embed_tokens.weight"].clone()}))
    ours = logits(load_decoder(tmp_path), packed_attention)
    torch.testing.assert_close(ours, huggingface_logits(reference), atol=1e-4, rtol=0)
    edit_weights(tmp_path, lambda state: state["lm_head.weight"].add_(1))
    with pytest.raises(UserError, match=r"lm_head.weight differs .* tie_word_embeddings"):
        load_decoder(tmp_path)


def test_both_spellings_of_rope(qwen3_folder):
    file = qwen3_folder / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("rope_parameters")["rope_theta"] == 5_000.0
    assert read_config(qwen3_folder).rope_theta == 5_000.0
    file.write_text(json.dumps(config | {"rope_theta": 123.0, "rope_scaling": None}))
    assert read_config(qwen3_folder).rope_theta == 123.0
    file.write_text(json.dumps(config | {"rope_theta": 124.0, "rope_scaling": {"type": "default"}}))
    assert read_config(qwen3_folder).rope_theta == 124.0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, "rope_parameters: .*yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: .*linear"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": None} | SLIDING | {"max_window_layers": 1}, "use_sliding_window: True"),
        ({"attention_bias": True}, "attention_bias: True"),
        ({"mlp_bias": True}, "mlp_bias: True"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu': only silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_attention_heads": "4"}, "num_heads must be a positive integer, not '4'"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
    ],
)
def test_unsupported_features_name_file_and_key(qwen3_folder, changes, key):
    edit_config(qwen3_folder, **changes)
    with pytest.raises(UserError, match=key) as caught:
        load_decoder(qwen3_folder)
    assert str(qwen3_folder / "config.json") in str(caught.value)


def test_a_sliding_window_that_no_layer_uses_is_accepted(qwen3_folder):
    for unused in ({"max_window_layers": 2}, {"max_window_layers": 1, "sliding_window": None}):
        edit_config(qwen3_folder, **({"layer_types": None} | SLIDING | unused))
        assert read_config(qwen3_folder).num_layers == 2


def test_a_missing_key_is_named(qwen3_folder):
    file = qwen3_folder / "config.json"
    config = json.loads(file.read_text())
    del config["intermediate_size"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="'intermediate_size' is missing"):
        load_decoder(qwen3_folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_config_that_is_no_json_object(qwen3_folder, content):
    (qwen3_folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config.json .*JSON"):
        load_decoder(qwen3_folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda state: state.update(extra=torch.zeros(1)), "extra in model.safetensors is unexpected"),
        (
            lambda state: state.update({"model.norm.weight": torch.ones(41)}),
            r"has shape \[41\], config.json says \[40\]",
        ),
        (lambda state: state.update({"model.norm.weight": torch.ones(40, dtype=torch.int8)}), "has dtype I8"),
        (lambda state: state.clear() or state.update(a=torch.zeros(1)), "embed_tokens.weight is missing.* more"),
    ],
)
def test_weights_that_do_not_fit_are_listed(qwen3_folder, change, message):
    edit_weights(qwen3_folder, change)
    with pytest.raises(UserError, match=message):
        load_decoder(qwen3_folder)


def test_recomputable_rope_tables_are_ignored(qwen3_folder):
    edit_weights(
        qwen3_folder, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    )
    load_decoder(qwen3_folder)


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_file_is_named(qwen3_folder, length):
    file = qwen3_folder / "model.safetensors"
    os.truncate(file, length if length >= 0 else file.stat().st_size + length)
    with pytest.raises(UserError, match=r"model.safetensors is truncated"):
        load_decoder(qwen3_folder)


def test_a_folder_without_weights(qwen3_folder):
    (qwen3_folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors nor"):
        load_decoder(qwen3_folder)
    with pytest.raises(UserError, match=r"config.json does not exist"):
        load_decoder(qwen3_folder / "nowhere")


def test_a_wrapped_model_saves_its_base_under_plain_names(qwen3_folder, tmp_path):
    plain = load_decoder(qwen3_folder)
    wrapped = load_decoder(qwen3_folder)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False), wrapped)
    assert any("base_layer" in name for name in wrapped.state_dict())
    mapped = plain_state_dict(wrapped)
    assert mapped.keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(mapped[name], tensor)
    assert mapped["model.norm.weight"].data_ptr() == wrapped.model.norm.weight.data_ptr()
    save_decoder(wrapped, tmp_path / "out", source=None)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == plain.state_dict().keys()
