"""The search against brute force over all monotone schedules, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.cost_search import Cell, Criterion, Surface, cheapest_schedule, read_surfaces
from sparrow.errors import UserError

HEAD = "page_size,bin_start,budget_pages,p5,p5_low,p5_high,tokens\n"
CRITERION = Criterion(tau=0.9, bin_width=1000, min_tokens=100)


def surface(rows: dict[tuple[int, int], float], page_size: int = 1, tokens: int = 100) -> Surface:
    return Surface(page_size, {key: Cell(p5, p5, p5, tokens) for key, p5 in rows.items()})


def area(first: int, end: int, budget: int) -> float:
    return float((end - first) * budget)


def test_the_smallest_budget_that_holds_and_never_less_after_it():
    found = cheapest_schedule(
        surface({(0, 3): 0.95, (0, 9): 0.99, (1000, 3): 0.7, (1000, 9): 0.92, (2000, 3): 0.95, (2000, 9): 0.99}),
        CRITERION, 2999, area,
    )  # fmt: skip
    assert found.pages == [3, 9, 9] and found.end == 3000 and found.cost == 3000 + 9000 + 9000


def test_a_budget_that_holds_the_whole_bin_is_dense_and_needs_no_cell():
    assert cheapest_schedule(surface({(0, 10): 0.1, (1000, 10): 0.95}, page_size=100), CRITERION, 1999, area).pages == [
        10, 10,
    ]  # fmt: skip


def test_the_last_entry_is_charged_for_what_it_holds_on_for():
    cells = surface({(0, 3): 0.95, (0, 9): 0.95})
    assert cheapest_schedule(cells, CRITERION, 9999, area).cost == 3 * 10_000
    assert cheapest_schedule(cells, CRITERION, 499, area).cost == 3 * 500


def test_the_first_entry_holds_for_the_prompts_before_the_surface():
    found = cheapest_schedule(surface({(2000, 3): 0.5, (2000, 9): 0.95}), CRITERION, 2999, area)
    assert found.pages == [9, 9, 9] and found.end == 3000 and found.cost == 9 * 3000


def test_a_larger_budget_is_taken_where_it_is_cheaper():
    """A budget that makes a bin dense saves the scoring."""
    cells = surface({(0, 3): 0.95, (0, 9): 0.99})
    assert cheapest_schedule(cells, CRITERION, 999, lambda first, end, budget: {3: 2.0, 9: 1.0}[budget]).pages == [9]


def test_the_lower_bound_counts_unless_told_otherwise():
    cells = Surface(1, {(0, 3): Cell(0.92, 0.89, 0.95, 100), (0, 9): Cell(0.97, 0.95, 0.99, 100)})
    assert cheapest_schedule(cells, CRITERION, 999, area).pages == [9]
    mean = Criterion(tau=0.9, bound="p5", bin_width=1000, min_tokens=100)
    assert cheapest_schedule(cells, mean, 999, area).pages == [3]


P5 = st.sampled_from([0.5, 0.95])


@given(st.lists(st.tuples(P5, P5, P5), min_size=1, max_size=4), st.lists(st.integers(1, 9), min_size=12, max_size=12))
def test_as_cheap_as_the_best_of_all_schedules(rows, prices):
    budgets = (3, 5, 9)
    cells = surface({(i * 1000, b): p for i, row in enumerate(rows) for b, p in zip(budgets, row, strict=True)})
    price = {(i * 1000, b): float(prices[3 * i + j]) for i in range(len(rows)) for j, b in enumerate(budgets)}
    paths = [
        sum(price[i * 1000, b] for i, b in enumerate(path))
        for path in itertools.combinations_with_replacement(budgets, len(rows))  # these never fall
        if all(cells.cells[i * 1000, b].p5 >= 0.9 for i, b in enumerate(path))
    ]

    def search():
        return cheapest_schedule(cells, CRITERION, len(rows) * 1000 - 1, lambda first, end, b: price[first, b])

    if paths:
        found = search()
        assert found.cost == min(paths)
        assert found.pages == sorted(found.pages)
    else:
        with pytest.raises(UserError, match="no budget"):
            search()


def test_what_fails_is_named():
    cells = surface({(0, 3): 0.95, (1000, 3): 0.71, (1000, 9): 0.82})
    with pytest.raises(UserError, match=r"page size 1: from cached length 1000 .* the best is 0.820 with 9 pages"):
        cheapest_schedule(cells, CRITERION, 1999, area)
    with pytest.raises(UserError, match="no cell has that many"):
        cheapest_schedule(surface({(0, 3): 0.95}, tokens=99), CRITERION, 999, area)
    with pytest.raises(UserError, match="bin_start 500 is no multiple of 1000"):
        cheapest_schedule(surface({(500, 3): 0.95}), CRITERION, 999, area)


def test_surfaces_are_read_by_page_size(tmp_path):
    one, other = tmp_path / "a.csv", tmp_path / "b.csv"
    one.write_text(HEAD + "32,0,8,.9,.88,.92,5000\n16,0,8,.8,.78,.82,4000\n")
    other.write_text(HEAD + "16,2000,8,.7,.68,.72,3000\n")
    first, second = read_surfaces([str(one), str(other)])
    assert (first.page_size, second.page_size) == (16, 32)
    assert first.cells == {(0, 8): Cell(0.8, 0.78, 0.82, 4000), (2000, 8): Cell(0.7, 0.68, 0.72, 3000)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bin_start,budget_pages\n", "column page_size, p5, p5_low, p5_high, tokens is missing"),
        (HEAD, "no rows"),
        (HEAD + "16,0,8,nan,.8,.9,100\n", "line 2: p5 nan, .* must be from 0 to 1"),
        (HEAD + "16,0,8,1.5,.8,.9,100\n", "line 2: p5 1.5, .* must be from 0 to 1"),
        (HEAD + "16,0,8,.8,.8,.9,-1\n", "line 2: .* tokens -1 at least 0"),
        (HEAD + "16,0,8,.8,.8,.9,100\n16,0,9,.8,", "line 3: p5_high, tokens is missing; the line is cut off"),
        (HEAD + "16,0,8,.8,.8,.9,100,7\n", "line 2: more fields than the header has columns"),
        (HEAD + '16,0,8,.8,.8,.9,"100\n', "line 2: unexpected end of data"),
        (HEAD + "16,0,8,high,.8,.9,100\n", "line 2: could not convert string to float: 'high'"),
        (HEAD + "16,0,0,.8,.8,.9,100\n", "line 2: .*budget_pages 0"),
        (HEAD + "16,0,8,.8,.8,.9,100\n16,0,8,.8,.8,.9,100\n", "line 3: .*was there before"),
    ],
)
def test_a_bad_surface_is_refused(tmp_path, text, words):
    (tmp_path / "surface.csv").write_text(text)
    with pytest.raises(UserError, match=words):
        read_surfaces([str(tmp_path / "surface.csv")])


def test_a_surface_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "surface.csv"
    file.write_bytes(HEAD.encode() + b"16,0,8,.8,.8,.9,100\n\xff\xfe\x00")
    with pytest.raises(UserError, match=rf"{file}: line 3: not text in UTF-8"):
        read_surfaces([str(file)])


def test_a_missing_surface_is_refused():
    with pytest.raises(UserError, match=r"nowhere\.csv: no such calibration surface"):
        read_surfaces(["nowhere.csv"])


def test_tau_is_a_probability():
    with pytest.raises(UserError, match=r"tau: 1.2 must be above 0 and at most 1"):
        Criterion(tau=1.2)
