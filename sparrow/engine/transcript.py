"""What was generated so far, on the host.

Axes: B rows of a look, W tokens of its window, T response tokens of all sequences, S sequences.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Transcript:
    """Keeps what each look brought as one chunk; sorts by sequence at the end, once, instead of row by row."""

    def __init__(self) -> None:
        self._sequences: list[Tensor] = []
        self._chunks: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, sequences_B: Tensor, counts_B: Tensor, outputs: dict[str, Tensor]) -> None:
        """Appends to each sequence the first `counts_B` of its row in every output [B, W, ...]."""
        self._sequences.append(sequences_B.repeat_interleave(counts_B))
        for name, output in outputs.items():
            kept_BW = torch.arange(output.shape[1]) < counts_B[:, None]
            self._chunks[name].append(output[kept_BW])

    def packed(self, num_sequences: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Length of each sequence [S], and all outputs [T, ...] in order of sequence and position; leaves nothing."""
        sequence_T = torch.cat(self._sequences)
        # Stable: a sequence's chunks stay in the order in which they came.
        order_T = sequence_T.argsort(stable=True)
        outputs = {name: torch.cat(self._chunks.pop(name))[order_T] for name in tuple(self._chunks)}
        return sequence_T.bincount(minlength=num_sequences), outputs
