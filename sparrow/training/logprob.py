"""Scoring of packed tokens chunk by chunk, so that logits of shape [tokens, vocabulary] are never held whole.

A response of 32K tokens over a vocabulary of 151K would need 20 GB of fp32 logits; a chunk of 1,024 needs 0.6 GB.
The dense log-probs of a chunk are made whole, because the update makes them so and both must agree to the last bit.
The sparse ones, which only the acceptance rate needs, are made whole on CUDA, where one more product and a few reads
by kernels are all it costs; the reference in PyTorch cuts them along the vocabulary as well.

Axes: N scored tokens (all of them, or those of one chunk), E hidden size, V vocabulary (v a slice of it), K top-k set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparrow.errors import UserError
from sparrow.training.segments import TargetScores, alpha_of_logits, score_rows, target_logprobs, top_k_of_rows

Head = Callable[[Tensor], Tensor]


class SlicedHead(Protocol):
    """Final hidden states to fp32 logits, of the whole vocabulary or of a slice; see `Decoder.logits`."""

    def __call__(self, hidden_NE: Tensor, vocab: slice | None = None, /) -> Tensor: ...


# Differences of log-probs are clamped to +-20 before exp (as in verl): finite in every dtype, far outside any bound.
LOG_RATIO_LIMIT = 20.0


@dataclass
class DenseScores:
    """What the dense policy says about the sampled tokens, without gradient; all fp32 but the ids.

    Attributes:
        logprobs_N: log-prob of the sampled token at the sampling temperature.
        entropy_N: entropy of the whole distribution, in nats.
        top_ids_NK, top_logprobs_NK: the K most probable tokens, most probable first; K <= V.
        alpha_exact_N: exact per-token acceptance rate; None without the rollout's hidden states.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    top_ids_NK: Tensor
    top_logprobs_NK: Tensor
    alpha_exact_N: Tensor | None


def token_logprobs(
    hidden_NE: Tensor, head: Head, targets_N: Tensor, temperature: float, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets with gradient; the logits of a chunk are recomputed in its backward.

    For the same hidden states and chunk size the values are bit-identical to those of `score_tokens`, so that the
    on-policy ratio is exactly 1.

    Args:
        hidden_NE: final hidden states.
        head: hidden states to fp32 logits; must be deterministic, because it runs again in the backward.
        targets_N: sampled token ids, int64.
        temperature: sampling temperature, > 0 (the log-prob is that of the sampling distribution).
        chunk_size: tokens whose logits are held at a time.

    Returns:
        logprobs_N with gradient, entropy_N (nats) without.

    Raises:
        UserError: temperature is not a positive number.
    """
    _check_temperature(temperature)
    logprobs, entropies = [], []
    for rows in _chunks(hidden_NE.shape[0], chunk_size):
        logprobs_N, entropy_N = checkpoint(
            _target_scores,
            hidden_NE[rows],
            head,
            targets_N[rows],
            temperature,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        logprobs.append(logprobs_N)
        entropies.append(entropy_N)
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def score_tokens(
    hidden_NE: Tensor,
    head: SlicedHead,
    targets_N: Tensor,
    temperature: float,
    top_k: int,
    sparse_hidden_NE: Tensor | None = None,
    chunk_size: int = 1024,
    vocab_chunk: int = 4096,
    sparse_index_N: Tensor | None = None,
) -> DenseScores:
    """Everything a step wants to know of the dense distributions, in one pass over the head and without gradient.

    Args:
        hidden_NE: final hidden states of the dense policy.
        head, targets_N, temperature, chunk_size: as in `token_logprobs`.
        top_k: size of the top-k set; cut to the vocabulary's size.
        sparse_hidden_NE: the rollout's final hidden states for the same tokens, on any device and in any float dtype;
            gathered and moved chunk by chunk and put through the same head, they give the exact acceptance rate.
        vocab_chunk: columns of sparse logits that the reference in PyTorch holds at a time; it makes them twice.
        sparse_index_N: where among the rollout's states those of each token stand, on the same device; None: in order.

    Raises:
        UserError: temperature is not a positive number.
    """
    _check_temperature(temperature)
    if sparse_hidden_NE is not None and sparse_index_N is None:
        sparse_index_N = torch.arange(len(sparse_hidden_NE), device=sparse_hidden_NE.device)
    chunks = []
    for rows in _chunks(hidden_NE.shape[0], chunk_size):
        sparse_NE = None
        if sparse_hidden_NE is not None and sparse_index_N is not None:
            sparse_NE = _beside(sparse_hidden_NE, sparse_index_N[rows], hidden_NE)
        chunks.append(_score_chunk(hidden_NE[rows], head, targets_N[rows], temperature, top_k, sparse_NE, vocab_chunk))
    logprobs, entropies, top_ids, top_logprobs, alphas = zip(*chunks, strict=True)
    return DenseScores(
        logprobs_N=torch.cat(logprobs),
        entropy_N=torch.cat(entropies),
        top_ids_NK=torch.cat(top_ids),
        top_logprobs_NK=torch.cat(top_logprobs),
        alpha_exact_N=None if sparse_hidden_NE is None else torch.cat(alphas),
    )


def _score_chunk(
    hidden_NE: Tensor, head: SlicedHead, targets_N: Tensor, temperature: float, top_k: int, sparse_NE: Tensor | None,
    vocab_chunk: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The fields of `DenseScores`; on CUDA one [N, V] tensor is held, with sparse states two."""
    logits_NV = _checked(head(hidden_NE))
    alpha_N = None
    if not _fused(logits_NV):
        logprobs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
        top = logprobs_NV.topk(min(top_k, logprobs_NV.shape[-1]))
        if sparse_NE is not None:
            alpha_N = alpha_of_hidden(sparse_NE, logprobs_NV, head, temperature, vocab_chunk)
        return *_pick(logprobs_NV, targets_N), top.indices, top.values, alpha_N
    rows = score_rows(logits_NV, temperature)
    logprobs_N = target_logprobs(logits_NV, rows, targets_N, temperature)
    top_NK = top_k_of_rows(logits_NV, rows, temperature, top_k)
    if sparse_NE is not None:
        alpha_N = alpha_of_logits(_checked(head(sparse_NE)), logits_NV, rows, temperature)
    return logprobs_N, rows.entropy_N, *top_NK, alpha_N


def _beside(sparse_TE: Tensor, index_N: Tensor, hidden_NE: Tensor) -> Tensor:
    """Rows of the rollout's states on the device and in the dtype of the dense ones."""
    if sparse_TE.is_cuda or not hidden_NE.is_cuda:
        return sparse_TE.index_select(0, index_N).to(hidden_NE)
    # Pinned, so that neither the host nor the device waits for the other.
    pinned_NE = torch.empty(len(index_N), sparse_TE.shape[1], dtype=sparse_TE.dtype, pin_memory=True)
    torch.index_select(sparse_TE, 0, index_N, out=pinned_NE)
    return pinned_NE.to(hidden_NE.device, non_blocking=True).to(hidden_NE.dtype)


def alpha_exact(logprobs_sparse_NV: Tensor, logprobs_dense_NV: Tensor) -> Tensor:
    """Per-token acceptance rate [N] = sum_v min(p_sparse, p_dense), in [0, 1] (arXiv 2606.08446, acceptance rate).

    Computed as its equal 1 - TV = 1 - sum_v |p_sparse - p_dense| / 2: both are symmetric, but this one is exactly 1
    for equal distributions, where the sum of V rounded probabilities is off by about 1e-6. NaN stays NaN.
    """
    total_variation_N = (logprobs_sparse_NV.exp() - logprobs_dense_NV.exp()).abs().sum(-1) / 2
    return (1 - total_variation_N).clamp(0, 1)


def alpha_of_hidden(
    sparse_hidden_NE: Tensor, logprobs_dense_NV: Tensor, head: SlicedHead, temperature: float, vocab_chunk: int
) -> Tensor:
    """`alpha_exact` [N] without the sparse log-probs [N, V]: two passes over slices of `vocab_chunk` columns.

    The first finds the normalisers, the second sums the differences of the probabilities; equal to one pass up to
    rounding (1e-6). Non-finite logits give NaN, as a log-softmax does.
    """
    slices = _chunks(logprobs_dense_NV.shape[-1], vocab_chunk)
    normalizer_N = logprobs_dense_NV.new_full((len(sparse_hidden_NE),), -torch.inf)
    for columns in slices:
        logits_Nv = _checked(head(sparse_hidden_NE, columns)) / temperature
        normalizer_N = torch.logaddexp(normalizer_N, logits_Nv.logsumexp(-1))
    difference_N = torch.zeros_like(normalizer_N)
    for columns in slices:
        # In place: a slice is the size that the memory is bounded by.
        logits_Nv = (head(sparse_hidden_NE, columns) / temperature).sub_(normalizer_N[:, None])
        difference_N += logits_Nv.exp_().sub_(logprobs_dense_NV[:, columns].exp()).abs_().sum(-1)
    return (1 - difference_N / 2).clamp(0, 1)


def _target_scores(hidden_NE: Tensor, head: Head, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_NV = _checked(head(hidden_NE))
    if _fused(logits_NV):
        logprobs_N, entropy_N = TargetScores.apply(logits_NV, targets_N, temperature)
        return logprobs_N, entropy_N
    return _pick(torch.log_softmax(logits_NV / temperature, dim=-1), targets_N)


def _fused(logits_NV: Tensor) -> bool:
    """Whether the kernels read these logits; the passes of PyTorch over them are the reference."""
    return logits_NV.is_cuda and logits_NV.dtype == torch.float32


def _checked(logits_NV: Tensor) -> Tensor:
    assert logits_NV.dtype in (torch.float32, torch.float64), f"the head returned {logits_NV.dtype} logits"
    return logits_NV


def _pick(logprobs_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Log-prob of the target and entropy of the row."""
    logprobs_N = logprobs_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    # After the gather, so that the recomputation in the backward stops before it.
    with torch.no_grad():
        entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    return logprobs_N, entropy_N


def _chunks(size: int, chunk_size: int) -> list[slice]:
    """Slices over tokens or vocabulary; one empty slice for none, so that a dummy micro-batch still has a graph."""
    assert chunk_size > 0, chunk_size
    return [slice(start, min(start + chunk_size, size)) for start in range(0, max(size, 1), chunk_size)]


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise UserError(f"temperature {temperature} has no log-probs: training needs a finite temperature > 0")
