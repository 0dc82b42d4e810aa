from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.components.acceptance import AcceptanceTail, TailTokens, alpha_top_k, tail_quantile, top_k_floor
from sparrow.errors import UserError
from sparrow.training.logprob import alpha_exact


def distributions(seed: int, vocab: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense_NV = scale * torch.randn(4, vocab, generator=generator)
    sparse_NV = dense_NV + 0.5 * torch.randn(4, vocab, generator=generator)
    return torch.log_softmax(sparse_NV, -1), torch.log_softmax(dense_NV, -1)


def estimate(sparse_NV: Tensor, dense_NV: Tensor, k_sparse: int, k_dense: int) -> Tensor:
    sparse, dense = sparse_NV.topk(k_sparse), dense_NV.topk(k_dense)
    return alpha_top_k(sparse.indices, sparse.values, dense.indices, dense.values)


def test_top_k_by_hand() -> None:
    # In both sets: 7 (.5 and .4) and 2 (.1 and .3); 9 and 4 are in one set each. alpha = .4 + .1
    sparse_ids, sparse_p = torch.tensor([[7, 9, 2]]), torch.tensor([[0.5, 0.2, 0.1]])
    dense_ids, dense_p = torch.tensor([[4, 7, 2]]), torch.tensor([[0.45, 0.4, 0.3]])
    assert alpha_top_k(sparse_ids, sparse_p.log(), dense_ids, dense_p.log()).item() == pytest.approx(0.5)
    assert top_k_floor(sparse_p.log()).item() == pytest.approx(0.8), "never renormalised"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 40), st.floats(0.1, 8), st.data())
def test_top_k_against_dictionaries(seed: int, vocab: int, scale: float, data: st.DataObject) -> None:
    sparse_NV, dense_NV = distributions(seed, vocab, scale)
    k_sparse, k_dense = data.draw(st.integers(1, vocab)), data.draw(st.integers(1, vocab))
    result_N = estimate(sparse_NV, dense_NV, k_sparse, k_dense)
    for n in range(4):
        sparse = {v: sparse_NV[n, v].exp().item() for v in sparse_NV[n].topk(k_sparse).indices.tolist()}
        dense = {v: dense_NV[n, v].exp().item() for v in dense_NV[n].topk(k_dense).indices.tolist()}
        expected = sum(min(p, dense[v]) for v, p in sparse.items() if v in dense)
        assert result_N[n].item() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 60), st.floats(0.1, 8), st.data())
def test_top_k_properties(seed: int, vocab: int, scale: float, data: st.DataObject) -> None:
    sparse_NV, dense_NV = distributions(seed, vocab, scale)
    k = data.draw(st.integers(1, vocab))
    exact_N, top_k_N = alpha_exact(sparse_NV, dense_NV), estimate(sparse_NV, dense_NV, k, k)
    assert bool(((top_k_N >= 0) & (top_k_N <= 1)).all())
    assert bool((top_k_N <= exact_N + 1e-6).all()), "a lower bound"
    torch.testing.assert_close(top_k_N, estimate(dense_NV, sparse_NV, k, k), rtol=0, atol=1e-6)
    torch.testing.assert_close(estimate(sparse_NV, dense_NV, vocab, vocab), exact_N, rtol=0, atol=2e-6)
    floor_N = top_k_floor(dense_NV.topk(k).values)
    torch.testing.assert_close(estimate(dense_NV, dense_NV, k, k), floor_N, rtol=0, atol=1e-6)
    assert bool((top_k_N <= floor_N + 1e-6).all())


def test_non_finite_rows_are_not_hidden() -> None:
    ids = torch.tensor([[1, 2]])
    nan, half = torch.full((1, 2), math.nan), torch.full((1, 2), math.log(0.5))
    assert alpha_top_k(ids, nan, ids, half).isnan().all() and alpha_top_k(ids, half, ids, nan).isnan().all()
    assert alpha_top_k(ids, torch.full((1, 2), -math.inf), ids, half).item() == 0.0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=60), st.floats(0, 1))
def test_quantile_is_numpys(values: list[float], quantile: float) -> None:
    expected = np.quantile(np.array(values), quantile)
    assert tail_quantile(torch.tensor(values, dtype=torch.float64), quantile) == pytest.approx(expected, abs=1e-12)


def test_quantile_of_nan_is_nan_and_large_inputs_pass() -> None:
    assert math.isnan(tail_quantile(torch.tensor([0.1, math.nan, 0.3]), 0.05))
    many_T = torch.arange(2**24 + 2, dtype=torch.float32).flip(0)
    assert tail_quantile(many_T, 0.5) == pytest.approx((2**24 + 1) / 2)


def tokens(alpha: Tensor, **others: Tensor) -> TailTokens:
    """Tokens at length 0, with a floor of 1 and equal log-probs unless given."""
    zeros_T = torch.zeros(len(alpha))
    given = {
        "floor_T": torch.ones(len(alpha)),
        "cached_length_T": zeros_T.long(),
        "sparse_logprobs_T": zeros_T,
        "dense_logprobs_T": zeros_T,
    }
    return TailTokens(alpha_T=alpha, **given | others)


def test_bins_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    alpha_T, length_T = torch.rand(500, generator=generator), torch.randint(0, 90, (500,), generator=generator)
    sparse_T, dense_T = (-torch.rand(500, generator=generator) for _ in range(2))
    length_T[(length_T >= 40) & (length_T < 50)] = 7  # the bin 40 is empty
    given = tokens(alpha_T, cached_length_T=length_T, sparse_logprobs_T=sparse_T, dense_logprobs_T=dense_T)
    summary = AcceptanceTail(bin_width=10).summary(given)
    starts = [0, 10, 20, 30, 50, 60, 70, 80]
    assert [int(key.rpartition("/")[2]) for key in summary if key.startswith("acceptance/p5_bin/")] == starts
    for start in starts:
        inside_T = (length_T >= start) & (length_T < start + 10)
        alphas = alpha_T[inside_T].double().numpy()
        ratio = (dense_T - sparse_T)[inside_T].double().numpy()
        expected = {
            "p1": np.quantile(alphas, 0.01),
            "p5": np.quantile(alphas, 0.05),
            "p10": np.quantile(alphas, 0.1),
            "p50": np.quantile(alphas, 0.5),
            "mean": alphas.mean(),
            "frac_below_half": (alphas < 0.5).mean(),
            "kl_k1": -ratio.mean(),
            "kl_k3": (np.exp(ratio) - ratio - 1).mean(),
            "tokens": len(alphas),
        }
        for name, value in expected.items():
            assert summary[f"acceptance/{name}_bin/{start}"] == pytest.approx(value, abs=1e-6), name


def test_bins_of_the_response_by_brute_force() -> None:
    generator = torch.Generator().manual_seed(0)
    alpha_T, position_T = torch.rand(300, generator=generator), torch.randint(0, 35, (300,), generator=generator)
    alpha_T[7] = torch.nan
    summary = AcceptanceTail(bin_width=10).summary(tokens(alpha_T, response_position_T=position_T))
    found = {key: value for key, value in summary.items() if key.startswith("acceptance/p5_response_bin/")}
    bins = {start: alpha_T[(position_T // 10 * 10 == start) & alpha_T.isfinite()] for start in (0, 10, 20, 30)}
    assert found == {
        f"acceptance/p5_response_bin/{start}": pytest.approx(np.quantile(inside.double().numpy(), 0.05), abs=1e-6)
        for start, inside in bins.items()
    }


def test_summary_by_hand() -> None:
    # 21 values 0, .05, ..., 1: quantile q stands at q * 20, so p5 = .05, p10 = .1, p1 = .2 * .05 = .01, p50 = .5.
    alpha_T = torch.arange(21).double() / 20
    length_T = torch.where(torch.arange(21) < 11, 100, 5000)
    # The log-ratio is ln 2 for 3 tokens, else 0: k3 = 2 - 1 - ln 2 = .30685 for these; P95 stands at rank 19.
    sparse_T = torch.where(torch.arange(21) < 3, -math.log(2), 0.0).double()
    given = tokens(
        alpha_T, floor_T=torch.full((21,), 0.96), cached_length_T=length_T, sparse_logprobs_T=sparse_T,
        top_k_T=alpha_T / 2,
    )  # fmt: skip
    summary = AcceptanceTail().summary(given)
    pooled = {name: value for name, value in summary.items() if "_bin/" not in name and "/histogram/" not in name}
    k3 = 1 - math.log(2)
    assert pooled == pytest.approx(
        {
            "acceptance/p5": 0.05,
            "acceptance/p1": 0.01,
            "acceptance/p10": 0.1,
            "acceptance/p50": 0.5,
            "acceptance/mean": 0.5,
            "acceptance/frac_below_half": 10 / 21,
            "acceptance/kl_k1": -3 * math.log(2) / 21,
            "acceptance/kl_k3": 3 * k3 / 21,
            "acceptance/kl_k3_p95": k3,
            "acceptance/below_tau": 1.0,
            "acceptance/floor_p5": 0.96,
            "acceptance/floor_mean": 0.96,
            "acceptance/top_k_p5": 0.025,
            "acceptance/nonfinite": 0.0,
        }
    )
    assert summary["acceptance/p5_bin/0"] == pytest.approx(0.025)  # 0 .. .5, at .05 * 10 = .5 steps
    assert summary["acceptance/tokens_bin/0"] == 11.0
    assert summary["acceptance/p5_bin/4000"] == pytest.approx(0.5725)  # .55 .. 1, at .05 * 9 = .45 steps
    assert summary["acceptance/tokens_bin/4000"] == 10.0


def test_the_histogram_has_twenty_cells_and_one_stands_in_the_last() -> None:
    summary = AcceptanceTail().summary(tokens(torch.tensor([0.01, 0.07, 0.93, 0.99, 1.0, math.nan])))
    cells = [summary[f"acceptance/histogram/{cell}"] for cell in range(20)]
    assert cells == [1.0, 1.0, *[0.0] * 16, 1.0, 2.0]


def test_summary_leaves_out_and_counts_non_finite_tokens() -> None:
    tail = AcceptanceTail()
    dense_T = torch.tensor([0.0, 0.0, 0.0, math.nan])
    summary = tail.summary(tokens(torch.tensor([0.9, math.nan, 0.95, 0.1]), dense_logprobs_T=dense_T))
    clean = tail.summary(tokens(torch.tensor([0.9, 0.95])))
    assert summary.pop("acceptance/nonfinite") == 2.0
    assert summary == {name: clean[name] for name in summary} and len(summary) == len(clean) - 1
    assert tail.summary(tokens(torch.full((3,), math.nan))) == {"acceptance/nonfinite": 3.0}
    assert tail.summary(tokens(torch.zeros(0))) == {"acceptance/nonfinite": 0.0}


def test_an_impossible_token_does_not_make_the_divergence_infinite() -> None:
    given = tokens(torch.tensor([0.9, 0.9]), dense_logprobs_T=torch.tensor([-math.inf, 0.0]))
    summary = AcceptanceTail().summary(given)
    assert summary["acceptance/kl_k1"] == pytest.approx(10) and summary["acceptance/nonfinite"] == 0


def test_the_top_k_estimate_as_headline_has_nothing_beside_it() -> None:
    tail, alpha_T = AcceptanceTail("top_k"), torch.tensor([0.8, 0.9])
    headline_T, beside_T = tail.headline(None, alpha_T)
    assert beside_T is None
    summary = tail.summary(tokens(headline_T))
    assert {"acceptance/p5", "acceptance/p5_bin/0", "acceptance/floor_p5"} <= set(summary)
    assert not {"acceptance/top_k_p5", "acceptance/exact_p5"} & set(summary)


@pytest.mark.parametrize(("estimator", "tau", "name"), [("exact", 0.91, "exact"), ("top_k", 0.86, "top_20")])
def test_default_threshold_depends_on_the_estimator(estimator: str, tau: float, name: str) -> None:
    tail = AcceptanceTail(estimator)
    assert tail.estimator_name == name
    for value, below in ((tau - 0.001, 1.0), (tau + 0.001, 0.0)):
        alpha_T = torch.full((3,), value)
        assert tail.summary(tokens(alpha_T))["acceptance/below_tau"] == below
    strict = AcceptanceTail(estimator, tau=0.99).summary(tokens(alpha_T))
    assert strict["acceptance/below_tau"] == 1.0


def test_headline() -> None:
    exact_T, top_k_T = torch.tensor([0.9]), torch.tensor([0.8])
    assert AcceptanceTail("exact").needs_hidden and not AcceptanceTail("top_k").needs_hidden
    assert AcceptanceTail("exact").headline(exact_T, top_k_T) == (exact_T, top_k_T)
    assert AcceptanceTail("top_k").headline(None, top_k_T) == (top_k_T, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "p5"}, "acceptance.estimator: 'p5'"),
        ({"top_k": 0}, "top_k 0"),
        ({"bin_width": 0}, "bin_width 0"),
        ({"tau": 86.0}, "acceptance.tau: 86.0 must be above 0 and at most 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AcceptanceTail(**arguments)
