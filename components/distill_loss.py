"""How far the sparse policy is from the dense one: what a distiller brings down (paper, DistillSparse).

Each loss is a KL divergence per token, at the sampling temperature; the dense policy, the teacher, has no gradient.
Logits of shape [tokens, vocabulary] stand for one chunk of tokens at a time and are made again in the backward.

Axes: N tokens (all of them, or those of one chunk), E hidden size, V vocabulary, K the teacher's top-k set.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparrow.errors import UserError
from sparrow.training.logprob import LOG_RATIO_LIMIT, Head, token_logprobs

Needs = Literal["sampled", "top_k", "all"]
DIRECTIONS = ("forward", "reverse")


@dataclass(frozen=True)
class Teacher:
    """What is known of the dense policy, without gradient.

    Attributes:
        logprobs_N: of the sampled tokens, for a loss that needs `sampled`.
        top_ids_NK, top_logprobs_NK: its most probable tokens, most probable first, for a loss that needs `top_k`.
        hidden_NE: its final hidden states, which the head turns into logits, for one that needs `all`.
    """

    logprobs_N: Tensor | None = None
    top_ids_NK: Tensor | None = None
    top_logprobs_NK: Tensor | None = None
    hidden_NE: Tensor | None = None

    def rows(self, start: int, stop: int) -> Teacher:
        """Some of the tokens."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Teacher(**{name: value if value is None else value[start:stop] for name, value in values.items()})


@dataclass(frozen=True)
class Student:
    """The sparse policy, with gradient.

    Attributes:
        logprobs_N: of the sampled tokens.
        scaled_NV: logits over the temperature; None for a loss that needs `sampled` alone.
        normaliser_N: their log-sum-exp.
    """

    logprobs_N: Tensor
    scaled_NV: Tensor | None = None
    normaliser_N: Tensor | None = None


class DistillLoss(Protocol):
    """A divergence per token [N]; `needs` says of what, `top_k` is the size of the set."""

    needs: Needs
    top_k: int

    def __call__(self, student: Student, teacher: Teacher, head: Head, temperature: float) -> Tensor: ...


class SampledK3:
    """k3 at the sampled token alone, an estimate of KL(sparse, dense) (paper)."""

    needs: Needs = "sampled"
    top_k = 0

    def __call__(self, student: Student, teacher: Teacher, head: Head, temperature: float) -> Tensor:
        """[N], of at most 20 each."""
        assert teacher.logprobs_N is not None
        return k3(student.logprobs_N, teacher.logprobs_N)


class TopKKL:
    """KL over the teacher's top-k tokens and one bucket for all others: a lower bound of the exact one.

    Args:
        top_k: tokens of the teacher; a set as large as the vocabulary has no other bucket, and is exact.
        direction: forward is KL(dense, sparse), which asks the sparse policy for all that the dense one has; reverse is
            KL(sparse, dense).

    Raises:
        UserError: an argument out of range.
    """

    needs: Needs = "top_k"

    def __init__(self, top_k: int = 20, direction: str = "forward") -> None:
        if top_k < 1:
            raise UserError(f"distiller.loss.top_k: {top_k} must be at least 1")
        _check_direction(direction)
        self.top_k, self.direction = top_k, direction

    def __call__(self, student: Student, teacher: Teacher, head: Head, temperature: float) -> Tensor:
        """[N]."""
        assert student.scaled_NV is not None and student.normaliser_N is not None
        assert teacher.top_ids_NK is not None and teacher.top_logprobs_NK is not None
        # The recorded set may be the larger one, most probable tokens first.
        ids_NK, dense_NK = teacher.top_ids_NK[:, : self.top_k], teacher.top_logprobs_NK[:, : self.top_k]
        sparse_NK = student.scaled_NV.gather(1, ids_NK) - student.normaliser_N[:, None]
        if ids_NK.shape[1] < student.scaled_NV.shape[1]:
            # 1 - sum would lose a small tail of the sparse policy to rounding, and its gradient with it.
            others_NV = student.scaled_NV.scatter(1, ids_NK, -torch.inf)
            tail_N = others_NV.logsumexp(1) - student.normaliser_N
            sparse_NK = torch.cat((sparse_NK, tail_N[:, None]), 1)
            dense_NK = torch.cat((dense_NK, _log_tail(dense_NK)[:, None]), 1)
        return _kl(dense_NK, sparse_NK, self.direction)


class FullKL:
    """The exact KL over the whole vocabulary; the teacher's logits are made beside the student's, chunk by chunk.

    Args:
        direction: as in `TopKKL`.
    """

    needs: Needs = "all"
    top_k = 0

    def __init__(self, direction: str = "forward") -> None:
        _check_direction(direction)
        self.direction = direction

    def __call__(self, student: Student, teacher: Teacher, head: Head, temperature: float) -> Tensor:
        """[N]."""
        assert student.scaled_NV is not None and student.normaliser_N is not None and teacher.hidden_NE is not None
        with torch.no_grad():
            dense_NV = torch.log_softmax(head(teacher.hidden_NE) / temperature, -1)
        return _kl(dense_NV, student.scaled_NV - student.normaliser_N[:, None], self.direction)


def distill_terms(
    loss: DistillLoss,
    hidden_NE: Tensor,
    head: Head,
    targets_N: Tensor,
    teacher: Teacher,
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the sampled tokens under the sparse policy, and its divergences; both [N], with gradient.

    Args:
        hidden_NE: final hidden states of the sparse policy.
        head: hidden states to fp32 logits; it runs again in the backward.
        chunk_size: tokens whose logits are held at a time.
    """
    if loss.needs == "sampled":
        logprobs_N, _ = token_logprobs(hidden_NE, head, targets_N, temperature, chunk_size)
        return logprobs_N, loss(Student(logprobs_N), teacher, head, temperature)
    terms = []
    for start in range(0, max(len(hidden_NE), 1), chunk_size):  # one empty chunk for none, which has a graph
        stop = start + chunk_size
        chunk = (loss, hidden_NE[start:stop], head, targets_N[start:stop], teacher.rows(start, stop), temperature)
        terms.append(checkpoint(_chunk_terms, *chunk, use_reentrant=False, preserve_rng_state=False))
    logprobs, divergences = zip(*terms, strict=True)
    return torch.cat(logprobs), torch.cat(divergences)


def _chunk_terms(
    loss: DistillLoss, hidden_NE: Tensor, head: Head, targets_N: Tensor, teacher: Teacher, temperature: float
) -> tuple[Tensor, Tensor]:
    scaled_NV = head(hidden_NE) / temperature
    normaliser_N = scaled_NV.logsumexp(-1)
    logprobs_N = scaled_NV.gather(1, targets_N[:, None]).squeeze(1) - normaliser_N
    return logprobs_N, loss(Student(logprobs_N, scaled_NV, normaliser_N), teacher, head, temperature)


def k3(sparse_logprobs_N: Tensor, dense_logprobs_N: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = dense - sparse clamped to +-20 and the result to 20; fp32 [N] (paper, DistillSparse)."""
    delta_N = (dense_logprobs_N - sparse_logprobs_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(delta_N) - delta_N).clamp(max=LOG_RATIO_LIMIT)


def _kl(dense_NK: Tensor, sparse_NK: Tensor, direction: str) -> Tensor:
    """From the log-probs of buckets that sum to one."""
    first_NK, second_NK = (dense_NK, sparse_NK) if direction == "forward" else (sparse_NK, dense_NK)
    return (first_NK.exp() * (first_NK - second_NK)).sum(-1)


def _log_tail(logprobs_NK: Tensor) -> Tensor:
    """Of the teacher, [N]: what is below the resolution of its log-probs counts as that, so that none is log 0."""
    tail_N = 1 - logprobs_NK.double().exp().sum(-1)
    return tail_N.clamp(min=torch.finfo(logprobs_NK.dtype).eps).log().to(logprobs_NK.dtype)


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise UserError(f"distiller.loss.direction: {direction!r} is neither 'forward' nor 'reverse'")
