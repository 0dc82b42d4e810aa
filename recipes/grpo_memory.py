"""The memory plan of a sparrow_grpo config: what its keys mean to `sparrow.memory_plan`."""

from __future__ import annotations

import torch

from sparrow.attention.dense import takes_flex
from sparrow.errors import UserError
from sparrow.memory_plan import Job, MemoryPlan, check_fits, plan_memory, plan_table
from sparrow.memory_sizes import Activations, optimizer_memory
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import KVCache
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.training import distributed

PROMPT_TOKENS = 3000  # the longest that is planned for without max_prompt_tokens (paper, RL recipe)


def memory_plan(cfg: GRPOConfig, config: DecoderConfig, cache: KVCache, gpus: int) -> MemoryPlan:
    """The plan of a model of these sizes on so many GPUs."""
    if cfg.replicate < 1 or gpus % cfg.replicate:
        raise UserError(f"replicate: {cfg.replicate} does not divide the {gpus} processes")
    dtype, rollout_dtype = getattr(torch, cfg.dtype), getattr(torch, cfg.engine.dtype or cfg.dtype)
    room = config.max_position_embeddings - cfg.engine.max_new_tokens
    return plan_memory(
        Job(
            config=config,
            gpus=gpus,
            replicate=cfg.replicate,
            dtype=dtype,
            activations=_activations(cfg),
            flex=takes_flex(cfg.attention, True, dtype, config.head_dim),
            optimizer=optimizer_memory(cfg.optimizer.path, cfg.optimizer.kwargs),
            reference=cfg.kl_coef > 0,
            replay=cfg.replay is not None,
            rollout_dtype=rollout_dtype,
            kv_tokens=cfg.engine.kv_tokens,
            block_size=cache.block_size,
            kv_bytes=cache.bytes_per_token(config, rollout_dtype),
            prompt_tokens=min(cfg.max_prompt_tokens or PROMPT_TOKENS, max(room, 1)),
            max_new_tokens=cfg.engine.max_new_tokens,
            micro_batch_tokens=cfg.micro_batch_tokens,
            logprob_chunk=cfg.logprob_chunk,
        )
    )


def _activations(cfg: GRPOConfig) -> Activations:
    if cfg.offload_activations:
        return "offloaded"
    return "recomputed" if cfg.activation_checkpointing else "kept"


def check_memory(cfg: GRPOConfig, config: DecoderConfig, cache: KVCache, device: torch.device) -> None:
    """On CUDA prints the plan and refuses what cannot fit, before anything is allocated; elsewhere does nothing."""
    if device.type != "cuda":
        return
    plan = memory_plan(cfg, config, cache, distributed.world_size())
    memory = torch.cuda.get_device_properties(device).total_memory
    if distributed.rank() == 0:
        print("\n".join(plan_table(plan, memory)), flush=True)
    check_fits(plan, memory)
