"""The KV cache of the rollout: `DenseKVCache` reads all of it, `SparseKVCache` the pages a selector picks (paper,
block-sparse decode). Both keep every token, sparsity saves bandwidth, not capacity.

Axes: B rows, H query heads, K KV heads, G = H / K, D head dim, T tokens, C cached tokens, N blocks per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparrow.attention.backend import Backend, decode_attention
from sparrow.attention.gather import GatherDecode
from sparrow.attention.packed import PackedCausal
from sparrow.attention.pattern import SparsePattern
from sparrow.attention.pool import PagePool
from sparrow.attention.prefill import Prefill, PrefillChunk
from sparrow.attention.sparse import SparseAttention
from sparrow.components.selector import HeadSoftmaxSelector
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.identity import architecture, fingerprint
from sparrow.protocols import Attention, BudgetSchedule, KVCache, RunSettings, Selector

_PROBED_HEAD_DIM = 64
FP8_CAPABILITY = (8, 9)
LONGEST_CHECKED = 2**20  # cached tokens; no checkpoint goes that far


def _check_sizes(page_size: int, block_size: int) -> None:
    if page_size < 1 or block_size % page_size:
        raise UserError(f"kv_cache: block_size {block_size} must be a multiple of page_size {page_size}")


def _check_reserved(budget: BudgetSchedule, sink_pages: int, recent_pages: int) -> None:
    """UserError where the budget at some length does not hold the pages that are always kept."""
    if sink_pages < 0 or recent_pages < 1:
        raise UserError(
            f"kv_cache: sink_pages {sink_pages} must be >= 0 and recent_pages {recent_pages} >= 1 (the open page)"
        )
    pages_L = budget.pages(torch.arange(LONGEST_CHECKED))
    too_small_L = pages_L < sink_pages + recent_pages
    if too_small_L.any():
        length = int(too_small_L.int().argmax())
        raise UserError(
            f"kv_cache.budget: {int(pages_L[length])} pages at length {length} do not hold the {sink_pages} sink and "
            f"{recent_pages} recent pages that are always kept"
        )


def _key_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys in one layer."""
    return config.num_kv_heads * config.head_dim * dtype.itemsize


def _selector_name(selector: Selector) -> str:
    """Its class, with the numbers and words that the instance holds: they decide what is selected as well."""
    plain = {name: value for name, value in vars(selector).items() if isinstance(value, bool | int | float | str)}
    arguments = ", ".join(f"{name}={value!r}" for name, value in sorted(plain.items()))
    return type(selector).__name__ + (f"({arguments})" if arguments else "")


def _landmarks_of_zeros(selector: Selector, page_size: int, dtype: torch.dtype) -> Tensor:
    """Of one page, [1, M, D]: how many they are, and in which dtype they are kept."""
    return selector.landmarks(torch.zeros(1, page_size, _PROBED_HEAD_DIM, dtype=dtype))


def _check_landmarks(selector: Selector, page_size: int) -> None:
    """Summarises one page, so that a selector refuses a page size now, not in the first prefill."""
    made = _landmarks_of_zeros(selector, page_size, torch.float32).shape[-2]
    if made != selector.landmarks_per_page:
        raise UserError(
            f"kv_cache.selector: {_selector_name(selector)} makes {made} landmarks of a page, and says "
            f"landmarks_per_page {selector.landmarks_per_page}"
        )


def _check_eight_bits(landmark_dtype: torch.dtype, device: torch.device) -> None:
    """UserError on a GPU that cannot convert the 8-bit format."""
    if landmark_dtype.itemsize > 1 or torch.device(device).type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise UserError(
            f"kv_cache.selector: landmarks of 8 bits need a GPU of capability {FP8_CAPABILITY}, this is {capability}; "
            "leave fp8 out"
        )


def check_runs(cache: KVCache, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Makes a pool of one block and drops it: UserError where the cache's backend cannot run here."""
    cache.allocate(config, 1, device, dtype)
    cache.release()


class DenseKVCache:
    """Every token attends to all tokens before it.

    Args:
        page_size, block_size: tokens per page and per block of the pool; a block is the unit of allocation.
        backend: `gather` (any device), `triton` and `flex` (FlexAttention; CUDA), `auto` picks by device.
    """

    def __init__(self, page_size: int = 16, block_size: int = 128, backend: Backend = "auto") -> None:
        _check_sizes(page_size, block_size)
        self.page_size, self.block_size, self.backend = page_size, block_size, backend
        self.budget: BudgetSchedule | None = None

    def allocate(self, config: DecoderConfig, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        """Makes the pool of `num_blocks` blocks (and the null block)."""
        self.attention = decode_attention(self.backend, device, dtype, self.page_size, config.head_dim)
        self.pool = PagePool(config, num_blocks, self.block_size, self.page_size, 0, range(0), device, dtype)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a decode step."""
        return self.attention is not GatherDecode

    def bytes_per_token(self, config: DecoderConfig, dtype: torch.dtype) -> int:
        """Keys and values of all layers."""
        return config.num_layers * _key_bytes(config, dtype) * 2

    def release(self) -> None:
        """Drops the pool."""
        del self.pool

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block of every layer."""
        self.pool.copy_block(source, target)

    def swap_out(self, blocks: list[int]) -> Any:
        """Copies of blocks of every layer, on the host."""
        return self.pool.swap_out(blocks)

    def swap_in(self, saved: Any, blocks: list[int]) -> None:
        """Puts them back, into any blocks."""
        self.pool.swap_in(saved, blocks)

    def prefill(self, slots_T: Tensor, lengths: Sequence[int]) -> Attention:
        """Dense causal attention over packed prompts that also fills their slots."""
        return Prefill(self.pool, slots_T, lengths, None)

    def prefill_chunk(self, slots_T: Tensor, cached_slots_C: Tensor) -> Attention:
        """Dense causal attention of the next T tokens of a prompt whose first C are cached."""
        return PrefillChunk(self.pool, slots_T, cached_slots_C, None)

    def decode(self, block_table_BN: Tensor, lengths_B: Tensor) -> Attention:
        """Attention of one token per row over its whole cache."""
        return self.attention(self.pool, self.block_size, block_table_BN, lengths_B, None)

    def training(self, lengths: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Attention:
        """Plain causal attention."""
        return PackedCausal(lengths, device)

    def check(
        self, model: str, temperature: float, estimator: str, tau: float | None = None, adapter: str | None = None
    ) -> list[str]:
        """Nothing to compare: dense attention has no schedule."""
        return []

    def pages_read(self, cached_length: Tensor) -> Tensor:
        """All pages."""
        return -(-cached_length // self.page_size)

    def tokens_read(self, cached_length: Tensor, num_layers: int) -> Tensor:
        """KV entries over all layers; same shape, fp32."""
        return cached_length.float() * num_layers


class SparseKVCache:
    """Page-sparse decode: sink page, recent pages and the best of the rest within a budget that grows with length.

    The first `dense_layers` layers and the prompt's prefill are dense. Selection is per KV head, layer and token.

    Args:
        budget: total pages as a function of the cached length.
        selector: how pages are summarised and ranked; `HeadSoftmaxSelector` by default. The paper's schedules hold for
            `CentroidSelector`.
        page_size, block_size: tokens per page and per block; the paper's page is 16.
        sink_pages, recent_pages: always kept; the open page is the last of the recent ones.
        dense_layers: layers below this attend to everything.
        backend: `gather` (any device), `triton` and `flex` (FlexAttention; CUDA), `auto` picks by device.
    """

    def __init__(
        self,
        budget: BudgetSchedule,
        selector: Selector | None = None,
        page_size: int = 16,
        block_size: int = 128,
        sink_pages: int = 1,
        recent_pages: int = 2,
        dense_layers: int = 2,
        backend: Backend = "auto",
    ) -> None:
        ranks = HeadSoftmaxSelector() if selector is None else selector
        _check_sizes(page_size, block_size)
        _check_reserved(budget, sink_pages, recent_pages)
        _check_landmarks(ranks, page_size)
        self.page_size, self.block_size, self.backend = page_size, block_size, backend
        self.budget: BudgetSchedule | None = budget
        self.pattern = SparsePattern(budget, ranks, page_size, sink_pages, recent_pages, dense_layers)

    def allocate(self, config: DecoderConfig, num_blocks: int, device: torch.device, dtype: torch.dtype) -> None:
        """Makes the pool of `num_blocks` blocks (and the null block), with landmarks for the sparse layers."""
        self.attention = decode_attention(self.backend, device, dtype, self.page_size, config.head_dim)
        sparse = range(self.pattern.dense_layers, config.num_layers)
        selector, landmark_dtype = self.pattern.selector, self._landmark_dtype(dtype)
        _check_eight_bits(landmark_dtype, device)
        self.pool = PagePool(
            config, num_blocks, self.block_size, self.page_size, selector.landmarks_per_page, sparse, device, dtype,
            landmark_dtype,
        )  # fmt: skip

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a decode step."""
        return self.attention is not GatherDecode

    def bytes_per_token(self, config: DecoderConfig, dtype: torch.dtype) -> int:
        """Keys and values of all layers, and the sparse ones' landmarks, rounded up."""
        sparse = max(config.num_layers - self.pattern.dense_layers, 0)
        marks = sparse * self.pattern.selector.landmarks_per_page * _key_bytes(config, self._landmark_dtype(dtype))
        return config.num_layers * _key_bytes(config, dtype) * 2 + -(-marks // self.page_size)

    def release(self) -> None:
        """Drops pages and landmarks."""
        del self.pool

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block of every layer, landmarks included."""
        self.pool.copy_block(source, target)

    def swap_out(self, blocks: list[int]) -> Any:
        """Copies of blocks of every layer, landmarks included, on the host."""
        return self.pool.swap_out(blocks)

    def swap_in(self, saved: Any, blocks: list[int]) -> None:
        """Puts them back, into any blocks."""
        self.pool.swap_in(saved, blocks)

    def prefill(self, slots_T: Tensor, lengths: Sequence[int]) -> Attention:
        """Dense causal attention over packed prompts that also fills their slots and landmarks."""
        return Prefill(self.pool, slots_T, lengths, self.pattern.selector)

    def prefill_chunk(self, slots_T: Tensor, cached_slots_C: Tensor) -> Attention:
        """Dense causal attention of the next T tokens of a prompt whose first C are cached; fills landmarks too."""
        return PrefillChunk(self.pool, slots_T, cached_slots_C, self.pattern.selector)

    def decode(self, block_table_BN: Tensor, lengths_B: Tensor) -> Attention:
        """Attention of one token per row: dense in the first layers, over the selected pages in the others."""
        return self.attention(self.pool, self.block_size, block_table_BN, lengths_B, self.pattern)

    def training(self, lengths: Sequence[int], prompt_lengths: Sequence[int], device: torch.device) -> Attention:
        """The sparsity of decode for whole sequences, differentiable."""
        return SparseAttention(lengths, prompt_lengths, self.pattern, device)

    def settings(
        self, model: str, temperature: float, estimator: str, tau: float | None = None, adapter: str | None = None
    ) -> RunSettings:
        """All that the P5 of its budget depends on in a run of this model."""
        rule = self.pattern
        return RunSettings(
            model=model,
            page_size=rule.page_size,
            selector=_selector_name(rule.selector),
            sink_pages=rule.sink_pages,
            recent_pages=rule.recent_pages,
            dense_layers=rule.dense_layers,
            temperature=float(temperature),
            estimator=estimator,
            tau=tau,
            architecture=architecture(Path(model)),
            weights=fingerprint(Path(model)),
            adapter=adapter,
        )

    def check(
        self, model: str, temperature: float, estimator: str, tau: float | None = None, adapter: str | None = None
    ) -> list[str]:
        """What the schedule was calibrated for against this run: see `sparrow.components.budget.StepSchedule.check`."""
        return self.pattern.budget.check(self.settings(model, temperature, estimator, tau, adapter))

    def pages_read(self, cached_length: Tensor) -> Tensor:
        """The budget, or all pages where the sequence has no more."""
        return torch.minimum(self.pattern.budget.pages(cached_length), -(-cached_length // self.page_size))

    @property
    def landmark_size(self) -> float:
        """Of one landmark, in keys of 16 bits."""
        return self._landmark_dtype(torch.bfloat16).itemsize / torch.bfloat16.itemsize

    def _landmark_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the selector makes of keys of this dtype."""
        return _landmarks_of_zeros(self.pattern.selector, self.page_size, dtype).dtype

    def tokens_read(self, cached_length: Tensor, num_layers: int) -> Tensor:
        """KV entries over all layers; same shape, fp32. A landmark of a key's 16 bits is half an entry."""
        dense = min(self.pattern.dense_layers, num_layers)
        pages = -(-cached_length // self.page_size)
        kept = torch.minimum(self.pages_read(cached_length) * self.page_size, cached_length).float()
        landmarks = pages * self.pattern.selector.landmarks_per_page * self.landmark_size / 2
        scored = torch.where(self.pattern.budget.pages(cached_length) < pages, landmarks, 0.0)
        return dense * cached_length.float() + (num_layers - dense) * (kept + scored)
