"""Decode attention by gather and SDPA: the backend of the CPU, and the oracle of the compiled ones.

Axes: B rows, K KV heads, G query heads per KV head, D head dim, S slots, W pages per list, C = W * page columns.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.step import DecodeStep, gather_pages


class GatherDecode:
    """Attention of one decode step; see `sparrow.attention.backend.DecodeFactory`."""

    def __init__(
        self, pool: PagePool, block_size: int, block_table_BN: Tensor, lengths_B: Tensor, pattern: SparsePattern | None
    ) -> None:
        longest = int(lengths_B.max())
        self.step = DecodeStep(pool, block_size, block_table_BN, lengths_B, -(-longest // pool.page_size), pattern)
        # Where every budget covers its sequence, selection is the identity and would only cost time.
        self.identity = pattern is None or bool((self.step.budget_B >= self.step.num_pages_B).all())
        if not self.identity:
            self.width = int(torch.minimum(self.step.budget_B, self.step.num_pages_B).max())

    def __call__(self, layer: int, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
        """[B, H, D] queries, [B, K, D] keys and values of the current tokens to [B, H, D]."""
        step, pool = self.step, self.step.pool
        step.write(layer, k_BKD, v_BKD)
        q_BKGD = q_BHD.unflatten(1, (k_BKD.shape[1], -1))
        if step.is_sparse(layer) and not self.identity:
            pages, counts_B = step.select(layer, q_BKGD, self.width)
        else:
            pages, counts_B = step.pages_B1P.expand(-1, k_BKD.shape[1], -1), step.num_pages_B
        keys, values = pool.keys_KSD[layer], pool.values_KSD[layer]
        return attend_pages(q_BKGD, keys, values, pages, counts_B, step.lengths_B, pool.page_size).flatten(1, 2)


def attend_pages(
    q_BKGD: Tensor,
    keys_KSD: Tensor,
    values_KSD: Tensor,
    pages_BKW: Tensor,
    counts_B: Tensor,
    lengths_B: Tensor,
    page_size: int,
) -> Tensor:
    """Attention of one query token per row over the pages in its list.

    Args:
        pages_BKW: pool page numbers in order of position; the last of the first `counts_B` is the open page.
        counts_B: pages that count; the rest of a list is padding.
        lengths_B: cached tokens including the current one; says how far the open page is filled.

    Returns:
        [B, K, G, D]. The GQA group's heads are the query rows of one KV head's page list.
    """
    paged = (x.unflatten(1, (-1, page_size)) for x in (keys_KSD, values_KSD))
    k_BKCD, v_BKCD = (gather_pages(x, pages_BKW).flatten(2, 3) for x in paged)
    column_C = torch.arange(k_BKCD.shape[2], device=q_BKGD.device)
    filled_B = (counts_B - 1) * page_size + (lengths_B - 1) % page_size + 1
    mask_BC = column_C < filled_B[:, None]
    return F.scaled_dot_product_attention(q_BKGD, k_BKCD, v_BKCD, attn_mask=mask_BC[:, None, None])
