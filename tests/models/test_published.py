"""Published checkpoints by their config.json: what is read from it, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import read_config, to_huggingface

from .published import LLAMA_31_ROPE, PUBLISHED, QWEN3_YARN


def write(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_decoder_has_the_published_parameters(tmp_path, name):
    config, parameters = PUBLISHED[name]
    with torch.device("meta"):
        model = Decoder(read_config(write(tmp_path, config)))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_the_tensors_that_transformers_has(tmp_path, name):
    write(tmp_path, PUBLISHED[name][0])
    reference_config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = Decoder(read_config(tmp_path))
        reference = AutoModelForCausalLM.from_config(reference_config)
    theirs = {key: tensor.shape for key, tensor in reference.named_parameters()}
    assert {key: tensor.shape for key, tensor in model.named_parameters()} == theirs
    ours = model.config
    assert ours.max_position_embeddings == reference_config.max_position_embeddings
    assert ours.rms_norm_eps == reference_config.rms_norm_eps
    assert ours.rope_theta == reference_config.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_back(tmp_path, name):
    config = read_config(write(tmp_path, PUBLISHED[name][0]))
    assert read_config(write(tmp_path, to_huggingface(config, torch.bfloat16, {}))) == config


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("Meta-Llama-3-8B", {"rope_scaling": LLAMA_31_ROPE}, "rope_scaling: .*llama3.*scaled RoPE is not supported"),
        ("Qwen3-8B", {"rope_scaling": QWEN3_YARN}, "rope_scaling: .*yarn"),
        ("Qwen2.5-7B", {"use_sliding_window": True, "max_window_layers": 20}, "use_sliding_window: True"),
        ("Qwen3-8B", {"model_type": "qwen3_moe"}, "model_type 'qwen3_moe' is not supported; supported: qwen3"),
        ("Qwen3-8B", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .*fp8"),
    ],
    ids=["Llama-3.1", "YaRN", "sliding window", "mixture of experts", "FP8"],
)
def test_relatives_that_the_decoder_lacks(tmp_path, name, changes, words):
    with pytest.raises(UserError, match=words) as caught:
        read_config(write(tmp_path, PUBLISHED[name][0] | changes))
    assert str(tmp_path / "config.json") in str(caught.value)
