from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparrow.components.loss import CISPO, GSPO, ClippedSurrogate, Loss, LossInputs, dapo, dr_grpo, grpo, kl_penalty
from sparrow.errors import UserError

LOSSES: list[Loss] = [ClippedSurrogate(), grpo(), dr_grpo(), dapo(), GSPO(), GSPO(0.2, 0.3), CISPO(), CISPO(1.1)]
LENGTHS = [3, 1, 4]


def example(seed: int, spread: float = 0.5) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    lengths_S = torch.tensor(LENGTHS)
    sequence_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths_S)

    def normal(size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    old_T = -normal(8).abs() - 0.1
    return LossInputs(
        logprobs_T=(old_T + spread * normal(8)).requires_grad_(),
        old_logprobs_T=old_T,
        advantages_T=normal(3)[sequence_T],
        correction_T=normal(8).abs() + 0.1,
        sequence_T=sequence_T,
        lengths_S=lengths_S,
    )


def single(logprob: float, old: float, advantage: float, correction: float = 1.0) -> LossInputs:
    def scalar(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    logprobs_T = scalar(logprob).requires_grad_()
    index = torch.zeros(1, dtype=torch.int64)
    return LossInputs(logprobs_T, scalar(old), scalar(advantage), scalar(correction), index, torch.tensor([1]))


def reference(loss: Loss, inputs: LossInputs, logprobs: list[float]) -> list[float]:
    """The papers' formulas, token by token in Python floats."""
    old, sequences = inputs.old_logprobs_T.tolist(), inputs.sequence_T.tolist()
    anchor = inputs.logprobs_T.tolist()
    result = []
    for t, sequence in enumerate(sequences):
        advantage, correction = float(inputs.advantages_T[t]), float(inputs.correction_T[t])
        members = [i for i, other in enumerate(sequences) if other == sequence]
        if isinstance(loss, GSPO):
            ratio = math.exp(sum(logprobs[i] - old[i] for i in members) / len(members))
        elif isinstance(loss, CISPO):
            # Constant in the policy: from the point of expansion, not from the argument.
            ratio = math.exp(anchor[t] - old[t])
        else:
            ratio = math.exp(logprobs[t] - old[t])
        if isinstance(loss, CISPO):
            result.append(-correction * min(ratio, loss.max_ratio) * advantage * logprobs[t])
            continue
        assert isinstance(loss, GSPO | ClippedSurrogate)
        clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        objective = min(ratio * advantage, clipped * advantage)
        if isinstance(loss, ClippedSurrogate) and loss.dual_clip is not None and advantage < 0:
            objective = max(objective, loss.dual_clip * advantage)
        result.append(-correction * objective)
    return result


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [1e-4, 0.5, 3.0])
def test_value_and_gradient_match_the_formula(loss: Loss, seed: int, spread: float) -> None:
    inputs = example(seed, spread)
    output = loss(inputs)
    logprobs = inputs.logprobs_T.tolist()
    assert output.loss_T.tolist() == pytest.approx(reference(loss, inputs, logprobs), rel=1e-12)
    (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), inputs.logprobs_T)
    step = 1e-6
    for t in range(len(logprobs)):
        values = []
        for sign in (1, -1):
            moved = logprobs.copy()
            moved[t] += sign * step
            values.append(sum(reference(loss, inputs, moved)))
        assert gradient_T[t].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_gradient_is_the_policy_gradient(loss: Loss) -> None:
    inputs = example(0, spread=0.0)
    if isinstance(loss, GSPO):
        # The sequence's ratio carries the correction's mean, so equal weights within it make the two comparable.
        inputs.correction_T = torch.ones_like(inputs.correction_T)
    loss_T = loss(inputs).loss_T
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), inputs.logprobs_T)
    weight_T = inputs.correction_T * inputs.advantages_T
    torch.testing.assert_close(gradient_T, -weight_T)
    value_T = -weight_T * inputs.logprobs_T.detach() if isinstance(loss, CISPO) else -weight_T
    torch.testing.assert_close(loss_T.detach(), value_T)


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        (1.5, 2.0, -2.56, 0.0, "high"),  # min(1.5, 1.28) * 2
        (1.5, -2.0, 3.0, 3.0, None),  # moving away from a bad token is never clipped: -1.5 * -2
        (0.5, 2.0, -1.0, -1.0, None),  # back to a good token: -0.5 * 2, slope -r A
        (0.5, -2.0, 1.6, 0.0, "low"),  # max(0.5, 0.8) * 2
        (5.0, -2.0, 6.0, 0.0, "dual"),  # 5 * 2 = 10, cut to 3 * 2
        (1.1, 2.0, -2.2, -2.2, None),
    ],
)
def test_clipping_by_hand(ratio: float, advantage: float, value: float, slope: float, clipped: str | None) -> None:
    inputs = single(-1 + math.log(ratio), -1, advantage)
    output = ClippedSurrogate(0.2, 0.28, 3.0)(inputs)
    output.loss_T.sum().backward()
    assert output.loss_T.item() == pytest.approx(value)
    assert inputs.logprobs_T.grad is not None and inputs.logprobs_T.grad.item() == pytest.approx(slope)
    counts = {name: output.metrics[f"clip_ratio/{name}"].item() for name in ("low", "high", "dual")}
    assert counts == {name: float(name == clipped) for name in counts}
    assert output.metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_gspo_by_hand() -> None:
    # Log-ratios log 2 and 0: s = sqrt 2, above 1.3, so A = 1 is cut to 1.3 and A = -1 is not.
    # The sum over the two tokens is -2 s A, its gradient -2 A s / 2 = -A s for each logprob.
    for advantage, value, slope in ((1.0, -1.3, 0.0), (-1.0, math.sqrt(2), math.sqrt(2))):
        logprobs_T = torch.tensor([math.log(2), 0.0], dtype=torch.float64, requires_grad=True)
        zeros_T, ones_T = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        index_T = torch.zeros(2, dtype=torch.int64)
        output = GSPO(0.2, 0.3)(LossInputs(logprobs_T, zeros_T, advantage * ones_T, ones_T, index_T, torch.tensor([2])))
        assert output.loss_T.tolist() == pytest.approx([value, value])
        (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), logprobs_T)
        assert gradient_T.tolist() == pytest.approx([slope, slope])
        assert output.metrics["clip_ratio/high"].item() == (2.0 if advantage > 0 else 0.0), "counted in tokens"


def test_gspo_counts_removed_tokens_in_the_length() -> None:
    # Log-ratios log 2, 0 and a removed token: s = exp(log 2 / 3), inside the bounds.
    logprobs_T = torch.tensor([math.log(2), 0.0, math.nan], dtype=torch.float64)
    zeros_T, ones_T = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    correction_T, index_T = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    output = GSPO(0.3, 0.3)(LossInputs(logprobs_T, zeros_T, ones_T, correction_T, index_T, torch.tensor([3])))
    assert output.loss_T.tolist() == pytest.approx([-(2 ** (1 / 3)), -(2 ** (1 / 3)), 0.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    inputs = single(-1 + math.log(9), -1, 2.0)
    output = CISPO(max_ratio=5.0)(inputs)
    # -5 * 2 * logprob
    assert output.loss_T.item() == pytest.approx(-10 * (-1 + math.log(9)))
    (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), inputs.logprobs_T)
    assert gradient_T.item() == pytest.approx(-10.0)
    assert output.metrics["clip_ratio/high"].item() == 1.0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs_T", "old_logprobs_T", "advantages_T"])
def test_removed_tokens_contribute_exactly_nothing(loss: Loss, bad: float, field: str) -> None:
    """Complaint 5: a removed token may hold anything, and the rest is as if it held nothing."""
    inputs = example(0)
    inputs.correction_T[1] = 0.0
    clean = loss(inputs)
    (clean_gradient_T,) = torch.autograd.grad(clean.loss_T.sum(), inputs.logprobs_T)
    value_T = getattr(inputs, field).detach().clone()
    value_T[1] = bad
    dirty = replace(inputs, **{field: value_T})
    dirty.logprobs_T = dirty.logprobs_T.detach().requires_grad_()
    output = loss(dirty)
    (gradient_T,) = torch.autograd.grad(output.loss_T.sum(), dirty.logprobs_T)
    assert output.loss_T[1].item() == 0 and gradient_T[1].item() == 0
    assert torch.equal(output.loss_T, clean.loss_T) and torch.equal(gradient_T, clean_gradient_T)
    assert {k: v.item() for k, v in output.metrics.items()} == {k: v.item() for k, v in clean.metrics.items()}


@pytest.mark.parametrize("loss", LOSSES)
def test_non_finite_tokens_that_count_are_seen(loss: Loss) -> None:
    """Complaint 6: neither zeroed nor averaged away."""
    inputs = example(0)
    inputs.logprobs_T = inputs.logprobs_T.detach().clone()
    inputs.logprobs_T[3] = math.nan  # the only token of its sequence
    output = loss(inputs)
    assert output.metrics["loss/nonfinite"].item() == 1.0
    assert output.loss_T.isnan().tolist() == [t == 3 for t in range(8)]


@pytest.mark.parametrize("loss", LOSSES)
def test_metrics_add_up_over_micro_batches(loss: Loss) -> None:
    whole = example(5, spread=2.0)
    totals = dict.fromkeys(loss(whole).metrics, 0.0)
    losses = []
    for sequence in range(len(LENGTHS)):
        own_T = whole.sequence_T == sequence
        part = LossInputs(
            whole.logprobs_T[own_T],
            whole.old_logprobs_T[own_T],
            whole.advantages_T[own_T],
            whole.correction_T[own_T],
            torch.zeros(LENGTHS[sequence], dtype=torch.int64),
            whole.lengths_S[sequence : sequence + 1],
        )
        output = loss(part)
        losses.append(output.loss_T)
        for name, value in output.metrics.items():
            totals[name] += value.item()
    torch.testing.assert_close(torch.cat(losses), loss(whole).loss_T)
    assert totals == pytest.approx({name: value.item() for name, value in loss(whole).metrics.items()})


@pytest.mark.parametrize("loss", LOSSES)
def test_a_dummy_micro_batch_keeps_its_graph(loss: Loss) -> None:
    logprobs_T = torch.zeros(0, requires_grad=True)
    none_T, index_T = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    output = loss(LossInputs(logprobs_T, none_T, none_T, none_T, index_T, torch.tensor([0])))
    output.loss_T.sum().backward()
    assert logprobs_T.grad is not None and all(value.item() == 0 for value in output.metrics.values())


def test_named_losses_differ_in_their_bounds() -> None:
    bounds = [
        (loss.clip_low, loss.clip_high, loss.dual_clip) for loss in (grpo(), dr_grpo(), dapo(), ClippedSurrogate())
    ]
    assert bounds == [(0.2, 0.2, None), (0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 3.0)]


@settings(max_examples=100, deadline=None)
@given(st.floats(-40, 0), st.floats(-40, 0))
def test_k3_is_never_negative_and_zero_on_equality(logprob: float, reference_logprob: float) -> None:
    policy, other = (torch.tensor([value], dtype=torch.float64) for value in (logprob, reference_logprob))
    assert kl_penalty(policy, other).item() >= 0
    assert kl_penalty(policy, policy).item() == 0
    if abs(logprob - reference_logprob) < 20:
        delta = reference_logprob - logprob
        assert kl_penalty(policy, other).item() == pytest.approx(math.exp(delta) - delta - 1, rel=1e-6, abs=1e-9)


def test_k3_gradient() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([-1.5, -1.5], dtype=torch.float64)
    (gradient_T,) = torch.autograd.grad(kl_penalty(logprobs_T, ref_T).sum(), logprobs_T)
    # d/dx (exp(r - x) - 1 - (r - x)) = 1 - exp(r - x)
    assert gradient_T.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(0.5)])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ClippedSurrogate(clip_low=1.5), "clip_low 1.5"),
        (lambda: ClippedSurrogate(clip_high=-0.1), "clip_high -0.1"),
        (lambda: ClippedSurrogate(dual_clip=1.0), "dual_clip 1.0"),
        (lambda: GSPO(clip_low=0.0), "clip_low 0.0"),
        (lambda: CISPO(max_ratio=0.5), "max_ratio 0.5"),
    ],
)
def test_bad_bounds(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(UserError, match=message):
        build()
