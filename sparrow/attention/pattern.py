"""What decides which pages a query reads; the same object serves decode and the sparse training forward."""

from __future__ import annotations

from dataclasses import dataclass

from sparrow.protocols import BudgetSchedule, Selector


@dataclass(frozen=True)
class SparsePattern:
    """The rule of block-sparse attention (paper).

    Attributes:
        budget: total pages as a function of the cached length.
        selector: how pages are summarised and ranked.
        page_size: tokens per page.
        sink_pages, recent_pages: always kept; the open page is the last of the recent ones.
        dense_layers: layers below this attend to everything.
    """

    budget: BudgetSchedule
    selector: Selector
    page_size: int
    sink_pages: int
    recent_pages: int
    dense_layers: int
