"""What the config.json of published checkpoints say, as far as they say anything of the model, and their parameters."""

from __future__ import annotations

from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, tied: bool) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": tied,
    }


def _qwen2(sizes: dict[str, Any], vocab: int, context: int, window_layers: int) -> dict[str, Any]:
    rest = {"vocab_size": vocab, "max_position_embeddings": context, "sliding_window": context}
    return _QWEN2 | sizes | rest | {"max_window_layers": window_layers}


# name: (config.json, parameters by which the model is known)
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3-0.6B": (_QWEN3 | _sizes(1024, 3072, 28, 16, 8, True) | {"max_window_layers": 28}, 596_049_920),
    "Qwen3-1.7B": (_QWEN3 | _sizes(2048, 6144, 28, 16, 8, True) | {"max_window_layers": 28}, 1_720_574_976),
    "Qwen3-4B": (_QWEN3 | _sizes(2560, 9728, 36, 32, 8, True) | {"max_window_layers": 36}, 4_022_468_096),
    "Qwen3-8B": (_QWEN3 | _sizes(4096, 12288, 36, 32, 8, False) | {"max_window_layers": 36}, 8_190_735_360),
    "Qwen3-14B": (_QWEN3 | _sizes(5120, 17408, 40, 40, 8, False) | {"max_window_layers": 40}, 14_768_307_200),
    "Qwen2.5-0.5B": (_qwen2(_sizes(896, 4864, 24, 14, 2, True), 151936, 32768, 24), 494_032_768),
    "Qwen2.5-1.5B": (_qwen2(_sizes(1536, 8960, 28, 12, 2, True), 151936, 131072, 28), 1_543_714_304),
    "Qwen2.5-7B": (_qwen2(_sizes(3584, 18944, 28, 28, 4, False), 152064, 131072, 28), 7_615_616_512),
    "SmolLM2-135M": (
        _LLAMA | _sizes(576, 1536, 30, 9, 3, True)
        | {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": 49152, "max_position_embeddings": 8192,
           "rope_theta": 100000, "rope_interleaved": False},
        134_515_008,
    ),
    "Llama-2-7b": (
        _LLAMA | _sizes(4096, 11008, 32, 32, 32, False)
        | {"bos_token_id": 1, "eos_token_id": 2, "vocab_size": 32000, "max_position_embeddings": 4096},
        6_738_415_616,
    ),
    "Meta-Llama-3-8B": (
        _LLAMA | _sizes(4096, 14336, 32, 32, 8, False)
        | {"bos_token_id": 128000, "eos_token_id": 128001, "vocab_size": 128256, "max_position_embeddings": 8192,
           "rope_theta": 500000.0},
        8_030_261_248,
    ),
}  # fmt: skip

LLAMA_31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN3_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
