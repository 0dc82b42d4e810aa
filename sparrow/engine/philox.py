"""Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011), so that a number depends on its key alone.

What a sequence draws then does not depend on its neighbours in the batch, on the order of admission or on the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_4x32(counter_N4: Tensor, key: tuple[int, int]) -> Tensor:
    """Ten Philox rounds of int64 counters whose entries are 32-bit words; returns such words, [N, 4]."""
    c0, c1, c2, c3 = counter_N4.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # The 64-bit product wraps in int64, but its low and high words are those of the unsigned one after masking.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def uniforms(seed: int, prompt: int, sample: int, num_positions: int, device: torch.device | str = "cpu") -> Tensor:
    """One number in [0, 1) per response position of one sequence, fp64 [num_positions].

    Args:
        seed: of the run; its low 64 bits are the key.
        prompt: number of the prompt in the data's order, below 2^64.
        sample: number of the sample within the prompt's group, below 2^32.
    """
    position_N = torch.arange(num_positions, dtype=torch.int64, device=device)
    words = (sample & _MASK, prompt & _MASK, prompt >> 32 & _MASK)
    counter_N4 = torch.stack([position_N, *(torch.full_like(position_N, word) for word in words)], -1)
    out_N4 = philox_4x32(counter_N4, (seed & _MASK, seed >> 32 & _MASK))
    # 53 bits, all that fp64 holds below 1.
    return (out_N4[:, 0] * 2**21 + (out_N4[:, 1] >> 11)).double() * 2.0**-53
