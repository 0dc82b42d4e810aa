"""Quantiles over the tokens of all ranks, without all tokens on each rank.

In one process, and while the tokens are few, they are exact. Beyond that, ranks add up a histogram: an order statistic
is then off by less than the width of a cell, and so is a quantile, which lies between two of them. With `UNIT_EDGES`
that is 1/4096 (< .00025), with `KL_EDGES` 1.1 % of the value or 1e-10.

Axes: T tokens of this rank, N bins of tokens, H cells of a histogram, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparrow.training import distributed

CELLS = 4096
UNIT_EDGES = torch.linspace(0, 1, CELLS + 1, dtype=torch.float64)
# k3 of a log-ratio of at most 20 is below 5e8.
KL_EDGES = torch.cat([torch.zeros(1), torch.logspace(-10, math.log10(5e8), CELLS)]).double()
# Up to so many tokens over all ranks are gathered, and the figures exact on any number of ranks.
EXACT_TOKENS = 2**16


class Ordered(Protocol):
    """Values whose order statistics are known."""

    @property
    def count(self) -> int:
        """Number of values."""
        ...

    def at(self, rank: int) -> float:
        """The value that `rank` others stand below, 0 <= rank < count."""
        ...


class SortedValues:
    """The values themselves, on the CPU; by a sort, because torch.quantile refuses more than 16M."""

    def __init__(self, values_T: Tensor) -> None:
        # NumPy sorts with vector instructions: millions of numbers on one core in a ninth of PyTorch's time.
        self.sorted_T = np.sort(values_T.double().numpy())
        self.count = len(self.sorted_T)

    def at(self, rank: int) -> float:
        """Exact."""
        return float(self.sorted_T[rank])


class Histogram:
    """Counts of values in cells; the values of a cell are taken to be spread evenly over it.

    Args:
        counts_H: values per cell, int64.
        edges_H: H + 1 ascending edges; a value on an edge belongs to the cell above it.
    """

    def __init__(self, counts_H: Tensor, edges_H: Tensor) -> None:
        self.counts_H, self.edges_H = counts_H, edges_H
        self.cumulative_H = counts_H.cumsum(0)
        self.count = int(self.cumulative_H[-1])

    def at(self, rank: int) -> float:
        """Off by less than the width of its cell."""
        cell = int(torch.searchsorted(self.cumulative_H, rank, right=True))
        inside = int(self.counts_H[cell])
        before = int(self.cumulative_H[cell]) - inside
        return float(torch.lerp(self.edges_H[cell], self.edges_H[cell + 1], (rank - before + 0.5) / inside))


def quantile(values: Ordered, level: float) -> float:
    """Quantile with linear interpolation between order statistics, as `numpy.quantile`; at least one value."""
    position = level * (values.count - 1)
    below = math.floor(position)
    low = values.at(below)
    return low if position == below else low + (values.at(below + 1) - low) * (position - below)


def cell_counts(values_T: Tensor, bin_T: Tensor, num_bins: int, edges_H: Tensor) -> Tensor:
    """Histogram of each bin over all ranks, int64 [N, H], the same on every rank; collective.

    Values beyond the outer edges count in the outer cells.
    """
    cells = len(edges_H) - 1
    cell_T = torch.bucketize(values_T.double(), edges_H[1:-1], right=True)
    counts_NH = torch.bincount(bin_T * cells + cell_T, minlength=num_bins * cells).view(num_bins, cells)
    return distributed.sum_tensor(counts_NH)


class BinnedTokens:
    """This rank's share of tokens that lie in bins; every call is collective, its result that of all ranks.

    Args:
        bin_T: number of each token's bin, int64, on the CPU.
        exact_tokens: tokens over all ranks up to which several ranks gather them.

    Attributes:
        counts_N: tokens per bin over all ranks, int64; empty without a token.
    """

    def __init__(self, bin_T: Tensor, exact_tokens: int = EXACT_TOKENS) -> None:
        own = (bin_T.numel(), int(bin_T.max()) + 1 if bin_T.numel() else 0)
        sizes = distributed.gather_objects(own)
        self.num_bins = max(bins for _, bins in sizes)
        self.exact = len(sizes) == 1 or sum(tokens for tokens, _ in sizes) <= exact_tokens
        self.bin_T = bin_T
        self.by_bin_T = distributed.gather(bin_T).argsort() if self.exact else None
        self.counts_N = distributed.sum_tensor(torch.bincount(bin_T, minlength=self.num_bins))

    def sums(self, columns: Sequence[Tensor]) -> Tensor:
        """Sum of each column [T] per bin, fp64 [N, C]."""
        sums = [torch.bincount(self.bin_T, values_T.double(), self.num_bins) for values_T in columns]
        # Those of a rank without tokens are integers.
        return distributed.sum_tensor(torch.stack(sums, 1).double())

    def whole(self, values_T: Tensor, edges_H: Tensor) -> Ordered:
        """All finite values, at least one over all ranks."""
        if self.exact:
            return SortedValues(distributed.gather(values_T))
        return Histogram(cell_counts(values_T, torch.zeros_like(self.bin_T), 1, edges_H)[0], edges_H)

    def bins(self, values_T: Tensor, edges_H: Tensor) -> dict[int, Ordered]:
        """Finite values of each bin that has tokens."""
        filled = self.counts_N.nonzero().flatten().tolist()
        if self.by_bin_T is not None:
            parts = distributed.gather(values_T)[self.by_bin_T].split(self.counts_N.tolist())
            return {n: SortedValues(parts[n]) for n in filled}
        counts_NH = cell_counts(values_T, self.bin_T, self.num_bins, edges_H)
        return {n: Histogram(counts_NH[n], edges_H) for n in filled}
