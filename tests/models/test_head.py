"""fp32 logits of half-precision weights: exact, with gradients, and without a copy of the matrix."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparrow.models import head
from sparrow.models.head import SummingHead, WeightGradient, fp32_logits
from sparrow.training.logprob import token_logprobs


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


def loss_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of 1,024 tokens, matrix, targets, and what each log-prob counts; the values are bf16's."""
    generator = torch.Generator().manual_seed(0)
    hidden_NE, weight_VE = (torch.randn(n, 24, generator=generator).bfloat16().to(dtype) for n in (1024, 50))
    targets_N = torch.randint(50, (1024,), generator=generator)
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), targets_N, torch.linspace(0.5, 1.5, 1024)


def chunked_gradients(make_head: Any) -> tuple[Tensor, Tensor]:
    """In bf16 and 64 chunks; the matrix has a gradient of its own besides, as a tied one has."""
    hidden_NE, weight_VE, targets_N, scale_N = loss_inputs(torch.bfloat16)
    logprobs_N, _ = token_logprobs(hidden_NE, make_head(weight_VE), targets_N, 0.7, chunk_size=16)
    return torch.autograd.grad((scale_N * logprobs_N).sum() + weight_VE[3].float().sum(), (hidden_NE, weight_VE))


@pytest.mark.parametrize("rows", [7, 64])
def test_gradients_of_chunks_are_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(head, "CAST_ROWS", rows)
    hidden_NE, weight_VE, targets_N, scale_N = loss_inputs(torch.float64)
    logprobs_NV = (hidden_NE @ weight_VE.T / 0.7).log_softmax(-1)
    loss = (scale_N * logprobs_NV[torch.arange(1024), targets_N]).sum() + weight_VE[3].sum()
    reference_NE, reference_VE = torch.autograd.grad(loss, (hidden_NE, weight_VE))
    summed_NE, summed_VE = chunked_gradients(SummingHead)
    added_NE, added_VE = chunked_gradients(lambda weight_VE: partial(fp32_logits, weight_VE=weight_VE))
    assert summed_VE.dtype == summed_NE.dtype == torch.bfloat16 and torch.equal(summed_NE, added_NE)
    torch.testing.assert_close(summed_NE.double(), reference_NE, atol=1e-4, rtol=8e-3)
    summed, added = ((x - reference_VE).norm() / reference_VE.norm() for x in (summed_VE.double(), added_VE.double()))
    assert summed < 2e-3 < 4e-3 < added, "rounding once, and 64 times"


def test_a_summing_head_repeats_and_scores() -> None:
    hidden_NE, weight_VE = example(torch.bfloat16)
    summing = SummingHead(weight_VE)
    assert torch.equal(summing(hidden_NE), fp32_logits(hidden_NE, weight_VE))
    loss = (summing(hidden_NE[:2]).square().sum() + summing(hidden_NE[2:]).square().sum()) / 2
    once, again = (torch.autograd.grad(loss, weight_VE, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, again) and once.abs().max() > 1
    frozen = SummingHead(weight_VE.detach())
    frozen(hidden_NE).sum().backward()
    assert frozen.gradient.sum_VE is None and hidden_NE.grad is not None


def test_a_summing_head_of_fp32_is_autograds() -> None:
    hidden_NE, weight_VE = example(torch.float32)
    summing = SummingHead(weight_VE)
    assert summing.weight_VE is weight_VE
    (gradient_VE,) = torch.autograd.grad(summing(hidden_NE).sum(), weight_VE)
    assert torch.equal(gradient_VE, torch.autograd.grad(fp32_logits(hidden_NE, weight_VE).sum(), weight_VE)[0])


def test_no_tokens_leave_a_gradient_of_zeros() -> None:
    _, weight_VE = example(torch.bfloat16)
    SummingHead(weight_VE)(torch.zeros(0, 24, dtype=torch.bfloat16)).sum().backward()
    assert weight_VE.grad is not None and not weight_VE.grad.any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [0, 130])
def test_on_cuda_the_sum_is_that_of_the_reference(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    gradient_NV, hidden_NE = (
        torch.randn(tokens, n, generator=generator, device="cuda").bfloat16() for n in (1000, 256)
    )
    total = WeightGradient()
    for chunk in (slice(0, 128), slice(128, None)):
        total.add(gradient_NV[chunk], hidden_NE[chunk])
    assert total.sum_VE is not None and total.sum_VE.dtype == torch.float32
    expected_VE = gradient_NV.double().T @ hidden_NE.double()
    torch.testing.assert_close(total.sum_VE.double(), expected_VE, atol=1e-3, rtol=1e-4)
    assert total.take(torch.bfloat16).dtype == torch.bfloat16 and total.sum_VE is None
