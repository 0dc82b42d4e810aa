"""Whether the KV pool fits into what the device has left, said before anything is allocated."""

from __future__ import annotations

import torch

from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import KVCache

KEPT_FREE = 4 * 2**30  # bytes: graphs, windows, logits, activations of a prefill pass


def check_pool_fits(
    config: DecoderConfig, cache: KVCache, kv_tokens: int, device: torch.device, dtype: torch.dtype
) -> None:
    """UserError with need, limit and key where a pool of `kv_tokens` cannot be had on a CUDA device."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    per_token = cache.bytes_per_token(config, dtype)
    null_block = cache.block_size * per_token
    # A small device or model is not held to all of it.
    most = free - null_block - min(KEPT_FREE, free // 8)
    if kv_tokens * per_token > most:
        raise UserError(
            f"engine.kv_tokens: {kv_tokens} tokens of {per_token} bytes need {kv_tokens * per_token / 2**30:.1f} GiB, "
            f"{free / 2**30:.1f} GiB are free on {device}, some of which graphs and activations take; at most "
            f"{max(most, 0) // per_token} tokens fit"
        )
