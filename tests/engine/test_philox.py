from __future__ import annotations

import torch

from sparrow.engine.philox import philox_4x32, uniforms


def test_known_answers():
    # Random123's kat_vectors, philox4x32 with 10 rounds: counter and key of zeros, of ones, and of the digits of pi.
    ones = 0xFFFFFFFF
    cases = [
        ([0, 0, 0, 0], (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([ones] * 4, (ones, ones), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, answer in cases:
        assert philox_4x32(torch.tensor([counter]), key)[0].tolist() == answer


def test_uniforms_depend_on_every_part_of_the_key_and_on_nothing_else():
    base = uniforms(3, 5, 7, 100)
    assert torch.equal(base[:10], uniforms(3, 5, 7, 10))
    for key in ((4, 5, 7), (3, 6, 7), (3, 5, 8), (3, 5 + 2**32, 7)):
        assert (base != uniforms(*key, 100)).all()


def test_uniforms_are_uniform():
    u = torch.cat([uniforms(0, prompt, 0, 10_000) for prompt in range(20)])
    assert u.min() >= 0 and u.max() < 1
    # 200K numbers in 100 bins of 2,000: each within 6 standard deviations.
    counts = torch.histc(u.float(), bins=100, min=0, max=1)
    assert (counts - 2000).abs().max() < 6 * 2000**0.5
