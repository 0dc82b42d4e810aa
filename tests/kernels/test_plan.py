"""The lists that a decode step's layers share, against plain tensor arithmetic.

Axes: B rows, N blocks per row, K KV heads.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's builds for CUDA")

from sparrow.kernels.plan import plan_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_slots_and_lists(device, heads):
    lengths = [1, 127, 128, 129, 640]
    table_BN = (torch.randperm(25, generator=torch.Generator().manual_seed(0)) + 1).view(5, 5)
    slots_B, lists_RN, counts_R = plan_rows(table_BN.to(device), torch.tensor(lengths, device=device), heads, 26, 128)
    expected = [int(table_BN[row, (n - 1) // 128]) * 128 + (n - 1) % 128 for row, n in enumerate(lengths)]
    assert slots_B.tolist() == expected
    assert counts_R.view(5, heads).tolist() == [[(n - 1) // 128 + 1] * heads for n in lengths]
    for head in range(heads):
        assert torch.equal(lists_RN.view(5, heads, 5)[:, head].cpu().long(), table_BN + head * 26)
