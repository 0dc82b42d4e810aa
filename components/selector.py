"""Selectors: how a page is summarised and how a query ranks the summaries (paper, block-sparse decode).

Axes: B rows, K KV heads, G query heads per KV head, D head dim, P pages, M landmarks per page.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from sparrow.errors import UserError


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
        return _page_mass(q_BKGD, landmarks_BKPMD, candidates_BP).sum(2)


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


class HeadMaxSelector:
    """Softmax over the candidates' centroids per query head, the largest over the group.

    A page that one head needs is kept, whatever the others think of it.
    """

    landmarks_per_page = 1
    kernel: Literal["head_max"] = "head_max"

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., 1, D]."""
        return keys.mean(-2, keepdim=True)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32, in [0, 1]."""
        return _page_mass(q_BKGD, landmarks_BKPMD, candidates_BP).amax(2)


class SegmentSoftmaxSelector:
    """Several centroids a page, one per segment of its tokens: their attention mass by head, summed over the group.

    With as many segments as tokens in a page the centroids are the keys, and the score is the true attention mass: the
    oracle, for analysis only, since it reads all keys.

    Args:
        segments: centroids per page, M; must divide the page size.
        fp8: keep the centroids in 8 bits (e4m3), which halves the bytes that ranking moves; entries beyond 448 are cut.
    """

    def __init__(self, segments: int = 4, fp8: bool = False) -> None:
        if segments < 1:
            raise UserError(f"SegmentSoftmaxSelector.segments: {segments} must be at least 1")
        self.landmarks_per_page, self.fp8 = segments, fp8

    @property
    def kernel(self) -> Literal["head_softmax"] | None:
        """The kernels take powers of two."""
        return "head_softmax" if self.landmarks_per_page.bit_count() == 1 else None

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., M, D]."""
        page, segments = keys.shape[-2], self.landmarks_per_page
        if page % segments:
            raise UserError(f"SegmentSoftmaxSelector.segments: {segments} does not divide kv_cache.page_size {page}")
        parts = keys.unflatten(-2, (segments, page // segments))
        if not self.fp8:
            return parts.mean(-2)
        # Rounded once; beyond its largest number the format has none but NaN.
        largest = torch.finfo(torch.float8_e4m3fn).max
        return parts.float().mean(-2).clamp(-largest, largest).to(torch.float8_e4m3fn)

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32; each row's candidates sum to G."""
        return _page_mass(q_BKGD, landmarks_BKPMD, candidates_BP).sum(2)


class WindowSelector:
    """The newest pages, whatever the query: sink and sliding window, the baseline that needs no landmarks."""

    landmarks_per_page = 0
    kernel = None

    def landmarks(self, keys: Tensor) -> Tensor:
        """[..., page, D] to [..., 0, D]."""
        return keys[..., :0, :]

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """[B, K, P], fp32: the page's number."""
        page_P = torch.arange(candidates_BP.shape[1], dtype=torch.float32, device=q_BKGD.device)
        return page_P.expand(*q_BKGD.shape[:2], -1)


def _page_mass(q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
    """Attention of each query head to the candidates' landmarks, summed over those of a page; [B, K, G, P], fp32."""
    logits = torch.einsum("bkgd,bkpmd->bkgpm", q_BKGD.float(), landmarks_BKPMD.float()) / math.sqrt(q_BKGD.shape[-1])
    # A finite floor: a row without candidates must give numbers, not NaN.
    floor = torch.finfo(logits.dtype).min
    return torch.where(candidates_BP[:, None, None], logits.logsumexp(-1), floor).softmax(-1)
