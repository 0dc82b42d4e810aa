"""The tables of docs/cost.md, against the page."""

from __future__ import annotations

from pathlib import Path

import cost_tables

PAGE = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()


def test_the_page_has_what_the_tool_prints() -> None:
    rows = cost_tables.paper_table()[1:]
    assert len(rows) == 5
    for row in rows:
        assert " | ".join(row[40:].split()) + " |" in PAGE, row
    for row in cost_tables.landmark_table()[1:]:
        dense, *sparse = row[40:].replace(", ", ",").split()
        assert " | ".join([dense, *(cell.replace(",", ", ").replace("%", " %") for cell in sparse)]) + " |" in PAGE, row
