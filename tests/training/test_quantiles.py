from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.training.quantiles import (
    CELLS,
    KL_EDGES,
    UNIT_EDGES,
    BinnedTokens,
    Histogram,
    SortedValues,
    cell_counts,
    quantile,
)


def histogram(values: list[float], edges_H: Tensor) -> Histogram:
    values_T = torch.tensor(values, dtype=torch.float64)
    return Histogram(cell_counts(values_T, torch.zeros(len(values), dtype=torch.int64), 1, edges_H)[0], edges_H)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 1))
def test_sorted_values_have_numpys_quantiles(values: list[float], level: float) -> None:
    result = quantile(SortedValues(torch.tensor(values, dtype=torch.float64)), level)
    assert result == pytest.approx(np.quantile(np.array(values), level), abs=1e-12)


# Values on a coarse grid give ties and full cells, the others every position within a cell.
ALPHAS = st.lists(st.floats(0, 1) | st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=80)


@settings(max_examples=200, deadline=None)
@given(ALPHAS, st.floats(0, 1))
def test_a_histogram_is_off_by_less_than_a_cell(values: list[float], level: float) -> None:
    result = quantile(histogram(values, UNIT_EDGES), level)
    assert abs(result - np.quantile(np.array(values), level)) <= 1 / CELLS < 0.002


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-14, 8.6), min_size=1, max_size=60), st.integers(0, 59))
def test_divergences_have_a_relative_error(exponents: list[float], rank: int) -> None:
    values = sorted(10.0**e for e in exponents)
    rank = min(rank, len(values) - 1)
    assert histogram(values, KL_EDGES).at(rank) == pytest.approx(values[rank], rel=0.011, abs=1e-10)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=60), st.data())
def test_counts_of_parts_add_up(tokens: list[tuple[float, int]], data: st.DataObject) -> None:
    values_T = torch.tensor([value for value, _ in tokens], dtype=torch.float64)
    bin_T = torch.tensor([index for _, index in tokens])
    cut = data.draw(st.integers(0, len(tokens)))
    whole, first, second = (cell_counts(values_T[s], bin_T[s], 4, UNIT_EDGES) for s in (
        slice(None), slice(cut), slice(cut, None)
    ))  # fmt: skip
    assert torch.equal(whole, first + second)
    assert whole.sum(1).tolist() == [int((bin_T == n).sum()) for n in range(4)]


def test_one_process_is_exact_however_many_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    values_T, bin_T = torch.rand(500, generator=generator), torch.randint(0, 3, (500,), generator=generator) * 2
    binned = BinnedTokens(bin_T, exact_tokens=1)
    assert (binned.num_bins, binned.counts_N[1::2].tolist()) == (5, [0, 0])
    whole, bins = binned.whole(values_T, UNIT_EDGES), binned.bins(values_T, UNIT_EDGES)
    assert quantile(whole, 0.05) == pytest.approx(np.quantile(values_T.double().numpy(), 0.05), abs=1e-12)
    assert list(bins) == [0, 2, 4]
    for n, values in bins.items():
        assert quantile(values, 0.3) == pytest.approx(np.quantile(values_T[bin_T == n].double().numpy(), 0.3))
    sums_NC = binned.sums([values_T, torch.ones(500)])
    assert sums_NC[2, 0].item() == pytest.approx(values_T[bin_T == 2].double().sum().item())
    assert sums_NC[:, 1].tolist() == binned.counts_N.tolist()


def test_no_tokens() -> None:
    binned = BinnedTokens(torch.zeros(0, dtype=torch.int64))
    assert binned.num_bins == 0 and binned.counts_N.tolist() == []


RANK = """
import json, sys
import torch, torch.distributed as dist
from sparrow.components.acceptance import AcceptanceTail, TailTokens
from sparrow.components.budget import StepSchedule
from sparrow.components.tail_controller import TailController

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
results = []
for tokens in (3000, 90_000, 1):
    generator = torch.Generator().manual_seed(0)
    alpha_T = 1 - 0.05 * torch.empty(tokens).exponential_(generator=generator)
    length_T = torch.randint(0, 5000, (tokens,), generator=generator)
    sparse_T, dense_T = (0.1 * torch.randn(tokens, generator=generator) - 1 for _ in range(2))
    # Unequal shares: the first rank has every third token, and none of the last bin.
    first_T = (torch.arange(tokens) % 3 == 0) & (length_T < 4000)
    own_T = torch.ones_like(first_T) if ranks == 1 else first_T if rank == 0 else ~first_T
    parts = [x[own_T] for x in (alpha_T, torch.ones(tokens), length_T, sparse_T, dense_T, alpha_T / 2, length_T)]
    summary = AcceptanceTail().summary(TailTokens(*parts))
    controller = TailController(StepSchedule(pages=[32, 32, 64]), min_tokens=500)
    moves = controller.observe(parts[0], parts[2], 0.91)
    results.append({"summary": summary, "moves": moves, "pages": controller.table.entries})
open(f"{folder}/{ranks}_{rank}.json", "w").write(json.dumps(results))
"""


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    def start(rank: int, ranks: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(ranks), str(tmp_path)])

    processes = [start(0, 1), start(0, 2), start(1, 2)]
    assert [process.wait(timeout=100) for process in processes] == [0, 0, 0]
    one, first, second = (json.loads((tmp_path / name).read_text()) for name in ("1_0.json", "2_0.json", "2_1.json"))
    assert first == second, "every rank has the same figures and takes the same decision"
    assert [entry["moves"]["budget/moves"] > 0 for entry in one] == [True, True, False]
    # The few tokens are gathered, the many go through a histogram; of the last one, a rank has none.
    for ours, theirs, error in zip(one, first, (1e-9, 1 / CELLS, 1e-9), strict=True):
        assert (theirs["moves"], theirs["pages"]) == (ours["moves"], ours["pages"])
        assert theirs["summary"].keys() == ours["summary"].keys()
        for name, value in ours["summary"].items():
            relative = 0.011 if error > 1e-9 and "p95" in name else 1e-9
            assert theirs["summary"][name] == pytest.approx(value, rel=relative, abs=error), name
    assert first[1]["summary"] != one[1]["summary"]
