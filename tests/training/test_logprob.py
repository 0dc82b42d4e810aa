from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sparrow.errors import UserError
from sparrow.training.logprob import SlicedHead, alpha_exact, alpha_of_hidden, score_tokens, token_logprobs

TOKENS, HIDDEN, VOCAB = 11, 6, 17


def example(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden_NE = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype)
    weight_VE = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype)
    targets_N = torch.randint(VOCAB, (TOKENS,), generator=generator)
    return hidden_NE, weight_VE, targets_N


def sliced(weight_VE: Tensor) -> SlicedHead:
    def head(hidden_NE: Tensor, vocab: slice | None = None) -> Tensor:
        return hidden_NE @ weight_VE[vocab or slice(None)].T

    return head


def reference_logprobs(hidden_NE: Tensor, weight_VE: Tensor, temperature: float) -> list[list[float]]:
    """Log-softmax at the temperature, by loops in float64."""
    rows = []
    for hidden in hidden_NE.double().tolist():
        logits = [sum(h * w for h, w in zip(hidden, row, strict=True)) for row in weight_VE.double().tolist()]
        scaled = [math.exp(logit / temperature) for logit in logits]
        rows.append([math.log(value / sum(scaled)) for value in scaled])
    return rows


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_values_match_a_float64_reference(temperature: float, chunk_size: int) -> None:
    hidden_NE, weight_VE, targets_N = example()
    expected = reference_logprobs(hidden_NE, weight_VE, temperature)
    scores = score_tokens(hidden_NE, lambda h: h @ weight_VE.T, targets_N, temperature, 5, chunk_size=chunk_size)
    for n, row in enumerate(expected):
        assert scores.logprobs_N[n].item() == pytest.approx(row[int(targets_N[n])], abs=2e-5)
        assert scores.entropy_N[n].item() == pytest.approx(-sum(math.exp(v) * v for v in row), abs=2e-5)
        best = sorted(range(VOCAB), key=lambda v: -row[v])[:5]
        assert scores.top_ids_NK[n].tolist() == best
        assert scores.top_logprobs_NK[n].tolist() == pytest.approx([row[v] for v in best], abs=2e-5)
    assert scores.alpha_exact_N is None


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 1024])
def test_training_and_scoring_are_bit_identical(temperature: float, chunk_size: int) -> None:
    hidden_NE, weight_VE, targets_N = example()
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.data.copy_(weight_VE)
    logprobs_N, entropy_N = token_logprobs(hidden_NE, head, targets_N, temperature, chunk_size)
    scores = score_tokens(hidden_NE, head, targets_N, temperature, 3, chunk_size=chunk_size)
    assert logprobs_N.requires_grad and not entropy_N.requires_grad and not scores.logprobs_N.requires_grad
    assert torch.equal(logprobs_N, scores.logprobs_N)
    assert torch.equal(entropy_N, scores.entropy_N)
    assert torch.equal((logprobs_N - scores.logprobs_N).exp(), torch.ones(TOKENS))


def test_gradient_equals_that_of_unchunked_logits() -> None:
    hidden_NE, weight_VE, targets_N = example(dtype=torch.float64)
    weights_N = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    gradients = []
    for chunk_size in (4, None):
        hidden, weight = hidden_NE.clone().requires_grad_(), weight_VE.clone().requires_grad_()
        if chunk_size is None:
            logprobs_N = torch.log_softmax(hidden @ weight.T / 0.7, -1)[torch.arange(TOKENS), targets_N]
        else:
            logprobs_N, _ = token_logprobs(
                hidden, partial(functional.linear, weight=weight), targets_N, 0.7, chunk_size
            )
        gradients.append(torch.autograd.grad((weights_N * logprobs_N).sum(), (hidden, weight)))
    for chunked, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


def test_logits_are_neither_whole_nor_kept_for_the_backward() -> None:
    hidden_NE, weight_VE, targets_N = example()
    weight_VE.requires_grad_()
    rows: list[int] = []
    saved: list[int] = []

    def head(hidden: Tensor) -> Tensor:
        rows.append(hidden.shape[0])
        return hidden @ weight_VE.T

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_N, _ = token_logprobs(hidden_NE, head, targets_N, 1.0, chunk_size=4)
    assert rows == [4, 4, 3]
    assert max(saved, default=0) < 4 * VOCAB
    logprobs_N.sum().backward()
    assert sorted(rows) == [3, 3, 4, 4, 4, 4], "each chunk is recomputed once"


def test_no_tokens_still_give_a_graph() -> None:
    _, weight_VE, _ = example()
    weight_VE.requires_grad_()
    empty_NE, none_N = torch.zeros(0, HIDDEN), torch.zeros(0, dtype=torch.int64)
    logprobs_N, _ = token_logprobs(empty_NE, lambda h: h @ weight_VE.T, none_N, 1.0)
    logprobs_N.sum().backward()
    assert logprobs_N.shape == (0,)
    assert weight_VE.grad is not None and not weight_VE.grad.any()
    assert score_tokens(empty_NE, lambda h: h @ weight_VE.T, none_N, 1.0, 3).top_ids_NK.shape == (0, 3)


def test_exact_alpha_from_the_rollouts_hidden_states() -> None:
    hidden_NE, weight_VE, targets_N = example()
    sparse_NE = hidden_NE + 0.3 * example(seed=1)[0]
    dense, sparse = (reference_logprobs(h, weight_VE, 0.8) for h in (hidden_NE, sparse_NE))
    scores = score_tokens(hidden_NE, sliced(weight_VE), targets_N, 0.8, 3, sparse_NE.double(), 4, vocab_chunk=5)
    assert scores.alpha_exact_N is not None
    expected = [
        sum(math.exp(min(pair)) for pair in zip(*rows, strict=True)) for rows in zip(dense, sparse, strict=True)
    ]
    assert scores.alpha_exact_N.tolist() == pytest.approx(expected, abs=2e-6)
    assert min(expected) < 0.95, "the case must not be trivial"
    index_N = torch.randperm(3 * TOKENS, generator=torch.Generator().manual_seed(0))[:TOKENS]
    whole_TE = torch.full((3 * TOKENS, HIDDEN), math.nan).index_copy(0, index_N, sparse_NE)
    gathered = score_tokens(
        hidden_NE, sliced(weight_VE), targets_N, 0.8, 3, whole_TE.double(), 4, vocab_chunk=5, sparse_index_N=index_N
    )
    assert gathered.alpha_exact_N is not None and torch.equal(gathered.alpha_exact_N, scores.alpha_exact_N)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 60), st.integers(1, 70), st.floats(0.01, 20), st.floats(0, 3))
def test_alpha_by_slices_of_the_vocabulary(seed: int, vocab: int, chunk: int, scale: float, distance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight_VE = torch.randn(vocab, HIDDEN, generator=generator)
    dense_NE = scale * torch.randn(5, HIDDEN, generator=generator)
    sparse_NE = dense_NE + distance * torch.randn(5, HIDDEN, generator=generator)
    dense_NV, sparse_NV = (torch.log_softmax(h @ weight_VE.T / 0.7, -1) for h in (dense_NE, sparse_NE))
    alpha_N = alpha_of_hidden(sparse_NE, dense_NV, sliced(weight_VE), 0.7, chunk)
    torch.testing.assert_close(alpha_N, alpha_exact(sparse_NV, dense_NV), rtol=0, atol=5e-5 if scale > 2 else 5e-6)


class LargestResult(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.entries = max(self.entries, result.numel())
        return result


def test_alpha_never_holds_the_sparse_vocabulary() -> None:
    generator = torch.Generator().manual_seed(0)
    weight_VE, hidden_NE = torch.randn(1000, 3, generator=generator), torch.randn(50, 3, generator=generator)
    dense_NV = torch.log_softmax(hidden_NE @ weight_VE.T, -1)
    parts: list[Tensor] = []

    def head(hidden: Tensor, vocab: slice | None = None) -> Tensor:
        assert vocab is not None
        parts.append(hidden @ torch.stack([weight_VE[v] for v in range(1000)[vocab]]).T)
        return parts[-1]

    with LargestResult() as largest:
        alpha_N = alpha_of_hidden(hidden_NE, dense_NV, head, 1.0, 64)
    assert alpha_N.min() > 0.9999
    assert len(parts) == 2 * 16, "normalisers first, then the differences"
    assert largest.entries == 50 * 64


def test_sparse_states_that_are_not_finite_are_not_hidden() -> None:
    hidden_NE, weight_VE, targets_N = example()
    sparse_NE = hidden_NE.clone()
    sparse_NE[2], sparse_NE[5] = math.nan, math.inf
    alpha_N = score_tokens(hidden_NE, sliced(weight_VE), targets_N, 1.0, 3, sparse_NE, vocab_chunk=4).alpha_exact_N
    assert alpha_N is not None and alpha_N.isnan().nonzero().flatten().tolist() == [2, 5]


def test_impossible_tokens_do_not_make_the_entropy_nan() -> None:
    logits_NV = torch.tensor([[0.0, 0.0, -math.inf], [-math.inf, 5.0, -math.inf]])
    scores = score_tokens(torch.eye(2), lambda h: h @ logits_NV.nan_to_num(neginf=-1e38), torch.tensor([2, 1]), 1.0, 9)
    infinite = score_tokens(torch.zeros(2, 1), lambda h: logits_NV, torch.tensor([2, 1]), 1.0, 9)
    assert scores.entropy_N.tolist() == pytest.approx([math.log(2), 0.0])
    assert infinite.entropy_N.tolist() == pytest.approx([math.log(2), 0.0])
    assert infinite.logprobs_N.tolist() == [-math.inf, 0.0]
    assert infinite.top_ids_NK.shape == (2, 3), "k is cut to the vocabulary"


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_temperature_must_be_positive(temperature: float) -> None:
    hidden_NE, weight_VE, targets_N = example()
    with pytest.raises(UserError, match="temperature"):
        token_logprobs(hidden_NE, lambda h: h @ weight_VE.T, targets_N, temperature)
    with pytest.raises(UserError, match="temperature"):
        score_tokens(hidden_NE, lambda h: h @ weight_VE.T, targets_N, temperature, 3)


def test_half_precision_logits_are_an_error() -> None:
    hidden_NE, weight_VE, targets_N = example()
    with pytest.raises(AssertionError, match="bfloat16"):
        token_logprobs(hidden_NE, lambda h: (h @ weight_VE.T).bfloat16(), targets_N, 1.0)


def test_alpha_by_hand() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1, 0.0]]).log()
    q = torch.tensor([[0.5, 0.1, 0.1, 0.3]]).log()
    # min: .5 + .1 + .1 + 0 = .7
    assert alpha_exact(p, q).item() == pytest.approx(0.7)
    disjoint = torch.tensor([[0.0, 0.0, 0.0, 1.0]]).log()
    assert alpha_exact(p, disjoint).item() == pytest.approx(0.0, abs=1e-7)
    assert alpha_exact(torch.full_like(p, math.nan), q).isnan().all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(0.01, 30))
def test_alpha_properties(seed: int, vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.log_softmax(scale * torch.randn(3, vocab, generator=generator), -1) for _ in range(2))
    alpha_N = alpha_exact(p, q)
    assert bool(((alpha_N >= 0) & (alpha_N <= 1)).all())
    assert torch.equal(alpha_N, alpha_exact(q, p))
    assert torch.equal(alpha_exact(p, p), torch.ones(3)), "exactly 1, not almost"
    overlap_N = torch.minimum(p.double().exp(), q.double().exp()).sum(-1)
    torch.testing.assert_close(alpha_N.double(), overlap_N, rtol=0, atol=1e-5)
