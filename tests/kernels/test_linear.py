"""Projections of a few rows against exact products; SwiGLU against the module's rounding.

Axes: M rows, K input and N output features.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.kernels.linear import MOST_ROWS, LinearOptions, linear, swiglu
from sparrow.kernels.options import SHIPPED, LinearOptionsTable, candidates, row_tiles
from sparrow.kernels.options_file import cache_file

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
N, K = 96, 1024


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, LinearOptions(16, 64, 1, 4, 3, 0)),
        (5, LinearOptions(32, 128, 2, 4, 4, 0)),
        (5, LinearOptions(32, 128, 2, 4, 4, 512)),
        (16, LinearOptions(47, 64, 4, 4, 4, 0)),
        (17, LinearOptions(16, 128, 1, 4, 3, 512)),
        (MOST_ROWS, LinearOptions(16, 64, 8, 4, 3, 0)),
    ],
)
def test_shares_sum_to_the_product(device, randn, rows, options, dtype):
    x, weight = randn(rows, K, dtype=dtype), randn(N, K, dtype=dtype)
    exact = (x.double() @ weight.double().T).float()
    shares = linear(x, weight, options)
    assert shares.shape == (options.shares, rows, N)
    # Products of bf16 are exact in fp32, and so is all but the order of the sum; one share alone is rounded at the end.
    rounded = dtype == torch.bfloat16 and options.shares == 1
    assert shares.dtype == (torch.bfloat16 if rounded else torch.float32)
    close = {"atol": 1e-3, "rtol": 2**-8 if rounded else 1e-5}
    torch.testing.assert_close(shares.float().sum(0), exact, **close)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [None, LinearOptions(32, 128, 1, 4, 4, 0)], ids=["library", "kernel"])
def test_logits_are_not_rounded_to_the_inputs_dtype(device, randn, options):
    x, weight = randn(5, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16)
    exact = (x.double() @ weight.double().T).float()
    out = linear(x, weight, options, torch.float32)
    assert out.shape == (1, 5, N) and out.dtype == torch.float32
    torch.testing.assert_close(out[0], exact, atol=1e-3, rtol=1e-5)


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize("fetch", [0, 512])
@pytest.mark.parametrize("rows", [1, 5, MOST_ROWS, MOST_ROWS + 1])
def test_swiglu_rounds_where_the_module_does(device, randn, rows, fetch, dtype):
    x, weight_2NK = randn(rows, K, dtype=dtype), randn(2 * N, K, dtype=dtype) / K**0.5
    gate, up = F.linear(x, weight_2NK).chunk(2, -1)
    expected = F.silu(gate) * up
    # Where a sum in another order rounds gate or up to its neighbour, the product moves by as much.
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 2**-8, "rtol": 2**-6}
    options = LinearOptions(32, 64, 1, 4, 3, fetch)
    torch.testing.assert_close(swiglu(x, weight_2NK, options), expected, **close)
    torch.testing.assert_close(swiglu(x, weight_2NK, None), expected, **close)


@pytest.mark.gpu
def test_more_rows_than_the_kernel_is_for_take_the_library(device, randn):
    x, weight = randn(MOST_ROWS + 1, K), randn(N, K)
    assert torch.equal(linear(x, weight, LinearOptions(16, 64, 4, 4, 3, 0)), F.linear(x, weight)[None])


def test_rounds_must_divide_a_share():
    options = LinearOptions(rows=47, tile_k=128, shares=2, num_warps=4, num_stages=4, fetch=512)
    assert options.fits(1024)
    assert not options.fits(1152), "1,152 inputs are not two shares of whole rounds of 128"
    assert not options.fits(768), "a share of 384 inputs is less than the 512 that are prefetched"


@pytest.mark.parametrize(
    ("N", "K", "gated"), [(2048, 2048, False), (9728, 2560, True), (5120, 17408, False), (151936, 4096, False)]
)
def test_candidates_fit_and_fill_the_device(N, K, gated):
    found = candidates(N, K, tile_m=32, processors=132, shared_memory=200 * 2**10, itemsize=2, gated=gated)
    assert found and len(set(found)) == len(found)
    for options in found:
        assert options.fits(K) and (options.shares == 1 or not gated)
        blocks = -(-N // options.rows) * options.shares
        assert blocks >= 120, "a multiprocessor without work"


def test_every_row_count_has_its_tile():
    assert row_tiles(1) == [16] and row_tiles(17) == [16, 32] and row_tiles(1000) == [16, 32, 64]


def test_shipped_options_fit_their_matrices():
    for key, values in json.loads(SHIPPED.read_text()).items():
        gated = key.endswith(" gated")
        tile_m, outputs, inputs = map(int, key.removesuffix(" gated").rsplit(" ", 1)[1].split("x"))
        assert tile_m in row_tiles(MOST_ROWS), key
        if values is not None:
            assert LinearOptions(*values).fits(inputs) and LinearOptions(*values).rows <= outputs, key
            assert not gated or LinearOptions(*values).shares == 1, key


@pytest.mark.gpu
def test_measured_options_are_kept_on_disk(device, randn, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path))
    weights = [randn(4096, 256, dtype=torch.bfloat16) for _ in range(2)]
    table = LinearOptionsTable(device, torch.bfloat16)
    assert table.get(5, weights[0], gated=False) is None, "what nobody measured is the library's"
    table.tune(weights, 5, gated=False)
    (entry,) = json.loads(cache_file().read_text()).items()
    assert entry[0].endswith("bfloat16 16x4096x256")
    chosen = table.get(16, weights[0], gated=False)
    again = LinearOptionsTable(device, torch.bfloat16)
    assert again.get(1, weights[0], gated=False) == chosen
    assert chosen == (None if entry[1] is None else LinearOptions(*entry[1]))
    for rows, other, gated in ((17, weights[0], False), (5, weights[0].T, False), (5, weights[0], True)):
        assert again.get(rows, other, gated) is None, "options are of a tile of rows, a shape and a kind"
    written = cache_file().stat().st_mtime_ns
    again.tune(weights, 5, gated=False)
    assert cache_file().stat().st_mtime_ns == written, "what is known is not measured again"
