from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.components.distill_loss import FullKL, SampledK3, Teacher, TopKKL, distill_terms, k3
from sparrow.errors import UserError

N, E, V, T = 7, 5, 13, 0.7


def head_of(weight_VE: torch.Tensor):
    return lambda hidden_NE: hidden_NE @ weight_VE.T


def case(seed: int, scale: float = 1.0):
    """Hidden states of both policies, the head, sampled tokens; all of double precision."""
    generator = torch.Generator().manual_seed(seed)
    dense, sparse = (torch.randn(N, E, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    weight = torch.randn(V, E, generator=generator, dtype=torch.float64)
    return dense, sparse, weight, torch.randint(V, (N,), generator=generator)


def teacher_of(dense: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, top_k: int = V) -> Teacher:
    logprobs = torch.log_softmax(dense @ weight.T / T, -1)
    top = logprobs.topk(top_k)
    return Teacher(logprobs.gather(1, targets[:, None]).squeeze(1), top.indices, top.values, dense)


def terms(loss, sparse, weight, targets, teacher, chunk=3):
    return distill_terms(loss, sparse, head_of(weight), targets, teacher, T, chunk)


def buckets(loss, dense, sparse, weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of both policies over the loss's buckets, made by plain sums."""
    p, q = torch.softmax(dense @ weight.detach().T / T, -1), torch.softmax(sparse @ weight.T / T, -1)
    if not isinstance(loss, TopKKL) or loss.top_k >= V:
        return p, q
    ids = p.topk(loss.top_k).indices
    p_K, q_K = p.gather(1, ids), q.gather(1, ids)
    return torch.cat((p_K, 1 - p_K.sum(1, True)), 1), torch.cat((q_K, 1 - q_K.sum(1, True)), 1)


def brute_force(loss, dense, sparse, weight, targets) -> torch.Tensor:
    if isinstance(loss, SampledK3):
        p, q = (torch.log_softmax(x @ weight.T / T, -1).gather(1, targets[:, None])[:, 0] for x in (dense, sparse))
        p = p.detach()
        return ((p - q).exp() - (p - q) - 1).clamp(max=20)
    p, q = buckets(loss, dense, sparse, weight)
    first, second = (p, q) if loss.direction == "forward" else (q, p)
    return (first * (first / second).log()).sum(1)


LOSSES = [SampledK3(), *(TopKKL(4, way) for way in ("forward", "reverse")), FullKL("forward"), FullKL("reverse")]
NAMES = ["k3", "top-4 forward", "top-4 reverse", "full forward", "full reverse"]


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_values_and_gradients_are_those_of_the_dense_reference(loss, chunk):
    """Against autograd through whole [N, V] tables, in double precision, for the hidden states and for the head."""
    dense, sparse, weight, targets = case(0)
    weights_N = torch.linspace(0.5, 2, N, dtype=torch.float64)
    results = []
    for compute in (
        lambda s, w: terms(loss, s, w, targets, teacher_of(dense, weight, targets), chunk)[1],
        lambda s, w: brute_force(loss, dense, s, w, targets),
    ):
        leaves = [sparse.clone().requires_grad_(), weight.clone().requires_grad_()]
        value_N = compute(leaves[0], leaves[1])
        results.append((value_N.detach(), *torch.autograd.grad((weights_N * value_N).sum(), leaves)))
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("loss", LOSSES, ids=NAMES)
def test_gradcheck_and_the_log_probs_beside(loss):
    dense, sparse, weight, targets = case(1)
    teacher = teacher_of(dense, weight, targets)
    assert torch.autograd.gradcheck(lambda s: terms(loss, s, weight, targets, teacher), sparse.requires_grad_())
    expected = torch.log_softmax(sparse @ weight.T / T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(terms(loss, sparse, weight, targets, teacher)[0], expected)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), top_k=st.integers(1, V), scale=st.floats(0.01, 20), way=st.sampled_from(["f", "r"]))
def test_divergences_are_positive_bounded_by_the_exact_one_and_equal_to_it_over_all_tokens(seed, top_k, scale, way):
    direction = {"f": "forward", "r": "reverse"}[way]
    dense, sparse, weight, targets = case(seed, scale)
    teacher = teacher_of(dense, weight, targets)
    part, whole, full = (
        terms(loss, sparse, weight, targets, teacher)[1]
        for loss in (TopKKL(top_k, direction), TopKKL(V, direction), FullKL(direction))
    )
    slack = 1e-9 * (1 + full)
    assert (part >= -slack).all() and (full >= -slack).all()
    assert (part <= full + slack).all(), "joining tokens in a bucket loses information"
    torch.testing.assert_close(whole, full, atol=1e-9, rtol=1e-9)


@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 5))
@settings(deadline=None, max_examples=30)
def test_equal_policies_have_none(seed, scale):
    dense, _, weight, targets = case(seed, scale)
    for loss in LOSSES:
        value_N = terms(loss, dense, weight, targets, teacher_of(dense, weight, targets))[1]
        torch.testing.assert_close(value_N, torch.zeros_like(value_N), atol=1e-10, rtol=0)


def test_a_recorded_set_may_be_the_larger_one():
    dense, sparse, weight, targets = case(2)
    small, large = (terms(TopKKL(3), sparse, weight, targets, teacher_of(dense, weight, targets, k))[1] for k in (3, 9))
    assert torch.equal(small, large)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_tail_below_the_resolution_of_fp32_is_finite_with_its_gradient(direction):
    """The teacher's top token has probability 1 in fp32; the student's tail is 1e-26, which 1 - sum would call 0."""
    hidden = torch.tensor([[60.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [0.0]])
    top = torch.log_softmax(torch.tensor([[80.0], [60.0]]) @ weight.T, -1).topk(1)
    teacher = Teacher(torch.zeros(2), top.indices, top.values)
    zeros = torch.zeros(2, dtype=torch.int64)
    value_N = distill_terms(TopKKL(1, direction), hidden, head_of(weight), zeros, teacher, 1.0, 8)[1]
    value_N.sum().backward()
    assert value_N.isfinite().all() and hidden.grad.isfinite().all()
    assert abs(value_N[0]) < 1e-4 and value_N[1] > 0.1
    assert hidden.grad[1] < 0, "the student has to become surer"


def test_the_gradient_of_k3_on_samples_is_that_of_the_forward_kl():
    """Below its bound of 20: E_q[grad k3] = -E_p[grad log q]; the mean over draws is written as a sum over tokens."""
    dense, sparse, weight, _ = case(3, 0.1)
    everything = torch.arange(V).repeat(N)
    rows = torch.arange(N).repeat_interleave(V)
    leaf = sparse.clone().requires_grad_()
    teacher = teacher_of(dense[rows], weight, everything)
    k3_T = terms(SampledK3(), leaf[rows], weight, everything, teacher)[1]
    q = torch.softmax(sparse @ weight.T / T, -1).flatten()
    (q * k3_T).sum().backward()
    other, zeros = sparse.clone().requires_grad_(), torch.zeros(N, dtype=torch.int64)
    terms(FullKL("forward"), other, weight, zeros, teacher_of(dense, weight, zeros))[1].sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_no_token_has_a_graph_all_the_same():
    """A rank without sequences takes part in the backward."""
    hidden = torch.zeros(0, E, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    for loss in LOSSES:
        teacher = Teacher(torch.zeros(0), torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0, E))
        value = distill_terms(loss, hidden, head_of(torch.ones(V, E)), nothing, teacher, 1.0, 8)[1].sum()
        value.backward()
        assert hidden.grad is not None and float(value.detach()) == 0.0


def test_the_logits_of_one_chunk_are_held():
    """Forward and backward hold tables of 8 rows, never of 64: the head is called with no more, and again backwards."""
    calls = []
    weight = torch.randn(V, E, generator=torch.Generator().manual_seed(0))

    def head(hidden_NE: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden_NE))
        return hidden_NE @ weight.T

    hidden = torch.randn(64, E, generator=torch.Generator().manual_seed(1)).requires_grad_()
    teacher = Teacher(hidden_NE=hidden.detach() + 0.1)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        value = distill_terms(FullKL(), hidden, head, torch.zeros(64, dtype=torch.int64), teacher, 1.0, 8)[1].sum()
    assert max(calls) == 8 and len(calls) == 16
    assert max(saved, default=0) <= 64 * E, "no table of tokens by vocabulary waits for the backward"
    value.backward()
    assert max(calls) == 8 and len(calls) == 32


def test_k3_by_hand():
    dense, sparse = torch.tensor([-1.0, -1.0, -40.0]), torch.tensor([-1.0, -1.5, -1.0])
    # d = 0: 0. d = .5: e^.5 - 1.5. d = -39, clamped to -20: e^-20 + 19.
    expected = torch.tensor([0.0, math.exp(0.5) - 1.5, math.exp(-20) + 19])
    torch.testing.assert_close(k3(sparse, dense), expected)
    assert k3(torch.tensor([-50.0]), torch.tensor([0.0])) == 20.0


def test_bad_arguments_are_named():
    with pytest.raises(UserError, match="top_k: 0"):
        TopKKL(0)
    for kind in (TopKKL, FullKL):
        with pytest.raises(UserError, match="direction: 'both'"):
            kind(direction="both")
