"""Selection inside one Triton program: the k-th largest of a vector of floats, exactly, without sorting it."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def sortable(x):
    """fp32 to int32 keys of the same order; the key of no finite number is LOWEST."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: minus zero and zero are one number
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def kth_largest(keys, k, count):
    """Largest key t that at least k of the `count` keys above LOWEST reach, and how many reach it; 1 <= k <= count.

    Searches the keys' range, by interpolation of the counts and by halving in turn, and ends early at any t that
    exactly k keys reach: about ten rounds for 2,048 scores.
    """
    low = tl.min(tl.where(keys == LOWEST, 2**31 - 1, keys), 0).to(tl.int64)
    high = tl.max(keys, 0).to(tl.int64)
    at_low = count  # keys >= low
    above_high = 0 * count  # keys > high
    halve = 0
    while low < high:
        share = (at_low - k + 0.5) / (at_low - above_high).to(tl.float32)
        share = tl.where(halve == 1, 0.5, share)
        step = ((high - low).to(tl.float32) * share).to(tl.int64)
        middle = low + tl.minimum(tl.maximum(step, 1), high - low)
        reached = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = reached >= k
        low = tl.where(enough, middle, low)
        at_low = tl.where(enough, reached, at_low)
        high = tl.where(reached == k, middle, tl.where(enough, high, middle - 1))
        above_high = tl.where(enough, above_high, reached)
        halve = 1 - halve
    return low.to(tl.int32), at_low


@triton.jit
def largest(keys, k, count):
    """True at k of the largest keys, of `count` above LOWEST; of equal ones the first stay."""
    threshold, reached = kth_largest(keys, k, count)
    kept = keys >= threshold
    if reached > k:
        ties = keys == threshold
        place = tl.cumsum(ties.to(tl.int32), 0)
        kept = kept & ((ties == 0) | (place <= k - (reached - tl.max(place, 0))))
    return kept
