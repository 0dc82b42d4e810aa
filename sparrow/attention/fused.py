"""Decode attention on CUDA: fused kernels write the cache and choose the pages, FlexAttention or Triton reads them.

The query group is folded into query rows and KV heads into batch rows, so that each KV head has its own page list; keys
and values are one pool shared by the batch, and listed page numbers carry the head. Sparse layers list pages, dense
layers walk the same memory in whole blocks. Nothing here reaches the host: a CUDA graph can hold a step.

Axes: B rows, N blocks per row, K KV heads, R = B * K folded rows, G query heads per KV head, D head dim, S slots,
C shares of a projection, X = (H + 2 K) * D, W width of the page lists, P pages of N blocks.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.step import DecodeStep
from sparrow.kernels.page_select import PER_HEAD, score_pages, select_pages
from sparrow.kernels.page_write import write_heads
from sparrow.kernels.plan import plan_rows
from sparrow.protocols import HeadParameters


class ListAttention(Protocol):
    """Attention of folded rows over lists of pages of one size."""

    def __call__(
        self, q_RGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, lists_RW: Tensor, counts_R: Tensor,
        lengths_B: Tensor, slots_B: Tensor, page_size: int,
    ) -> Tensor:  # fmt: skip
        """[R, G, D].

        Args:
            lists_RW, counts_R: int32, page numbers of the pool with heads and slots flattened; the last of the first
                `counts_R` is the open one.
            lengths_B, slots_B: cached tokens and the slot of the newest, which say how far the open page is filled.
        """
        ...


class FusedDecode:
    """Attention of one decode step; see `sparrow.attention.backend.DecodeFactory`.

    `project` is the fast way in, from the fused projection; `__call__` takes q, k and v like any other attention.
    """

    def __init__(
        self,
        attend: ListAttention,
        pool: PagePool,
        block_size: int,
        block_table_BN: Tensor,
        lengths_B: Tensor,
        pattern: SparsePattern | None,
    ) -> None:
        self.attend, self.pool, self.block_size, self.pattern = attend, pool, block_size, pattern
        self.table_BN, self.lengths_B = block_table_BN.contiguous(), lengths_B
        heads, slots = pool.keys_KSD[0].shape[:2]
        self.slots_B, self.blocks_RN, self.num_blocks_R = plan_rows(
            self.table_BN, lengths_B, heads, slots // block_size, block_size
        )
        if pattern is not None:
            self._prepare_selection(pattern)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer reads selected pages."""
        return self.pattern is not None and layer >= self.pattern.dense_layers

    def project(self, layer: int, qkv_CBX: Tensor, heads: HeadParameters, cos_BD: Tensor, sin_BD: Tensor) -> Tensor:
        """Attention [B, H * D] from the fused projection, in shares that sum to it, before its bias.

        Args:
            cos_BD, sin_BD: [B, D / 2], of the rows' positions.
        """
        keys_KSD = self.pool.keys_KSD[layer]
        B, K, D = len(self.lengths_B), len(keys_KSD), keys_KSD.shape[2]
        q_BKGD = qkv_CBX.new_empty(B, K, qkv_CBX.shape[2] // (K * D) - 2, D, dtype=keys_KSD.dtype)
        fused_marks = self.is_sparse(layer) and self.kernel is not None
        write_heads(
            qkv_CBX, heads.bias_X, heads.gains, cos_BD, sin_BD, self.slots_B, keys_KSD, self.pool.values_KSD[layer],
            self.pool.landmarks_KPMD[layer] if fused_marks else None, fused_marks and self.kernel == "bound", q_BKGD,
            self.pool.page_size, heads.eps,
        )  # fmt: skip
        if self.is_sparse(layer) and not fused_marks:
            self._update_landmarks(layer)
        return self._read(layer, q_BKGD).view(B, -1)

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """[B, H, D] queries, [B, K, D] keys and values of the current tokens to [B, H, D]."""
        self.pool.write(layer, self.slots_B, k_BKD, v_BKD)
        if self.is_sparse(layer):
            self._update_landmarks(layer)
        q_BKGD = q_BHD.unflatten(1, (k_BKD.shape[1], -1)).contiguous()
        return self._read(layer, q_BKGD).view_as(q_BHD)

    def _prepare_selection(self, pattern: SparsePattern) -> None:
        self.kernel = pattern.selector.kernel
        self.budget_B = pattern.budget.pages(self.lengths_B)
        self.num_pages = self.table_BN.shape[1] * (self.block_size // self.pool.page_size)
        # Of this context bucket, not of the schedule: lists as wide as needed spread over as many programs as they can.
        longest = self.num_pages * self.pool.page_size
        self.width = min(pattern.budget.max_pages_until(longest), self.num_pages)

    def _update_landmarks(self, layer: int) -> None:
        assert self.pattern is not None
        self.pool.update_landmarks(layer, self.slots_B // self.pool.page_size, self.pattern.selector)

    def _read(self, layer: int, q_BKGD: Tensor) -> Tensor:
        """[R, G, D] over the pages that the layer reads."""
        if self.is_sparse(layer):
            lists_RW, counts_R = self._select(layer, q_BKGD)
            page_size = self.pool.page_size
        else:
            lists_RW, counts_R, page_size = self.blocks_RN, self.num_blocks_R, self.block_size
        keys_KSD, values_KSD = self.pool.keys_KSD[layer], self.pool.values_KSD[layer]
        return self.attend(
            q_BKGD.flatten(0, 1), keys_KSD, values_KSD, lists_RW, counts_R, self.lengths_B, self.slots_B, page_size
        )

    def _select(self, layer: int, q_BKGD: Tensor) -> tuple[Tensor, Tensor]:
        """Listed pages [R, W] and their number [R], int32."""
        pattern, pool = self.pattern, self.pool
        assert pattern is not None
        if self.kernel is None:
            return self._select_eagerly(layer, q_BKGD, pattern)
        B, K, G, D = q_BKGD.shape
        marks_KPMD = pool.landmarks_KPMD[layer]
        per_head = G if self.kernel in PER_HEAD else 1
        scores_BKQP = q_BKGD.new_empty(B, K, per_head, self.num_pages, dtype=torch.float32)
        lists_BKW = q_BKGD.new_empty(B, K, self.width, dtype=torch.int32)
        counts_BK = q_BKGD.new_empty(B, K, dtype=torch.int32)
        pages_per_block = self.block_size // pool.page_size
        score_pages(
            q_BKGD, marks_KPMD, self.table_BN, self.lengths_B, self.budget_B, scores_BKQP, self.kernel,
            pool.page_size, pages_per_block, D**-0.5,
        )  # fmt: skip
        select_pages(
            scores_BKQP, self.table_BN, self.lengths_B, self.budget_B, lists_BKW, counts_BK, self.kernel,
            pool.num_pages, pool.page_size, pages_per_block, pattern.sink_pages, pattern.recent_pages,
        )  # fmt: skip
        return lists_BKW.flatten(0, 1), counts_BK.flatten()

    def _select_eagerly(self, layer: int, q_BKGD: Tensor, pattern: SparsePattern) -> tuple[Tensor, Tensor]:
        """For a selector that no kernel knows: its own tensor operations, still on the device."""
        step = DecodeStep(self.pool, self.block_size, self.table_BN, self.lengths_B, self.num_pages, pattern)
        pages_BKW, counts_B = step.select(layer, q_BKGD, self.width)
        head_K = torch.arange(q_BKGD.shape[1], device=q_BKGD.device)
        lists_BKW = pages_BKW + (head_K * self.pool.num_pages)[:, None]
        return lists_BKW.flatten(0, 1).int(), counts_B.int().repeat_interleave(q_BKGD.shape[1])
