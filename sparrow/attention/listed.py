"""The Triton kernel of `sparrow.kernels.page_attend` as a `ListAttention`.

On an H200 a step with it is 1 to 2 % faster than with FlexAttention and tuned options (docs/performance.md); it
balances rows of unequal length, and one compiled kernel serves every batch size, where FlexAttention compiles one per
shape.

Axes: R folded rows, G query heads per KV head, D head dim, K KV heads, S slots, W list width, B rows.
"""

from __future__ import annotations

from torch import Tensor

from sparrow.kernels.page_attend import attend_lists

# Programs that fill the device: measured best between 400 and 640 on an H200 at every shape tried.
PROGRAMS = 512
SHORTEST_SHARE = 128


def attend_triton(
    q_RGD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, lists_RW: Tensor, counts_R: Tensor, lengths_B: Tensor,
    slots_B: Tensor, page_size: int,
) -> Tensor:  # fmt: skip
    """See `sparrow.attention.fused.ListAttention`."""
    D = q_RGD.shape[2]
    keys_SD, values_SD = keys_KSD.view(-1, D), values_KSD.view(-1, D)
    share = share_tokens(len(q_RGD), lists_RW.shape[1] * page_size)
    return attend_lists(q_RGD, keys_SD, values_SD, lists_RW, counts_R, lengths_B, page_size, share)


def share_tokens(rows: int, tokens: int) -> int:
    """Tokens per program, a power of two, for lists of up to `tokens`."""
    wanted = max(tokens * rows // PROGRAMS, SHORTEST_SHARE)
    lower = 1 << (wanted.bit_length() - 1)
    return lower if wanted < 1.5 * lower else 2 * lower
