"""Prefill passes: short prompts packed together, long ones in chunks.

Axes: T tokens of a pass, C tokens of the prompt before it, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sparrow.engine.decode import RolloutModel
from sparrow.engine.scheduler import Prompt
from sparrow.protocols import KVCache


def prefill(
    model: RolloutModel, cache: KVCache, prompts: Sequence[Prompt], max_tokens: int, device: torch.device
) -> dict[int, Tensor]:
    """Fills the prompts' blocks; returns the final hidden state [E] of each prompt's last token, by its index.

    Args:
        max_tokens: tokens of one pass, the padding of packed prompts included; a longer prompt is split.
    """
    hidden = {}
    for prompt in prompts:
        if len(prompt.tokens) > max_tokens:
            hidden[prompt.index] = _prefill_chunks(model, cache, prompt, max_tokens, device)
    short = [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]
    for pack in _packs(short, max_tokens):
        last_hidden = _prefill_pack(model, cache, pack, device)
        hidden |= zip((prompt.index for prompt in pack), last_hidden, strict=True)
    return hidden


def _packs(prompts: Sequence[Prompt], max_tokens: int) -> Iterator[list[Prompt]]:
    pack: list[Prompt] = []
    longest = 0
    for prompt in prompts:
        longest = max(longest, len(prompt.tokens))
        if pack and (len(pack) + 1) * longest > max_tokens:
            yield pack
            pack, longest = [], len(prompt.tokens)
        pack.append(prompt)
    if pack:
        yield pack


def _prefill_pack(
    model: RolloutModel, cache: KVCache, prompts: Sequence[Prompt], device: torch.device
) -> tuple[Tensor, ...]:
    lengths = [len(prompt.tokens) for prompt in prompts]
    slots_T = torch.cat([_slots(prompt, cache.block_size) for prompt in prompts]).to(device)
    tokens_T = torch.tensor([token for prompt in prompts for token in prompt.tokens], device=device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden_TE = model(tokens_T, positions_T, cache.prefill(slots_T, lengths))
    return hidden_TE[torch.tensor(lengths, device=device).cumsum(0) - 1].unbind()


def _prefill_chunks(
    model: RolloutModel, cache: KVCache, prompt: Prompt, max_tokens: int, device: torch.device
) -> Tensor:
    slots = _slots(prompt, cache.block_size).to(device)
    tokens = torch.tensor(prompt.tokens, device=device)
    positions = torch.arange(len(prompt.tokens), device=device)
    for start in range(0, len(prompt.tokens), max_tokens):
        chunk = slice(start, start + max_tokens)
        slots_T = slots[chunk]
        attention = cache.prefill_chunk(slots_T, slots[:start]) if start else cache.prefill(slots_T, [len(slots_T)])
        hidden_TE = model(tokens[chunk], positions[chunk], attention)
    return hidden_TE[-1].clone()  # Not a view: it would hold the whole chunk.


def _slots(prompt: Prompt, block_size: int) -> Tensor:
    """The pool slot of each of the prompt's tokens."""
    position = torch.arange(len(prompt.tokens))
    return torch.tensor(prompt.blocks)[position // block_size] * block_size + position % block_size
