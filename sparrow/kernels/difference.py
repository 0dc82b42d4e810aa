"""How far two distributions over the vocabulary are apart, from their fp32 logits: each table is read once.

For the acceptance rate, which is 1 - sum |p - q| / 2; see `sparrow.training.segments`.

Axes: N tokens, V vocabulary, B blocks of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _difference_kernel(
    first, second, first_normaliser, second_normaliser, partial, temperature, vocab, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(first + row * vocab + token, mask=inside, other=float("-inf"))
    y = tl.load(second + row * vocab + token, mask=inside, other=float("-inf"))
    # Divided exactly: an approximate division may be fused with the subtraction for one of the two, and not for the
    # other, and then equal logits differ.
    p = tl.exp(tl.div_rn(x, temperature) - tl.load(first_normaliser + row))
    q = tl.exp(tl.div_rn(y, temperature) - tl.load(second_normaliser + row))
    tl.store(partial + row * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.abs(p - q), 0))


def summed_difference(
    first_NV: Tensor, second_NV: Tensor, first_normaliser_N: Tensor, second_normaliser_N: Tensor, temperature: float
) -> Tensor:
    """sum_v |p - q| [N] of p = softmax(first / temperature), q likewise; the same bits each time.

    Args:
        first_normaliser_N, second_normaliser_N: log-sum-exp of logits / temperature.
    """
    assert first_NV.shape == second_NV.shape, (first_NV.shape, second_NV.shape)
    assert first_NV.is_contiguous() and second_NV.is_contiguous(), (first_NV.stride(), second_NV.stride())
    N, V = first_NV.shape
    blocks = triton.cdiv(V, BLOCK)
    partial_NB = torch.empty(N, blocks, dtype=torch.float32, device=first_NV.device)
    if N:
        normalisers = (first_normaliser_N, second_normaliser_N)
        _difference_kernel[(blocks, N)](
            first_NV, second_NV, *normalisers, partial_NB, temperature, V, BLOCK, num_warps=4
        )
    return partial_NB.sum(-1)
