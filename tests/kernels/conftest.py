"""Numbers for the kernels to run on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def randn(device: torch.device) -> Callable[..., Tensor]:
    """Normal numbers by shape, of one stream made on the CPU: the same on every device."""
    generator = torch.Generator().manual_seed(0)

    def build(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return build
