"""Residual and RMSNorm in one kernel against the modules."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.kernels.add_norm import add_norm
from sparrow.models.decoder import RMSNorm

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 96), (16, 2560)])
@pytest.mark.parametrize("shares", [0, 1, 2, 3])
def test_residual_and_norm_are_those_of_the_modules(device, randn, shares, rows, size, dtype):
    residual, gain = randn(rows, size, dtype=dtype), randn(size, dtype=dtype)
    shares_CME = randn(shares, rows, size, dtype=dtype if shares == 1 else torch.float32)
    norm = RMSNorm(size, 0.1).to(device)
    norm.weight.data = gain
    added = residual + shares_CME.float().sum(0).to(dtype)
    expected = norm(added).detach()
    out = add_norm(residual, shares_CME, gain, 0.1)
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2**-7, "rtol": 2**-7}
    torch.testing.assert_close(residual, added, **close)
    torch.testing.assert_close(out, expected, **close)
