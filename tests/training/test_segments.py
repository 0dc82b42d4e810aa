"""What is read from the tables of segments, against whole rows; the kernels that make the tables on CUDA.

Axes: N tokens, V vocabulary, S segments, K top-k set.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparrow.training.logprob import score_tokens, token_logprobs
from sparrow.training.segments import SEGMENT, combine, target_logprobs, top_k_of_rows


def tables(logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel makes, by loops over segments."""
    columns: list[list[Tensor]] = [[], [], []]
    for x_Nv in (logits_NV / temperature).split(SEGMENT, 1):
        top_N1 = x_Nv.amax(-1, keepdim=True)
        below_Nv = x_Nv - torch.where(top_N1.isneginf(), 0.0, top_N1)
        weight_Nv = below_Nv.exp()
        moment_Nv = torch.where(weight_Nv == 0, 0.0, weight_Nv * below_Nv)
        for column, part in zip(columns, (top_N1[:, 0], weight_Nv.sum(-1), moment_Nv.sum(-1)), strict=True):
            column.append(part)
    maxima_NS, sums_NS, moments_NS = (torch.stack(column, 1) for column in columns)
    return maxima_NS, sums_NS, moments_NS


def random_logits(tokens: int, vocab: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(vocab))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize(("vocab", "k"), [(37, 5), (37, 40), (128, 1), (300, 20), (5000, 20)])
def test_rows_from_segments(vocab: int, k: int, temperature: float) -> None:
    logits_NV, targets_N = random_logits(6, vocab), torch.arange(6)
    expected_NV = (logits_NV.double() / temperature).log_softmax(-1)
    rows = combine(*tables(logits_NV, temperature))
    logprobs_N = target_logprobs(logits_NV, rows, targets_N, temperature)
    torch.testing.assert_close(logprobs_N.double(), expected_NV[torch.arange(6), targets_N], atol=5e-6, rtol=0)
    entropy_N = -(expected_NV.exp() * expected_NV).sum(-1)
    torch.testing.assert_close(rows.entropy_N.double(), entropy_N, atol=5e-6, rtol=0)
    ids_NK, values_NK = top_k_of_rows(logits_NV, rows, temperature, k)
    best = expected_NV.topk(min(k, vocab))
    assert torch.equal(ids_NK, best.indices)
    torch.testing.assert_close(values_NK.double(), best.values, atol=5e-6, rtol=0)


def test_impossible_tokens_and_impossible_segments() -> None:
    logits_NV = torch.full((2, 300), -math.inf)
    logits_NV[0, [3, 5]] = 0.0
    logits_NV[1, 130] = 7.0
    rows = combine(*tables(logits_NV, 1.0))
    assert rows.entropy_N.tolist() == pytest.approx([math.log(2), 0.0])
    assert target_logprobs(logits_NV, rows, torch.tensor([5, 0]), 1.0).tolist() == pytest.approx(
        [-math.log(2), -math.inf]
    )
    assert top_k_of_rows(logits_NV, rows, 1.0, 1)[0][1].tolist() == [130]


def test_what_is_not_a_number_stays_visible() -> None:
    logits_NV = random_logits(3, 300)
    logits_NV[1, 200] = math.nan
    rows = combine(*tables(logits_NV, 1.0))
    assert rows.normaliser_N.isnan().tolist() == rows.entropy_N.isnan().tolist() == [False, True, False]


def on_cuda(vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NE, weight_VE = (torch.randn(rows, 64, generator=generator) / 3 for rows in (70, vocab))
    targets_N = torch.randint(vocab, (70,), generator=generator)
    return hidden_NE.to(device, dtype), weight_VE.to(device, dtype), targets_N.to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [37, 300, 151_936])
def test_cuda_scores_equal_those_of_the_cpu(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    from sparrow.models.head import fp32_logits

    values, gradients = [], []
    for where in (device, torch.device("cpu")):
        hidden_NE, weight_VE, targets_N = on_cuda(vocab, dtype, where)
        hidden_NE.requires_grad_(), weight_VE.requires_grad_()

        def head(h: Tensor, v: slice | None = None, weight_VE: Tensor = weight_VE) -> Tensor:
            return fp32_logits(h, weight_VE if v is None else weight_VE[v])

        logprobs_N, entropy_N = token_logprobs(hidden_NE, head, targets_N, 0.7, chunk_size=32)
        sparse_NE = hidden_NE.detach().flip(0)
        scores = score_tokens(hidden_NE, head, targets_N, 0.7, 20, sparse_NE, chunk_size=32)
        assert torch.equal(logprobs_N, scores.logprobs_N) and torch.equal(entropy_N, scores.entropy_N)
        assert scores.alpha_exact_N is not None
        values.append([logprobs_N, entropy_N, scores.top_logprobs_NK, scores.alpha_exact_N])
        weights_N = torch.linspace(-1, 2, 70, device=where)
        gradients.append(torch.autograd.grad((weights_N * logprobs_N).sum(), (hidden_NE, weight_VE)))
    for ours, expected in zip(*values, strict=True):
        torch.testing.assert_close(ours.cpu(), expected, atol=2e-5, rtol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for ours, expected in zip(*gradients, strict=True):
        assert (ours.cpu().float() - expected.float()).norm() < tolerance * expected.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tables", [1, 2])
def test_cuda_memory_is_that_of_a_chunk(device: torch.device, tables: int) -> None:
    from sparrow.models.head import fp32_logits

    hidden_NE, weight_VE = (torch.randn(n, 64, device=device, dtype=torch.bfloat16) for n in (4096, 151_936))
    targets_N = torch.zeros(4096, dtype=torch.int64, device=device)
    sparse_NE = None if tables == 1 else hidden_NE.cpu()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    scores = score_tokens(hidden_NE, lambda h, v=None: fp32_logits(h, weight_VE), targets_N, 1.0, 20, sparse_NE, 256)
    assert torch.cuda.max_memory_allocated(device) - before < (tables + 0.5) * 256 * 151_936 * 4
    if scores.alpha_exact_N is not None:
        assert torch.equal(scores.alpha_exact_N, torch.ones(4096, device=device)), "exactly 1, not almost"
