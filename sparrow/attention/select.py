"""From page scores to page lists: reserve sink and recent pages, take the best of the rest, in order of position.

Axes: B rows, K KV heads, P pages of the longest sequence, W width of the page lists.
"""

from __future__ import annotations

import torch
from torch import Tensor


def candidate_pages(num_pages_B: Tensor, width: int, sink_pages: int, recent_pages: int) -> Tensor:
    """True where a page may be dropped: complete, behind the sink and before the recent ones. [B, P] bool."""
    page_P = torch.arange(width, device=num_pages_B.device)
    return (page_P >= sink_pages) & (page_P < (num_pages_B - recent_pages)[:, None])


def select_pages(
    scores_BKP: Tensor, candidates_BP: Tensor, num_pages_B: Tensor, budget_B: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """Chooses the pages to read.

    Args:
        scores_BKP: fp32 scores, larger is better.
        candidates_BP: pages that compete; the others that exist are reserved and always kept.
        num_pages_B: pages each sequence has.
        budget_B: pages each row may read in all; at least its reserved ones.
        width: W, the length of the lists; at least the largest `min(budget, num_pages)`.

    Returns:
        pages_BKW: logical page numbers in ascending order, entries past the count hold the last page.
        counts_B: pages kept per row; the same for each KV head.
    """
    page_P = torch.arange(scores_BKP.shape[-1], device=scores_BKP.device)
    exists_BP = page_P < num_pages_B[:, None]
    counts_B = torch.minimum(budget_B, num_pages_B)
    ranked = torch.where(candidates_BP[:, None], scores_BKP, torch.inf)
    ranked = torch.where(exists_BP[:, None], ranked, -torch.inf)
    best_BKW = ranked.topk(width, dim=-1, sorted=True).indices
    # Sorted by score, the first `count` of one top-k of fixed width are the best `count` of any row.
    kept_W = torch.arange(width, device=scores_BKP.device) < counts_B[:, None]
    last_B = num_pages_B - 1
    pages_BKW = torch.where(kept_W[:, None], best_BKW, last_B[:, None, None]).sort(dim=-1).values
    return pages_BKW, counts_B


def physical_pages(pages_BKW: Tensor, block_table_BN: Tensor, pages_per_block: int) -> Tensor:
    """Logical page numbers of each row to page numbers of the pool, through the row's block table. Same shape."""
    blocks = pages_BKW // pages_per_block
    table = block_table_BN[:, None].expand(-1, pages_BKW.shape[1], -1)
    return table.gather(-1, blocks) * pages_per_block + pages_BKW % pages_per_block
