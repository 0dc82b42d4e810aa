"""The small interfaces that engine and training call; their implementations are chosen in YAML (sparrow.components).

Axes: B decode rows, H query heads, K KV heads, G = H / K query heads per KV head, D head dim, P pages of a sequence,
M landmark vectors per page, T packed tokens, C cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparrow.models.decoder_config import DecoderConfig


class Attention(Protocol):
    """Attention of one forward pass, called by each layer of the decoder after RoPE."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor:
        """Returns the attention output [T, H, D], before the output projection."""
        ...


@dataclass(frozen=True)
class HeadParameters:
    """What stands between a layer's fused projection and its attention.

    Attributes:
        bias_X: of q, k and v, [(H + 2 K) * D].
        gains: of the q- and k-norm, [D] each.
        eps: of these norms.
    """

    bias_X: Tensor | None
    gains: tuple[Tensor, Tensor] | None
    eps: float


@runtime_checkable
class ProjectionAttention(Protocol):
    """Attention that takes the fused projection itself, and does norms, rotation and cache writes in one kernel."""

    def project(self, layer: int, qkv_CBX: Tensor, heads: HeadParameters, cos_BD: Tensor, sin_BD: Tensor, /) -> Tensor:
        """[B, H * D] of C shares that sum to the projection; the rotary factors are [B, D / 2]."""
        ...


@dataclass(frozen=True)
class RunSettings:
    """What the P5 of a budget depends on: a schedule that was calibrated for other settings may not hold in this run.

    Attributes:
        model: name or folder of the checkpoint; its last part counts, upper or lower case.
        selector: class name or short name (`CentroidSelector`, `centroid`), with its arguments where it has some
            (`SegmentSoftmaxSelector(fp8=False, landmarks_per_page=4)`).
        temperature: of the sampling.
        estimator: of the acceptance rate, "exact" or "top_20".
        tau: that the run holds its P5 against.
        architecture, weights: of the checkpoint (sparrow.models.identity); None where it is not there yet.
        adapter: the one that is on in rollouts (`sparrow.models.identity.adapter_identity`, or in words where its
            weights are not fixed); None where there is none.
    """

    model: str
    page_size: int
    selector: str
    sink_pages: int
    recent_pages: int
    dense_layers: int
    temperature: float
    estimator: str
    tau: float | None = None
    architecture: str | None = None
    weights: str | None = None
    adapter: str | None = None


class BudgetSchedule(Protocol):
    """How many KV pages a sparse layer may read, by cached length (paper, dynamic budget schedule)."""

    @property
    def max_pages(self) -> int:
        """The largest budget the schedule can return, at any length and at any time."""
        ...

    def max_pages_until(self, length: int) -> int:
        """The largest budget at any cached length up to `length`, at any time; sizes the page lists."""
        ...

    def pages(self, cached_length: Tensor) -> Tensor:
        """Total pages (sink, recent and selected together) for each cached length; same shape, int64."""
        ...

    def check(self, run: RunSettings) -> list[str]:
        """Differences between the run and what the schedule was made for; UserError where they are not allowed."""
        ...


@runtime_checkable
class AdaptiveBudget(Protocol):
    """A budget that moves with the acceptance tail it leads to, from the schedule `start` on."""

    @property
    def start(self) -> BudgetSchedule: ...

    def observe(self, alpha_T: Tensor, cached_length_T: Tensor, tau: float) -> dict[str, float]:
        """Moves the budget by a step's tokens, after their last use of the old one; collective, returns metrics."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Selector(Protocol):
    """Ranks the pages of a sequence for a query from one or a few landmark vectors per page."""

    landmarks_per_page: int

    @property
    def kernel(self) -> Literal["group_mean", "head_softmax", "head_max", "bound"] | None:
        """The fused kernels that compute the same (sparrow.kernels.page_select), None where there are none."""
        ...

    def landmarks(self, keys: Tensor) -> Tensor:
        """Keys of complete pages [..., page, D] (after RoPE) to landmarks [..., M, D]."""
        ...

    def score(self, q_BKGD: Tensor, landmarks_BKPMD: Tensor, candidates_BP: Tensor) -> Tensor:
        """Scores [B, K, P], fp32, larger is better; the caller ignores entries where `candidates_BP` is False."""
        ...


class KVCache(Protocol):
    """Paged KV memory and the attention over it, in prefill, in decode and in a training forward."""

    page_size: int
    block_size: int
    budget: BudgetSchedule | None  # None where everything is read

    @property
    def capturable(self) -> bool:
        """Whether a decode step reaches the host nowhere, so that a CUDA graph can hold it; known once allocated."""
        ...

    def bytes_per_token(self, config: DecoderConfig, dtype: torch.dtype) -> int:
        """Bytes of the pool per cached token, over all layers, landmarks included."""
        ...

    def allocate(self, config: DecoderConfig, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        """Makes the pool; blocks 1 to `num_blocks` can be owned, block 0 is the null block."""
        ...

    def release(self) -> None:
        """Drops pages and landmarks: nothing computed with the weights of before may outlive a sync."""
        ...

    def copy_block(self, source: int, target: int) -> None: ...

    def swap_out(self, blocks: list[int]) -> Any:
        """Copies of what the blocks hold in every layer, in host memory and complete when this returns."""
        ...

    def swap_in(self, saved: Any, blocks: list[int]) -> None:
        """Puts what `swap_out` returned into as many blocks, bit for bit; not necessarily those of before."""
        ...

    def prefill(self, slots_T: Tensor, lengths: Sequence[int]) -> Attention:
        """Dense causal attention over packed prompts, whose keys and values go to the given slots."""
        ...

    def prefill_chunk(self, slots_T: Tensor, cached_slots_C: Tensor) -> Attention:
        """The same for the next T tokens of one prompt, whose first C tokens are cached in the slots given."""
        ...

    def decode(self, block_table_BN: Tensor, lengths_B: Tensor) -> Attention:
        """Attention of one token per row; `lengths_B` counts it already, its key and value are written first."""
        ...

    def training(self, lengths: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Attention:
        """The same sparsity as decode for packed whole sequences, differentiable; dense over each prompt."""
        ...

    def check(
        self, model: str, temperature: float, estimator: str, tau: float | None = None, adapter: str | None = None
    ) -> list[str]:
        """Differences between run and calibration of the budget, to be printed; UserError where not allowed."""
        ...

    def pages_read(self, cached_length: Tensor) -> Tensor:
        """Pages that a sparse layer reads to decode one token at each cached length; same shape, int64."""
        ...

    def tokens_read(self, cached_length: Tensor, num_layers: int) -> Tensor:
        """KV entries read over all layers to decode one token, selection included; a key and a value are one entry."""
        ...
