"""fp32 logits of half-precision weights: exact, with gradients, and without a copy of the matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparrow.models import head
from sparrow.models.head import fp32_logits


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def example(dtype: torch.dtype, vocab: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NE, weight_VE = (torch.randn(n, 24, generator=generator).to(dtype) for n in (5, vocab))
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_()


@pytest.mark.parametrize("rows", [7, 50, 64])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str)
def test_logits_and_gradients_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch, rows: int, dtypes: Any) -> None:
    monkeypatch.setattr(head, "CAST_ROWS", rows)
    hidden_NE, weight_VE = (x.detach().to(d).requires_grad_() for x, d in zip(example(dtypes[1]), dtypes, strict=True))
    logits_NV = fp32_logits(hidden_NE, weight_VE)
    expected_NV = hidden_NE.double() @ weight_VE.double().T
    torch.testing.assert_close(logits_NV.double(), expected_NV, atol=1e-5, rtol=1e-5)
    weights_NV = torch.randn(5, 50, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((logits_NV * weights_NV).sum(), (hidden_NE, weight_VE))
    theirs = torch.autograd.grad((expected_NV * weights_NV).sum(), (hidden_NE, weight_VE))
    for gradient, reference, dtype in zip(ours, theirs, dtypes, strict=True):
        assert gradient.dtype == reference.dtype == dtype
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5)


def test_the_matrix_is_never_copied_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CAST_ROWS", 16)
    hidden_NE, weight_VE = example(torch.bfloat16, vocab=400)
    saved: list[int] = []
    with (
        LargestResult() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x),
    ):
        logits_NV = fp32_logits(hidden_NE, weight_VE)
        assert sum(saved) == hidden_NE.nbytes + weight_VE.nbytes
        logits_NV.sum().backward()
    assert largest.nbytes <= weight_VE.nbytes, "an fp32 copy has twice its bytes"


def test_frozen_weights_get_no_gradient() -> None:
    hidden_NE, weight_VE = example(torch.bfloat16)
    fp32_logits(hidden_NE, weight_VE.detach()).sum().backward()
    assert hidden_NE.grad is not None and weight_VE.grad is None
