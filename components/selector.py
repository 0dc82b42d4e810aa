"""Selectors: how a page is summarised and how a query ranks the summaries (paper, block-sparse decode).

Axes: B rows, K KV heads, G query heads per KV head, D head dim, P pages, M landmarks per page.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor


class CentroidSelector:
    """The paper's: a page is the mean of its keys after RoPE, its score the mean query of the GQA group times that."""

    landmarks_per_page = 1
    kernel: Literal["group_mean"] = "group_mean"

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., 1, D]."""
        return keys.mean(-2, keepdim=True)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32."""
        mean_BKD = q_BKGD.mean(2)
        return torch.einsum("bkd,bkpd->bkp", mean_BKD.float(), landmarks_BKPMD[..., 0, :].float())


class HeadSoftmaxSelector:
    """Softmax over the candidates' centroids per query head, summed over the group.

    Reads the same bytes as `CentroidSelector` and keeps heads that look at different pages from cancelling in the mean
    query. Ours, not the paper's.
    """

    landmarks_per_page = 1
    kernel: Literal["head_softmax"] = "head_softmax"

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., 1, D]."""
        return keys.mean(-2, keepdim=True)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32; each row's candidates sum to G."""
        logits = torch.einsum("bkgd,bkpd->bkgp", q_BKGD.float(), landmarks_BKPMD[..., 0, :].float())
        logits = logits / math.sqrt(q_BKGD.shape[-1])
        # A finite floor: a row without candidates must give numbers, not NaN.
        floor = torch.finfo(logits.dtype).min
        return torch.where(candidates_BP[:, None, None], logits, floor).softmax(-1).sum(2)


class QuestSelector:
    """Elementwise minimum and maximum of a page's keys; the score is the upper bound of q·k in that box.

    Quest (arXiv 2406.10774); the largest bound over the GQA group's heads counts. Two landmarks: twice the bytes.
    """

    landmarks_per_page = 2
    kernel: Literal["bound"] = "bound"

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., 2, D]."""
        return torch.stack((keys.amin(-2), keys.amax(-2)), dim=-2)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32."""
        low, high = landmarks_BKPMD.float().unbind(-2)
        positive, negative = q_BKGD.float().clamp(min=0), q_BKGD.float().clamp(max=0)
        bound = torch.einsum("bkgd,bkpd->bkgp", positive, high) + torch.einsum("bkgd,bkpd->bkgp", negative, low)
        return bound.amax(2)
