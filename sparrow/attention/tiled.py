"""Sparse attention of a training forward by page lists: memory is linear in the length, time follows the budget.

What it computes is `sparrow.attention.masked`'s. The lists are kept for the backward pass: four bytes for a tile's page
are little beside the activations, while selecting again would cost more than attending.

Axes: T packed tokens, H query heads, K KV heads, D head dim, N entries, P prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparrow.attention.dense import DenseAttention
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.tile_lists import PageLists, Tiles, make_tiles, page_lists, queries_per_tile
from sparrow.kernels.tile_attend import attend_tiles
from sparrow.kernels.tile_gradients import attend_tiles_backward


class TiledSparse:
    """Each response token sees the pages its decode step saw; prompt tokens and the first layers are dense.

    Args:
        lengths, prompt_lengths: tokens of each packed document and how many of them are its prompt.
        pattern: the rule of selection that the rollout used.
    """

    def __init__(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], pattern: SparsePattern, device: torch.device
    ) -> None:
        self.lengths, self.pattern, self.device = list(lengths), pattern, device
        self.prompts = [min(prompt, length) for prompt, length in zip(prompt_lengths, lengths, strict=True)]
        self.dense = DenseAttention("auto", self.lengths, device)
        self.dense_prompts = DenseAttention("auto", [prompt for prompt in self.prompts if prompt], device)
        starts = torch.tensor([0, *self.lengths[:-1]]).cumsum(0).tolist()
        self.prompt_P = torch.cat(
            [torch.arange(start, start + prompt) for start, prompt in zip(starts, self.prompts, strict=True)]
        ).to(device)
        self.tiles: Tiles | None = None

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D], [T, K, D], [T, K, D] to [T, H, D]."""
        if layer < self.pattern.dense_layers or self.prompts == self.lengths:
            return self.dense(layer, q_THD, k_TKD, v_TKD)
        if self.tiles is None:
            queries = queries_per_tile(q_THD.shape[1] // k_TKD.shape[1], q_THD.dtype)
            self.tiles = make_tiles(self.lengths, self.prompts, queries, self.pattern.page_size, self.device)
        q_THD, k_TKD, v_TKD = (x.contiguous() for x in (q_THD, k_TKD, v_TKD))
        lists = page_lists(self.pattern, self.tiles, q_THD.detach(), k_TKD.detach())
        prompts_PHD = self._prompts(layer, q_THD, k_TKD, v_TKD)
        return _TileAttention.apply(
            q_THD, k_TKD, v_TKD, prompts_PHD, self.prompt_P, self.tiles, lists, self.pattern.page_size
        )

    def _prompts(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if not any(self.prompts):
            return q_THD[:0]
        return self.dense_prompts(layer, *(x.index_select(0, self.prompt_P) for x in (q_THD, k_TKD, v_TKD)))


class _TileAttention(torch.autograd.Function):
    """The response tokens' attention, in one tensor with what the prompts' dense attention gave."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, prompts_PHD: Tensor, prompt_P: Tensor, tiles: Tiles,
        lists: PageLists, page_size: int,
    ) -> Tensor:  # fmt: skip
        out_THD = torch.empty_like(q_THD)
        out_THD[prompt_P] = prompts_PHD
        normalisers_TH = attend_tiles(
            q_THD, k_TKD, v_TKD, lists.entries_N, lists.bounds, tiles.tiles_X4, page_size, tiles.queries, out_THD
        )
        ctx.save_for_backward(
            q_THD, k_TKD, v_TKD, out_THD, normalisers_TH, lists.entries_N, lists.bounds, prompt_P, tiles.tiles_X4,
            tiles.pages_P2,
        )  # fmt: skip
        ctx.queries, ctx.page_size = tiles.queries, page_size
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out_THD, normalisers_TH, entries_N, bounds, prompt_P, tiles_X4, pages_P2 = ctx.saved_tensors
        grad_THD = grads[0].contiguous()
        gradients = attend_tiles_backward(
            q, k, v, entries_N, bounds, tiles_X4, pages_P2, ctx.page_size, ctx.queries, out_THD, normalisers_TH,
            grad_THD,
        )  # fmt: skip
        return *gradients, grad_THD[prompt_P], None, None, None, None
