"""One benchmark as it is run: its examples checked and encoded, and the samples of a window of them.

Axes: S sequences of this rank, T their response tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sparrow import registry
from sparrow.components.data import Example, PromptData, notes_of
from sparrow.components.reward import ChecksGold, NamedReward
from sparrow.components.tables import may_be_of_hub
from sparrow.engine.blocks import BlockAllocator
from sparrow.engine.engine import EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.engine.scheduler import Scheduler
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.tokenizer import Tokenizer
from sparrow.protocols import KVCache
from sparrow.recipes.eval_config import Benchmark
from sparrow.recipes.evaluate import Judged, encode_prompt
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed

_SHOWN_DROPPED = 5


@dataclass
class Task:
    """A benchmark with its examples; a `PromptData` of those that are left.

    Attributes:
        settings: the benchmark with what it inherits filled in.
        reward: as `named_rewards` gives it.
        examples: those whose gold answer can be used.
        ids: of each example: its column `id`, else its number.
        dropped: id and reason of the others.
        notes: what the data set itself left out.
        encoded: prompts of the examples, once `encode` was called.
    """

    settings: Benchmark
    reward: list[NamedReward]
    examples: list[Example]
    ids: list[str]
    dropped: dict[str, str]
    notes: list[str] = field(default_factory=list)
    encoded: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def sampling(self) -> SamplingParams:
        assert self.settings.sampling is not None
        return self.settings.sampling

    @property
    def size(self) -> int:
        return len(self.examples)

    def example(self, index: int) -> Example:
        return self.examples[index]

    def engine(self, engine: EngineConfig) -> EngineConfig:
        """The engine's limits for it."""
        assert self.settings.max_new_tokens is not None
        return replace(engine, max_new_tokens=self.settings.max_new_tokens)

    def encode(self, tokenizer: Tokenizer) -> None:
        """Fills `encoded`."""
        thinking = self.settings.enable_thinking
        with _named(self.name):
            self.encoded = [encode_prompt(tokenizer, example.prompt, thinking) for example in self.examples]

    def check_fits(self, config: DecoderConfig, engine: EngineConfig, cache: KVCache) -> None:
        """UserError where a prompt and its longest response fit neither the model nor the pool; before any work."""
        limits = self.engine(engine)
        room = config.max_position_embeddings - limits.max_new_tokens
        longest = max(range(self.size), key=lambda index: len(self.encoded[index]))
        if len(self.encoded[longest]) > room:
            raise UserError(
                f"benchmark {self.name}: prompt {self.ids[longest]} has {len(self.encoded[longest])} tokens; "
                f"max_position_embeddings {config.max_position_embeddings} minus max_new_tokens "
                f"{limits.max_new_tokens} leaves room for {room}"
            )
        blocks = BlockAllocator(limits.kv_tokens // cache.block_size)
        with _named(self.name):
            Scheduler(self.encoded, 1, 1, limits.max_new_tokens, blocks, cache.block_size)

    def description(self) -> dict[str, Any]:
        """How it was run, for results.json."""
        settings = self.settings
        return {
            "prompts": self.size,
            "num_samples": settings.num_samples,
            "dropped": self.dropped,
            "sampling": asdict(self.sampling),
            "enable_thinking": settings.enable_thinking,
            "max_new_tokens": settings.max_new_tokens,
        }

    def fingerprint(self) -> str:
        """A hash of the encoded prompts and the columns: another data file is another evaluation."""
        digest = hashlib.sha256()
        for id_, ids, example in zip(self.ids, self.encoded, self.examples, strict=True):
            columns = {name: self._as_json(id_, name, value) for name, value in sorted(example.columns.items())}
            digest.update(f"{json.dumps(id_)} {ids} {columns}\n".encode())
        return digest.hexdigest()[:16]

    def _as_json(self, id_: str, column: str, value: Any) -> str:
        """What has no such form has no hash either that another process would find again."""
        try:
            return json.dumps(value, sort_keys=True)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"column {column!r} of {id_} is not JSON ({str(error)[:80]})"
            raise UserError(f"benchmark {self.name}: {reason}; leave it out with data.columns") from error

    def rows(
        self, batch: RolloutBatch, judged: Sequence[Judged], mode: str, cache: KVCache, num_layers: int, decode: Any
    ) -> list[dict[str, Any]]:
        """The line of each of the S samples."""
        decoded_T = batch.response_position_T > 0  # the first token of a response comes from the prefill
        read_T = torch.where(decoded_T, cache.tokens_read(batch.cached_length_T, num_layers).double(), 0.0)
        dense_T = torch.where(decoded_T, batch.cached_length_T.double() * num_layers, 0.0)
        rows = []
        for s, one in enumerate(judged):
            at = batch.slice_of(s)
            pages = batch.pages_T[at][1:].double()
            rows.append(
                {
                    "benchmark": self.name,
                    "id": self.ids[one.number],
                    "sample": one.sample,
                    "mode": mode,
                    "prompt": decode(batch.prompts[s]),
                    "response": batch.texts[s],
                    "prompt_tokens": len(batch.prompts[s]),
                    "tokens": one.tokens,
                    "reward": one.reward,
                    "answer": one.answer,
                    "terminated": one.terminated,
                    "mean_pages": float(pages.mean()) if len(pages) else None,
                    "kv_read": float(read_T[at].sum()),
                    "kv_dense": float(dense_T[at].sum()),
                    "number": one.number,
                }
            )
        return rows


class _named:
    """Puts the benchmark's name before what is wrong with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError):
            raise UserError(f"benchmark {self.name}: {error}") from error


def load_task(benchmark: Benchmark, reward: list[NamedReward]) -> Task:
    """Reads the data and drops the examples whose gold answer the reward cannot use.

    Raises:
        UserError: naming the benchmark: a file that is missing, an endless data set without `prompts`, fewer examples
            than that, two of one id, or none that is left.
    """
    with _named(benchmark.name):
        _check_file(benchmark)
        data: PromptData = benchmark.data.build()
        count = _count(data, benchmark.prompts)
        examples = [data.example(index) for index in range(count)]
        given = [example.columns.get("id") for example in examples]
        ids = [str(index if id_ is None else id_) for index, id_ in enumerate(given)]
        if twice := next((id_ for id_, seen in _counted(ids).items() if seen > 1), None):
            raise UserError(f"two examples have the id {twice!r}")
        reasons = _problems(examples, reward)
        dropped = {id_: reason for id_, reason in zip(ids, reasons, strict=True) if reason is not None}
        kept = [index for index, reason in enumerate(reasons) if reason is None]
        if not kept:
            first, reason = next(iter(dropped.items()))
            raise UserError(f"no example has a gold answer that can be used; {first}: {reason}")
        return Task(benchmark, reward, [examples[i] for i in kept], [ids[i] for i in kept], dropped, notes_of(data))


def _check_file(benchmark: Benchmark) -> None:
    """Says how a file that is missing is made, where there is a config for it."""
    path = benchmark.data.kwargs.get("path")
    prepare = f"prepare/{benchmark.name}"
    if isinstance(path, str) and not Path(path).expanduser().exists() and not may_be_of_hub(path):
        made = any(config.name == prepare for config in registry.configs())
        hint = f"`tune run sparrow_prepare --config {prepare}` makes it" if made else "give data_dir or data.path"
        raise UserError(f"{path} does not exist; {hint}, ~benchmarks.N or only=[...] does without")


def _count(data: PromptData, prompts: int | None) -> int:
    if prompts is None:
        if data.size is None:
            raise UserError("prompts: must be given, as there is no end to the data")
        return data.size
    if data.size is not None and data.size < prompts:
        raise UserError(f"prompts: {prompts}, the data has {data.size}")
    return prompts


def _counted(ids: Sequence[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for id_ in ids:
        counts[id_] = counts.get(id_, 0) + 1
    return counts


def _problems(examples: Sequence[Example], reward: Sequence[NamedReward]) -> list[str | None]:
    """Asked on rank 0 only: another verdict on another rank would give it other prompts under the same numbers."""
    columns = {name: [example.columns.get(name) for example in examples] for name in examples[0].columns}
    columns["prompts"] = [example.prompt for example in examples]
    for name, _, function in reward:
        if isinstance(function, ChecksGold):
            found = list(function.problems(columns)) if distributed.rank() == 0 else []
            reasons: list[str | None] = distributed.gather_objects(found)[0]
            if len(reasons) != len(examples):
                raise UserError(f"reward {name!r}: problems() gave {len(reasons)} values for {len(examples)} examples")
            return reasons
    return [None] * len(examples)


def plan_lines(task: Task, seed: int, modes: Sequence[str], decode: Callable[[list[int]], str]) -> list[str]:
    """What is about to be run, and what goes wrong most often: the prompt as the model sees it, the sampling."""
    settings, first = task.settings, task.encoded[0]
    lines = [
        f"benchmark {task.name}: {task.size} prompts x {settings.num_samples} samples, {' and '.join(modes)}, "
        f"seed {seed}",
        f"  {task.sampling}, enable_thinking {settings.enable_thinking}, max_new_tokens {settings.max_new_tokens}",
        f"  first prompt, {len(first)} tokens: {decode(first)!r}",
    ]
    if settings.reference:
        lines.append(f"  reference: {' '.join(settings.reference.split())}")
    if task.dropped:
        shown = "; ".join(f"{id_}: {reason}" for id_, reason in list(task.dropped.items())[:_SHOWN_DROPPED])
        lines.append(f"  dropped {len(task.dropped)} examples whose gold answer cannot be used: {shown}")
    return lines
