"""What every backend of a decode step needs: where the current token goes, and the page lists of the sparse layers.

Axes: B rows, N blocks per row, K KV heads, G query heads per KV head, D head dim, P pages of the longest sequence,
W width of the page lists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool, movable
from sparrow.attention.select import candidate_pages, physical_pages, select_pages


class DecodeStep:
    """Rows of one decode step over a pool.

    Args:
        block_table_BN: pool block of each logical block, the null block beyond a row's own.
        lengths_B: cached tokens, the current one included.
        max_pages: P, pages to look at; at least those of the longest row.
        pattern: the rule of the sparse layers; None where all layers are dense.
    """

    def __init__(
        self,
        pool: PagePool,
        block_size: int,
        block_table_BN: Tensor,
        lengths_B: Tensor,
        max_pages: int,
        pattern: SparsePattern | None,
    ) -> None:
        last_B = lengths_B - 1
        block_B = block_table_BN.gather(1, (last_B // block_size)[:, None])[:, 0]
        self.pool, self.pattern = pool, pattern
        self.pages_per_block = block_size // pool.page_size
        self.block_table_BN, self.lengths_B = block_table_BN, lengths_B
        self.slots_B = block_B * block_size + last_B % block_size
        self.num_pages_B = last_B // pool.page_size + 1
        logical_B1P = torch.arange(max_pages, device=lengths_B.device).expand(len(lengths_B), 1, -1)
        # Pool pages in order of position; past a row's own they are of the null block.
        self.pages_B1P = physical_pages(logical_B1P, block_table_BN, self.pages_per_block)
        if pattern is not None:
            self.budget_B = pattern.budget.pages(lengths_B)
            self.candidates_BP = candidate_pages(self.num_pages_B, max_pages, pattern.sink_pages, pattern.recent_pages)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer reads selected pages."""
        return self.pattern is not None and layer >= self.pattern.dense_layers

    def write(self, layer: int, k_BKD: Tensor, v_BKD: Tensor) -> None:
        """Stores the current token and, in a sparse layer, the landmarks of its page."""
        self.pool.write(layer, self.slots_B, k_BKD, v_BKD)
        if self.pattern is not None and self.is_sparse(layer):
            self.pool.update_landmarks(layer, self.slots_B // self.pool.page_size, self.pattern.selector)

    def select(self, layer: int, q_BKGD: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Pool pages that each row and KV head reads in order of position [B, K, W], and their number [B]."""
        assert self.pattern is not None
        pages_BKP = self.pages_B1P.expand(-1, q_BKGD.shape[1], -1)
        marks_BKPMD = gather_pages(self.pool.landmarks_KPMD[layer], pages_BKP)
        scores_BKP = self.pattern.selector.score(q_BKGD, marks_BKPMD, self.candidates_BP)
        lists_BKW, counts_B = select_pages(scores_BKP, self.candidates_BP, self.num_pages_B, self.budget_B, width)
        return physical_pages(lists_BKW, self.block_table_BN, self.pages_per_block), counts_B


def gather_pages(x_KP: Tensor, pages_BKW: Tensor) -> Tensor:
    """Of [K, P, ...], with P the pool's pages, each row's and KV head's listed pages: [B, K, W, ...]."""
    heads_K = torch.arange(x_KP.shape[0], device=x_KP.device)
    rows = (heads_K[:, None] * x_KP.shape[1] + pages_BKW).flatten()
    gathered = movable(x_KP).flatten(0, 1).index_select(0, rows).unflatten(0, pages_BKW.shape)
    return gathered.view(x_KP.dtype)
