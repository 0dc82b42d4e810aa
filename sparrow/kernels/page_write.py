"""From the fused projection of a decode step to the cache, in one kernel: q/k-norm, RoPE, KV write, landmark.

One program per row and KV head. The arithmetic rounds where `sparrow.models.decoder` rounds. A landmark is written when
its page completes, from the keys in the cache and the one in registers.

Axes: C shares of the projection, B rows, H query heads, K KV heads, G = H / K, D head dim, X = (H + 2 K) * D,
S slots of the pool, P its pages, M landmarks per page.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch


@triton.jit
def _sum_shares(base, offset, mask, stride, C, bias, at, dtype: tl.constexpr, BIAS: tl.constexpr):
    """The projection at `offset`, its shares added up and rounded."""
    total = tl.zeros(offset.shape, tl.float32)
    for c in range(C):
        total += tl.load(base + c * stride + offset, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(dtype)


@triton.jit
def _norm_rotate(low, high, gain, cos, sin, eps, NORM: tl.constexpr, D: tl.constexpr):
    """The two halves of heads [heads, D / 2], normalised and rotated, in the input's dtype."""
    half = tl.arange(0, D // 2)
    dtype = low.dtype
    if NORM:
        x, y = low.to(tl.float32), high.to(tl.float32)
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        low = (x * scale).to(dtype) * tl.load(gain + half)[None, :]
        high = (y * scale).to(dtype) * tl.load(gain + D // 2 + half)[None, :]
    # As addcmul on tensors of this dtype: the first product is rounded, the sum is rounded once.
    first_low = (low * cos).to(dtype).to(tl.float32)
    first_high = (high * cos).to(dtype).to(tl.float32)
    sine = sin.to(tl.float32)
    rotated_low = (first_low - high.to(tl.float32) * sine).to(dtype)
    rotated_high = (first_high + low.to(tl.float32) * sine).to(dtype)
    return rotated_low, rotated_high


@triton.jit
def _within(x, dtype: tl.constexpr):
    """Cut to what 8 bits can hold, where that is the dtype: beyond 448 that format has NaN alone."""
    if dtype == tl.float8e4nv:
        return tl.clamp(x, -448.0, 448.0)
    return x


@triton.jit
def _complete_page(
    keys, page_start, k_low, k_high, mark, M: tl.constexpr, MINMAX: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Landmarks of a page whose last key is still in registers: M means, or its elementwise minimum and maximum."""
    half = tl.arange(0, D // 2)
    token = tl.arange(0, PAGE)
    earlier = (token < PAGE - 1)[:, None]
    at = keys + (page_start + token)[:, None] * D + half[None, :]
    low = tl.where(earlier, tl.load(at, mask=earlier, other=0.0), k_low)
    high = tl.where(earlier, tl.load(at + D // 2, mask=earlier, other=0.0), k_high)
    dtype = keys.dtype.element_ty
    if MINMAX:
        tl.store(mark + half, tl.min(low.to(tl.float32), 0).to(dtype))
        tl.store(mark + D // 2 + half, tl.min(high.to(tl.float32), 0).to(dtype))
        tl.store(mark + D + half, tl.max(low.to(tl.float32), 0).to(dtype))
        tl.store(mark + D + D // 2 + half, tl.max(high.to(tl.float32), 0).to(dtype))
    else:
        segment: tl.constexpr = PAGE // M
        to_mark = mark + tl.arange(0, M)[:, None] * D + half[None, :]
        mean_low = tl.sum(tl.reshape(low.to(tl.float32), (M, segment, D // 2)), 1) / segment
        mean_high = tl.sum(tl.reshape(high.to(tl.float32), (M, segment, D // 2)), 1) / segment
        kept: tl.constexpr = mark.dtype.element_ty
        tl.store(to_mark, _within(mean_low, kept).to(kept))
        tl.store(to_mark + D // 2, _within(mean_high, kept).to(kept))


@triton.jit
def _write_kernel(
    shares, bias, q_gain, k_gain, cos, sin, slots, q_out, keys, values, marks, C, share_stride, num_slots, eps,
    K: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, MARKS: tl.constexpr, MINMAX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, D // 2)
    dtype = q_out.dtype.element_ty
    cosine = tl.load(cos + row * (D // 2) + half)[None, :]
    sine = tl.load(sin + row * (D // 2) + half)[None, :]
    width: tl.constexpr = (G + 2) * K * D
    start = row * width

    # The group's queries, this head's key and its value are rows of one tile: one pass over the shares.
    member = tl.arange(0, GROUP)[:, None]
    owner = tl.where(member < G, head * G + member, tl.where(member == G, G * K + head, (G + 1) * K + head))
    at = owner * D + half[None, :]
    used = member < G + 2
    low = _sum_shares(shares, start + at, used, share_stride, C, bias, at, dtype, BIAS)
    high = _sum_shares(shares, start + at + D // 2, used, share_stride, C, bias, at + D // 2, dtype, BIAS)

    slot = tl.load(slots + row)
    cell = (head.to(tl.int64) * num_slots + slot) * D
    to_value = values + cell + half[None, :] + member * 0
    tl.store(to_value, low, mask=member == G + 1)
    tl.store(to_value + D // 2, high, mask=member == G + 1)
    q_low, q_high = _norm_rotate(low, high, q_gain, cosine, sine, eps, NORM, D)
    target = q_out + row * (G * K * D) + at
    tl.store(target, q_low, mask=member < G)
    tl.store(target + D // 2, q_high, mask=member < G)
    k_low, k_high = _norm_rotate(low, high, k_gain, cosine, sine, eps, NORM, D)
    to_key = keys + cell + half[None, :] + member * 0
    tl.store(to_key, k_low, mask=member == G)
    tl.store(to_key + D // 2, k_high, mask=member == G)
    if MARKS > 0:  # noqa: SIM102  joined, it would be compiled for a dense layer too: no landmarks, a division by zero
        if slot % PAGE == PAGE - 1:
            # Rows of a tile sum to the key's row alone: its values in registers, without a trip through memory.
            key_low = tl.sum(tl.where(member == G, k_low.to(tl.float32), 0.0), 0)[None, :].to(dtype)
            key_high = tl.sum(tl.where(member == G, k_high.to(tl.float32), 0.0), 0)[None, :].to(dtype)
            first = head.to(tl.int64) * num_slots + slot - (PAGE - 1)
            mark = marks + (first // PAGE) * MARKS * D
            _complete_page(keys, first, key_low, key_high, mark, MARKS, MINMAX, PAGE, D)


def write_heads(
    qkv_CBX: Tensor, bias_X: Tensor | None, gains: tuple[Tensor, Tensor] | None, cos_BD: Tensor, sin_BD: Tensor,
    slots_B: Tensor, keys_KSD: Tensor, values_KSD: Tensor, marks_KPMD: Tensor | None, minmax: bool, q_BKGD: Tensor,
    page_size: int, eps: float,
) -> None:  # fmt: skip
    """Normalises and rotates q and k, writes q into `q_BKGD`, k and v into the cache, and landmarks of full pages.

    Args:
        qkv_CBX: the fused projection in shares that sum to it; `bias_X` is added to the sum.
        gains: of the q- and k-norm; None for a model without.
        cos_BD, sin_BD: [B, D / 2], of each row's position, in the model's dtype.
        marks_KPMD: where to keep the means of a page's M equal segments, M a power of two; None in a dense layer.
        minmax: keep the elementwise minimum and maximum of its keys instead, M = 2.
    """
    B, K, G, D = q_BKGD.shape
    q_gain, k_gain = gains if gains is not None else (q_BKGD, q_BKGD)
    pdl = dependent_launch()
    _write_kernel[(B, K)](
        qkv_CBX, q_BKGD if bias_X is None else bias_X, q_gain, k_gain, cos_BD, sin_BD, slots_B, q_BKGD, keys_KSD,
        values_KSD, keys_KSD if marks_KPMD is None else marks_KPMD, len(qkv_CBX), qkv_CBX.stride(0),
        keys_KSD.shape[1], eps, K, G, triton.next_power_of_2(G + 2), D, page_size, gains is not None,
        bias_X is not None, 0 if marks_KPMD is None else marks_KPMD.shape[2], minmax, pdl, num_warps=1,
        launch_pdl=pdl,
    )  # fmt: skip
