"""Rollouts on disk: what the engine returned in a step, and a stand-in for the engine that returns it again.

    rollouts/step_000004/rank_000.safetensors    tensors of the batch that process 0 generated
                         rank_000.json           the numbers of its prompts, and how they were sampled
                         rank_000.jsonl          the same to read: a line for each response

A step is written to `step_000004.tmp` and renamed when every process is done. The file of a process is of no meaning
for its reader: a replay finds each prompt by its number, on any number of processes.

Axes: S sequences, T response tokens, P prompt tokens of all prompts (one after the other), G prompts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparrow.engine.generation import EngineStats
from sparrow.engine.sampler import SamplingParams
from sparrow.errors import UserError
from sparrow.protocols import KVCache
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.distributed import SharedQueue

FORMAT = 1
_OF_SEQUENCES = ("lengths_S", "terminated_S", "versions_S")
_OF_TOKENS = ("tokens_T", "logprobs_T", "top_ids_TK", "top_logprobs_TK", "pages_T", "hidden_TE")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What rollouts must have in common with the run that learns from them.

    Attributes:
        model: architecture of the checkpoint, in words.
        num_samples: of each prompt.
        sampling: the distribution that `logprobs_T` is of.
        top_k: size of the top-k set.
    """

    model: str | None
    num_samples: int
    sampling: SamplingParams
    top_k: int


def dump_rollouts(
    directory: Path,
    step: int,
    batch: RolloutBatch,
    numbers: Sequence[int],
    origin: Origin,
    stats: EngineStats,
    beside: Callable[[Path], None],
) -> None:
    """Writes this rank's batch; all ranks call it together. A dump of the same step is replaced.

    Args:
        directory: holds the dumps of all steps; all ranks see the same one.
        step: number of the step that learns from the batch, from 1.
        batch: as the engine returned it, with columns and texts.
        numbers: of its prompts in the stream of the data set.
        stats: of the call that generated it.
        beside: writes what else belongs into the folder, once.
    """
    final = directory / f"step_{step:06d}"
    temporary = final.with_suffix(".tmp")
    if distributed.rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        beside(temporary)
    distributed.barrier()
    name = f"rank_{distributed.rank():03d}"
    save_file(_tensors(batch), temporary / f"{name}.safetensors")
    _write_lines(temporary / f"{name}.jsonl", _readable(batch, numbers))
    _write_lines(temporary / f"{name}.json", [_description(numbers, origin, stats)])
    # safetensors makes its files readable by their owner only, whatever the umask.
    shutil.copymode(temporary / f"{name}.json", temporary / f"{name}.safetensors")
    distributed.barrier()
    if distributed.rank() == 0:
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)


def _tensors(batch: RolloutBatch) -> dict[str, Tensor]:
    named = {name: getattr(batch, name) for name in (*_OF_SEQUENCES, *_OF_TOKENS)}
    prompts = [batch.prompts[s] for s in (batch.samples_S == 0).nonzero().flatten().tolist()]
    named["prompt_lengths_G"] = torch.tensor([len(prompt) for prompt in prompts])
    named["prompts_P"] = torch.tensor([token for prompt in prompts for token in prompt])
    return {name: tensor.contiguous() for name, tensor in named.items() if tensor is not None}


def _description(numbers: Sequence[int], origin: Origin, stats: EngineStats) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "world_size": distributed.world_size(),
        "prompt_numbers": list(numbers),
        "preemptions": stats.preemptions,
        "origin": asdict(origin),
    }


def _readable(batch: RolloutBatch, numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    sequences = zip(batch.groups_S.tolist(), batch.samples_S.tolist(), batch.texts, strict=True)
    for s, (group, sample, text) in enumerate(sequences):
        row = {"prompt_number": numbers[group], "sample": sample, "tokens": int(batch.lengths_S[s])}
        yield row | {"terminated": bool(batch.terminated_S[s]), "response": text, "columns": batch.columns[group]}


def _write_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    file.write_text("".join(lines), encoding="utf-8")


class Replay:
    """Stands in the engine's place and returns dumped rollouts; it has no weights, and no KV pool is made.

    Args:
        directory: `rollouts` of the run that dumped them.
        cache: that of the config, for what the metrics say of the budget.
        origin: of the present run; a dump of another is refused.

    Attributes:
        version: of the weights, as the engine counts: step `version + 1` comes next.
        stats: of the last `generate`.
    """

    def __init__(self, directory: Path, cache: KVCache, origin: Origin) -> None:
        self.directory, self.cache, self.origin = directory, cache, origin
        self.version = 0
        self.stats = EngineStats()

    def check(self, first: int, last: int) -> Path:
        """The folder of the first step; UserError unless each of these steps has an intact dump of a like run."""
        if not self.directory.is_dir():
            raise UserError(f"replay: {self.directory} is not a folder; it is `rollouts` of a run with dump_rollouts")
        for step in range(first, last + 1):
            for file in self._files(step):
                file.check(self.origin)
        return self._folder(first)

    def generate(
        self,
        prompts: Sequence[list[int]],
        num_samples: int,
        sampling: SamplingParams,
        prompt_numbers: Sequence[int],
        keep_hidden: bool = False,
        on_step: Callable[[int, int], None] | None = None,
        queue: SharedQueue | None = None,
    ) -> RolloutBatch:
        """The rollouts of these prompts that the dump of the step holds, in the order of `prompts`.

        Args:
            queue: deals the prompts out to several processes, an equal share to each.

        Raises:
            UserError: a prompt is not in the dump, or another one; or hidden states are wanted and were not kept.
        """
        files = self._files(self.version + 1)
        groups = []
        if queue is not None:
            mine = sorted(iter(queue.deal(), None))
            prompts, prompt_numbers = [prompts[i] for i in mine], [prompt_numbers[i] for i in mine]
        for number, prompt in zip(prompt_numbers, prompts, strict=True):
            file = next((file for file in files if number in file.numbers), None)
            if file is None:
                raise UserError(f"replay: {files[0].path.parent} has no rollouts of prompt {number} of the data")
            groups.append(file.group(number, prompt, keep_hidden))
        # The metric is a sum over the ranks, which need not be those of the dump.
        self.stats = EngineStats(preemptions=sum(f.preemptions for f in files) if distributed.rank() == 0 else 0)
        return _batch(
            prompts, num_samples, prompt_numbers, {name: torch.cat([g[name] for g in groups]) for name in groups[0]}
        )

    def sync(self) -> None:
        """The step is done."""
        self.version += 1

    def sleep(self) -> None:
        """There is nothing to release."""

    def _folder(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}"

    def _files(self, step: int) -> list[_Dumped]:
        """The files of all ranks that generated the step."""
        folder = self._folder(step)
        if not folder.is_dir():
            there = sorted(path.name for path in self.directory.glob("step_*") if path.suffix != ".tmp")
            found = f"there are {there[0]} to {there[-1]}" if there else "there is no dump"
            raise UserError(f"replay: {folder} does not exist; {found}")
        first = _Dumped(folder / "rank_000.json")
        return [first, *(_Dumped(folder / f"rank_{rank:03d}.json") for rank in range(1, first.world_size))]


class _Dumped:
    """The two files of one rank, checked against each other; the tensors of a prompt are read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.tensors = path, path.with_suffix(".safetensors")
        try:
            description = json.loads(path.read_text(encoding="utf-8"))
            if description["format"] != FORMAT:
                raise UserError(f"replay: {path} has format {description['format']}, this version reads {FORMAT}")
            self.world_size, self.preemptions = int(description["world_size"]), int(description["preemptions"])
            self.numbers: list[int] = list(description["prompt_numbers"])
            self.origin: dict[str, Any] = dict(description["origin"])
            self.num_samples = int(self.origin["num_samples"])
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"replay: {path} is no dump, or a damaged one: {error!r}") from None
        with self._open() as file:
            self._check_shapes(file)

    def check(self, origin: Origin) -> None:
        """UserError where the rollouts come from a run unlike this one."""
        ours = json.loads(json.dumps(asdict(origin)))
        for key, value in ours.items():
            if self.origin.get(key) != value:
                raise UserError(f"replay: {self.path}: {key} is {self.origin.get(key)} there and {value} in this run")

    def group(self, number: int, prompt: list[int], keep_hidden: bool) -> dict[str, Tensor]:
        """The tensors of one prompt's sequences."""
        index = self.numbers.index(number)
        S = slice(index * self.num_samples, (index + 1) * self.num_samples)
        with self._open() as file:
            lengths_G = file.get_tensor("prompt_lengths_G")
            P = slice(int(lengths_G[:index].sum()), int(lengths_G[: index + 1].sum()))
            if file.get_slice("prompts_P")[P].tolist() != prompt:
                raise UserError(f"replay: {self.tensors}: prompt {number} is not that of this run's data and tokenizer")
            lengths_S = file.get_tensor("lengths_S")
            T = slice(int(lengths_S[: S.start].sum()), int(lengths_S[: S.stop].sum()))
            if keep_hidden and "hidden_TE" not in file.keys():  # noqa: SIM118 (not a mapping)
                raise UserError(
                    f"replay: {self.tensors} has no hidden states; acceptance.estimator=top_k does without them"
                )
            names = [name for name in _OF_TOKENS if keep_hidden or name != "hidden_TE"]
            return {name: file.get_slice(name)[S] for name in _OF_SEQUENCES} | {
                name: file.get_slice(name)[T] for name in names
            }

    def _open(self) -> Any:
        try:
            return safe_open(self.tensors, framework="pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"replay: {self.tensors} is missing, truncated or no safetensors file: {error}") from None

    def _check_shapes(self, file: Any) -> None:
        """That the tensors are those of the sequences and tokens they claim to be."""
        names = set(file.keys())
        required = {*_OF_SEQUENCES, *_OF_TOKENS, "prompt_lengths_G", "prompts_P"} - {"hidden_TE"}
        if missing := sorted(required - names):
            raise UserError(f"replay: {self.tensors} lacks {', '.join(missing)}")
        tokens, prompts = int(file.get_tensor("lengths_S").sum()), len(self.numbers)
        sizes = dict.fromkeys(_OF_SEQUENCES, prompts * self.num_samples) | dict.fromkeys(_OF_TOKENS, tokens)
        sizes |= {"prompt_lengths_G": prompts, "prompts_P": int(file.get_tensor("prompt_lengths_G").sum())}
        for name in names & sizes.keys():
            found = file.get_slice(name).get_shape()[0]
            if found != sizes[name]:
                raise UserError(f"replay: {self.tensors}: {name} has {found} rows, {self.path.name} says {sizes[name]}")


def _batch(
    prompts: Sequence[list[int]], num_samples: int, numbers: Sequence[int], tensors: dict[str, Any]
) -> RolloutBatch:
    return RolloutBatch(
        prompts=[prompt for prompt in prompts for _ in range(num_samples)],
        groups_S=torch.arange(len(prompts)).repeat_interleave(num_samples),
        samples_S=torch.arange(num_samples).repeat(len(prompts)),
        numbers_S=torch.tensor(numbers).repeat_interleave(num_samples),
        **tensors,
    )
