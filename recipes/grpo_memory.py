"""The memory plan of a sparrow_grpo config: what its keys mean to `sparrow.memory_plan`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparrow.memory_plan import Job, MemoryPlan, check_fits, plan_memory, plan_table
from sparrow.memory_sizes import optimizer_memory
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import KVCache
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.training import distributed

PROMPT_TOKENS = 3000  # the longest that is planned for (paper, RL recipe); no key bounds a prompt


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the model is trained. The defaults are what the recipe does; tools/plan_memory.py plans the others."""

    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    sharded: bool = False


def memory_plan(
    cfg: GRPOConfig, config: DecoderConfig, cache: KVCache, gpus: int, training: Training = Training()
) -> MemoryPlan:
    """The plan of a model of these sizes on so many GPUs."""
    rollout_dtype = getattr(torch, cfg.engine.dtype or "float32")
    room = config.max_position_embeddings - cfg.engine.max_new_tokens
    return plan_memory(
        Job(
            config=config,
            gpus=gpus,
            shards=gpus if training.sharded else 1,
            dtype=training.dtype,
            checkpointing=training.checkpointing,
            optimizer=optimizer_memory(cfg.optimizer.path, cfg.optimizer.kwargs),
            reference=cfg.kl_coef > 0,
            rollout_dtype=rollout_dtype,
            kv_tokens=cfg.engine.kv_tokens,
            block_size=cache.block_size,
            kv_bytes=cache.bytes_per_token(config, rollout_dtype),
            prompt_tokens=min(PROMPT_TOKENS, max(room, 1)),
            max_new_tokens=cfg.engine.max_new_tokens,
            micro_batch_tokens=cfg.micro_batch_tokens,
            logprob_chunk=cfg.logprob_chunk,
        )
    )


def check_memory(cfg: GRPOConfig, config: DecoderConfig, cache: KVCache, device: torch.device) -> None:
    """On CUDA prints the plan and refuses what cannot fit, before anything is allocated; elsewhere does nothing."""
    if device.type != "cuda":
        return
    plan = memory_plan(cfg, config, cache, distributed.world_size())
    memory = torch.cuda.get_device_properties(device).total_memory
    if distributed.rank() == 0:
        print("\n".join(plan_table(plan, memory)), flush=True)
    check_fits(plan, memory)
