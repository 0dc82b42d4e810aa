"""What a rollout costs: FLOPs, elements moved, and the seconds that two rates of a machine make of them.

The paper's cost model (arXiv 2606.08446, eFLOPs = FLOPs + I * elements moved) with what its printed form leaves out:
weights are read once a step and shared by its rows; the first layers are dense; a sequence within its budget is read
whole and scores nothing; the budget is summed over the schedule; attention is 4 r D FLOPs per cached token, not 2; the
landmarks of the prompt count per page too; a group-mean score needs no r. Activations, logits, norms, page lists and
the writing of new keys are left out, as in `tools/rollout_shapes.py`.

Axes: L cached lengths, S sequences, R numbers of rows. A cached length counts the token that is decoded.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rates import Rates


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """How a decode step reads its KV cache.

    Attributes:
        pages: total pages that a sparse layer may read at each cached length; None where all layers are dense.
        page_size: tokens per page.
        dense_layers: layers below this read everything.
        landmarks_per_page: vectors that are read to rank one page.
        landmark_size: of one of them, in keys; .5 where it has half the bits.
        scores_per_head: every query head ranks for itself, instead of the group's mean query.
    """

    pages: Callable[[Tensor], Tensor] | None = None
    page_size: int = 16
    dense_layers: int = 2
    landmarks_per_page: int = 1
    landmark_size: float = 1.0
    scores_per_head: bool = False


@dataclass(frozen=True)
class TokenCost:
    """One decoded token at each cached length, over all layers, fp64; the projections are not in it."""

    attention_flop_L: Tensor
    scoring_flop_L: Tensor
    kv_elements_L: Tensor
    landmark_elements_L: Tensor

    def seconds_L(self, rates: Rates) -> Tensor:
        """Attention and scoring, each as slow as its slower rate."""
        attention_L = rates.seconds(self.attention_flop_L, self.kv_elements_L)
        return attention_L + rates.seconds(self.scoring_flop_L, self.landmark_elements_L)


@dataclass(frozen=True)
class Work:
    """What is generated: S sequences, decoded by at most `rows` at once in the order given.

    Attributes:
        prompts_S, responses_S: tokens, int64.
        rows: a sequence that ends hands its row to the next one.
        samples: sequences that share the prefill of their prompt.

    Raises:
        UserError: a size below 1.
    """

    prompts_S: Tensor
    responses_S: Tensor
    rows: int
    samples: int = 1

    def __post_init__(self) -> None:
        smallest = min(int(self.prompts_S.min()), int(self.responses_S.min()), self.rows, self.samples)
        if smallest < 1:
            raise UserError(f"work: prompts, responses, rows and samples must be at least 1, not {smallest}")

    def tokens_L(self) -> Tensor:
        """Tokens decoded at each cached length from 0 on, fp64. The first of a response comes from its prefill."""
        first_S, end_S = self.prompts_S + 1, self.prompts_S + self.responses_S
        change_L = torch.zeros(int(end_S.max()) + 1, dtype=torch.float64)
        change_L.index_add_(0, first_S, torch.ones_like(first_S, dtype=torch.float64))
        change_L.index_add_(0, end_S, -torch.ones_like(end_S, dtype=torch.float64))
        return change_L.cumsum(0)[:-1]

    def steps_R(self) -> Tensor:
        """Decode steps that have 0, 1, ... `rows` rows, fp64."""
        starts, ends, free = [], [], [0] * self.rows
        for steps in (self.responses_S - 1).tolist():
            start = heapq.heappop(free)
            heapq.heappush(free, start + steps)
            starts.append(start)
            ends.append(start + steps)
        change_T = torch.zeros(max(ends) + 1, dtype=torch.int64)
        change_T.index_add_(0, torch.tensor(starts), torch.ones(len(starts), dtype=torch.int64))
        change_T.index_add_(0, torch.tensor(ends), -torch.ones(len(ends), dtype=torch.int64))
        return change_T.cumsum(0)[:-1].bincount(minlength=self.rows + 1).double()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of some decode steps and prefills. Elements are numbers of the rollout's dtype; `steps_R` as in `Work`."""

    layers: int
    sparse_layers: int

    linear_flop: float
    attention_flop: float
    scoring_flop: float
    prefill_flop: float
    weight_elements: float
    kv_elements: float
    landmark_elements: float
    steps_R: Tensor

    @property
    def flop(self) -> float:
        return self.linear_flop + self.attention_flop + self.scoring_flop + self.prefill_flop

    @property
    def elements(self) -> float:
        return self.weight_elements + self.kv_elements + self.landmark_elements

    @property
    def selection_share(self) -> float:
        """Of the elements moved, those of landmarks, in elements of the keys' size."""
        return self.landmark_elements / self.elements if self.elements else 0.0

    def eflop(self, intensity: float) -> float:
        """The paper's measure: an element moved counts as `intensity` FLOPs."""
        return self.flop + intensity * self.elements

    def seconds(self, rates: Rates) -> float:
        """The roofline: kernels run one after another, each bound by the slower of its FLOPs and its bytes.

        Latencies come on top, where the rates have some.
        """
        steps, rows_R = float(self.steps_R.sum()), torch.arange(len(self.steps_R), dtype=torch.float64)
        row_steps = float((self.steps_R * rows_R).sum())
        seconds = rates.seconds(self.attention_flop, self.kv_elements) + self.prefill_flop / rates.flop_per_s
        seconds += rates.seconds(self.scoring_flop, self.landmark_elements)
        if steps:
            per_step_R = rates.seconds(self.linear_flop / row_steps * rows_R, self.weight_elements / steps)
            seconds += float((per_step_R * self.steps_R).sum())
        seconds += steps * (self.layers * rates.layer_us + self.sparse_layers * rates.selection_us) / 1e6
        return float(seconds)


def matmul_weights(model: DecoderConfig) -> int:
    """Elements of all projections and the head: what a step reads, and half the FLOPs of a token."""
    width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    per_layer = model.hidden_size * (width + model.num_heads * model.head_dim + 3 * model.intermediate_size)
    return model.num_layers * per_layer + model.vocab_size * model.hidden_size


def token_cost(model: DecoderConfig, cache: CacheShape, lengths_L: Tensor) -> TokenCost:
    """Attention over what is kept, and scoring of all pages where there are more than the budget."""
    length_L = lengths_L.double()
    pages_L = (length_L / cache.page_size).ceil()
    sparse = _sparse_layers(model, cache)
    if cache.pages is None:
        kept_L, scored_L = length_L, torch.zeros_like(length_L)
    else:
        budget_L = cache.pages(lengths_L).double()
        kept_L = torch.minimum(budget_L * cache.page_size, length_L)
        scored_L = torch.where(budget_L < pages_L, pages_L * cache.landmarks_per_page, 0.0)
    read_L = (model.num_layers - sparse) * length_L + sparse * kept_L
    queries = model.num_heads if cache.scores_per_head else model.num_kv_heads
    return TokenCost(
        attention_flop_L=4 * model.num_heads * model.head_dim * read_L,
        scoring_flop_L=2 * queries * model.head_dim * sparse * scored_L,
        kv_elements_L=2 * model.num_kv_heads * model.head_dim * read_L,
        landmark_elements_L=model.num_kv_heads * model.head_dim * sparse * scored_L * cache.landmark_size,
    )


def _sparse_layers(model: DecoderConfig, cache: CacheShape) -> int:
    return 0 if cache.pages is None else max(model.num_layers - cache.dense_layers, 0)


def decode_cost(model: DecoderConfig, cache: CacheShape, tokens_L: Tensor, steps_R: Tensor) -> Cost:
    """`tokens_L` tokens at the cached lengths 0, 1, ...; the weights are read once for each step."""
    each = token_cost(model, cache, torch.arange(len(tokens_L)))
    weights = matmul_weights(model)
    return Cost(
        layers=model.num_layers,
        sparse_layers=_sparse_layers(model, cache),
        linear_flop=2.0 * weights * float(tokens_L.sum()),
        attention_flop=float(tokens_L @ each.attention_flop_L),
        scoring_flop=float(tokens_L @ each.scoring_flop_L),
        prefill_flop=0.0,
        weight_elements=weights * float(steps_R[1:].sum()),
        kv_elements=float(tokens_L @ each.kv_elements_L),
        landmark_elements=float(tokens_L @ each.landmark_elements_L),
        steps_R=steps_R,
    )


def step_cost(model: DecoderConfig, cache: CacheShape, length: int, rows: int) -> Cost:
    """One decode step of `rows` sequences of one cached length."""
    tokens_L, steps_R = torch.zeros(length + 1, dtype=torch.float64), torch.zeros(rows + 1, dtype=torch.float64)
    tokens_L[length], steps_R[rows] = rows, 1
    return decode_cost(model, cache, tokens_L, steps_R)


def rollout_cost(model: DecoderConfig, cache: CacheShape, work: Work) -> Cost:
    """A whole batch of rollouts, the dense prefill of its prompts included."""
    decoding = decode_cost(model, cache, work.tokens_L(), work.steps_R())
    return Cost(**{**vars(decoding), "prefill_flop": prefill_flop(model, work)})


def prefill_flop(model: DecoderConfig, work: Work) -> float:
    """Projections of each prompt, once for its samples; causal attention; the head for the last token alone."""
    prompts_S = work.prompts_S.double()
    head = model.vocab_size * model.hidden_size
    linear_S = 2 * (matmul_weights(model) - head) * prompts_S + 2 * head
    attention_S = 4 * model.num_layers * model.num_heads * model.head_dim * prompts_S * (prompts_S + 1) / 2
    return float((linear_S + attention_S).sum() / work.samples)


def printed_speedup(
    model: DecoderConfig, parameters: float, prompt: int, response: int, budget: float, intensity: float
) -> float:
    """Dense over sparse eFLOPs by the formulas as the paper prints them, for one sequence.

    Args:
        parameters: P, which the paper counts as FLOPs only.
        budget: B in tokens, one number for the whole response.
        intensity: I, FLOPs per element moved; the paper does not give it.
    """
    width = model.num_layers * model.num_kv_heads * model.head_dim
    per_head, page = model.num_heads / model.num_kv_heads, 16
    reads = (2 * prompt + response) * response * width
    dense = 2 * parameters * response + (per_head + intensity) * reads
    scoring = (per_head + intensity) * width * (2 * prompt + response / page) * response / 2
    sparse = 2 * parameters * response + 2 * (per_head + intensity) * width * budget * response + scoring
    return dense / sparse
