"""Attention over page lists in shares, against gather and SDPA.

Axes: B rows, K KV heads, R = B * K, G query heads per KV head, D head dim, S slots, W list width.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.attention.gather import attend_pages
from sparrow.attention.listed import attend_triton, share_tokens
from sparrow.kernels.page_attend import attend_lists

pytestmark = pytest.mark.gpu

K, D, TOKENS = 2, 32, 512
# One token, both sides of a tile of 64, of the shares, and lists that fill their width.
LENGTHS = [1, 16, 63, 64, 65, 127, 128, 129, 300, 511, TOKENS, 4 * TOKENS]
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-4}, torch.bfloat16: {"atol": 0.01, "rtol": 0.02}}


def world(page: int, group: int, dtype, device, randn):
    """Queries, a pool and random page lists: lists in the order of `attend_pages`, folded ones, counts and lengths."""
    width, pages = TOKENS // page, 4 * TOKENS // page
    keys_KSD, values_KSD = (randn(K, pages * page, D, dtype=dtype) for _ in range(2))
    lengths_B = torch.tensor(LENGTHS, device=device)
    counts_B = (-(-lengths_B // page)).clamp(max=width)
    rng = torch.Generator().manual_seed(page + group)
    lists = [torch.stack([torch.randperm(pages, generator=rng)[:width] for _ in range(K)]) for _ in LENGTHS]
    pages_BKW = torch.stack(lists).to(device)
    q_BKGD = randn(len(LENGTHS), K, group, D, dtype=dtype)
    folded_RW = (pages_BKW + torch.arange(K, device=device)[:, None] * pages).flatten(0, 1).int()
    return q_BKGD, keys_KSD, values_KSD, pages_BKW, folded_RW, counts_B, lengths_B


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("page", "group"), [(16, 1), (16, 4), (16, 5), (32, 2), (128, 4)])
def test_every_split_equals_gather(device, randn, page, group, dtype):
    q, keys_KSD, values_KSD, pages_BKW, folded_RW, counts_B, lengths_B = world(page, group, dtype, device, randn)
    expected = attend_pages(q, keys_KSD, values_KSD, pages_BKW, counts_B, lengths_B, page)
    counts_R = counts_B.int().repeat_interleave(K)
    keys_SD, values_SD = keys_KSD.view(-1, D), values_KSD.view(-1, D)
    for share in (64, 128, 256, TOKENS):
        out = attend_lists(q.flatten(0, 1), keys_SD, values_SD, folded_RW, counts_R, lengths_B, page, share)
        torch.testing.assert_close(out.view_as(expected), expected, **CLOSE[dtype])


def test_the_backend_chooses_a_split_of_whole_tiles(device, randn):
    q, keys_KSD, values_KSD, pages_BKW, folded_RW, counts_B, lengths_B = world(16, 4, torch.float32, device, randn)
    expected = attend_pages(q, keys_KSD, values_KSD, pages_BKW, counts_B, lengths_B, 16)
    counts_R = counts_B.int().repeat_interleave(K)
    out = attend_triton(q.flatten(0, 1), keys_KSD, values_KSD, folded_RW, counts_R, lengths_B, lengths_B, 16)
    torch.testing.assert_close(out.view_as(expected), expected, **CLOSE[torch.float32])
    for rows in (1, 8, 96, 256):
        for tokens in (48, 4096, 32768, 40960):
            assert share_tokens(rows, tokens) % 128 == 0
