"""Mode `rl` of the training benchmark: a whole RL step, dense and sparse, from measured makespans and sampled training.

The sequences of the queue that `bench_rollout.py makespan` measured are packed as the recipe packs them. Of the
micro-batches, sorted by their FLOPs, a few are run: the middle one of each of so many equal parts. All of them take

  seconds(all) = seconds(run) / FLOPs(run) x FLOPs(all)

for each part of the training half with that part's own FLOPs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from random_trainer import compute_dtype, random_trainer
from rollout_shapes import model_config
from training_parts import MicroTimer, PartSeconds, time_optimizer, time_summary
from training_step import OPTIMIZERS, TrainingOptions

from sparrow.components.acceptance import DEFAULT_TAU
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rates import measure_flop_per_s
from sparrow.recipes.grpo_minibatches import packed
from sparrow.rollout import RolloutBatch
from sparrow.training.flops import UPDATE_FORWARDS, forward_flop
from sparrow.training.layers import prepare_layers
from sparrow.training.packing import MicroBatch

ESTIMATORS = tuple(DEFAULT_TAU)
NEEDED = ("cache", "backend", "makespan_s", "prompt_lengths", "response_lengths")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RLOptions(TrainingOptions):
    """What mode `rl` measures.

    Attributes:
        samples: micro-batches that are run.
        sync_s: seconds of the weight sync, as `bench_sync.py` measured them.
    """

    micro_batch_tokens: int
    samples: int
    top_k: int
    optimizer: str
    sync_s: float


@dataclass(frozen=True)
class TrainingHalf:
    """Seconds of a step's training half, all micro-batches.

    Attributes:
        parts: of all micro-batches.
        summary: by estimator, what the acceptance rates of all tokens are summed up in.
    """

    parts: PartSeconds
    optimizer: float
    summary: dict[str, float]

    def metric(self, estimator: str) -> float:
        """Beyond the dense pass, which has its top-k set either way."""
        exact = self.parts.exact if estimator == "exact" else 0.0
        return self.parts.rates + exact + self.summary[estimator]

    def seconds(self, estimator: str) -> float:
        return self.parts.score + self.metric(estimator) + self.parts.update + self.optimizer

    def metric_adds(self, estimator: str) -> float:
        """The metric's seconds, the top-k set among them, over those of all else."""
        metric = self.metric(estimator) + self.parts.top_k
        return metric / (self.seconds(estimator) - metric)


def measure_rl(rollouts: Path, options: RLOptions, device: torch.device) -> dict[str, Any]:
    """The parts of the training half, and the step with each sparse cache of the file beside the dense one."""
    rows, config = read_rollouts(rollouts, options.model), model_config(options.model)
    flop_per_s = measure_flop_per_s(device)
    batch = random_batch(rows[0]["prompt_lengths"], rows[0]["response_lengths"], config.vocab_size)
    micros = packed(batch, torch.ones(batch.num_sequences, dtype=torch.bool), options.micro_batch_tokens, device)
    micros.sort(key=lambda micro: _update_flop(config, micro))
    half, sampled = _run_samples(options, config, micros, batch, device)
    flop = sum(_update_flop(config, micro) for micro in micros)
    return {
        **vars(options), "rollouts": str(rollouts), "sequences": batch.num_sequences,
        "tokens": sum(sum(micro.lengths) for micro in micros), "scored_tokens": batch.num_tokens,
        "micro_batches": len(micros), "sampled": sampled, "forward_flop": flop, "flop_per_s": flop_per_s,
        **figures(half, flop, flop_per_s), "steps": rl_steps(rows, half, options.sync_s),
    }  # fmt: skip


def figures(half: TrainingHalf, flop: float, flop_per_s: float) -> dict[str, Any]:
    """Seconds and utilisation of the training half; the metric is no part of the latter."""
    parts = half.parts
    return {
        "parts": asdict(parts), "score_s": parts.score, "update_s": parts.update, "optimizer_s": half.optimizer,
        "summary_s": half.summary, "metric_s": {name: half.metric(name) for name in ESTIMATORS},
        "metric_adds": {name: half.metric_adds(name) for name in ESTIMATORS},
        "score_mfu": flop / parts.score / flop_per_s, "update_mfu": UPDATE_FORWARDS * flop / parts.update / flop_per_s,
        "mfu": (1 + UPDATE_FORWARDS) * flop / (parts.score + parts.update) / flop_per_s,
    }  # fmt: skip


def rl_steps(rows: Sequence[Row], half: TrainingHalf, sync_s: float) -> list[dict[str, Any]]:
    """For each sparse cache and estimator; the recipe computes the metric with a dense cache as well."""
    dense = {row["backend"]: row["makespan_s"] for row in rows if row["cache"] == "dense"}
    steps = []
    for row in (row for row in rows if row["cache"] != "dense"):
        for estimator in ESTIMATORS:
            rest = sync_s + half.seconds(estimator)
            dense_s, sparse_s = dense[row["backend"]] + rest, row["makespan_s"] + rest
            steps.append(
                {
                    "cache": row["cache"], "backend": row["backend"], "estimator": estimator,
                    "dense_rollout_s": dense[row["backend"]], "sparse_rollout_s": row["makespan_s"],
                    "training_s": half.seconds(estimator), "dense_step_s": dense_s, "sparse_step_s": sparse_s,
                    "over_dense": dense_s / sparse_s, "rollout_share_of_dense": dense[row["backend"]] / dense_s,
                }
            )  # fmt: skip
    return steps


def read_rollouts(path: Path, model: str) -> list[Row]:
    """Makespans of the model, of one queue: dense ones and sparse ones.

    Raises:
        UserError: not such a file, a part of it is missing, or queues differ.
    """
    try:
        rows = [row for row in json.loads(path.read_text())["results"] if row["model"] == model]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--rollouts {path}: not a JSON file of bench_rollout.py: {error!r}") from None
    for row in rows:
        if missing := [key for key in NEEDED if key not in row]:
            raise UserError(f"--rollouts {path}: a result lacks {', '.join(missing)}; run mode makespan again")
    if any(row[key] != rows[0][key] for row in rows for key in ("prompt_lengths", "response_lengths")):
        raise UserError(f"--rollouts {path}: its makespans of {model} are of different queues; run all in one command")
    dense = {row["backend"] for row in rows if row["cache"] == "dense"}
    sparse = {row["backend"] for row in rows if row["cache"] != "dense"}
    if not sparse or not sparse <= dense:
        raise UserError(f"--rollouts {path}: has no dense and sparse makespans of {model} with the same backend")
    return rows


def random_batch(prompt_lengths: Sequence[int], response_lengths: Sequence[int], vocab: int) -> RolloutBatch:
    """What a rollout of these lengths returns, of random tokens, without what only the loss or the metric reads."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (n,), generator=generator).tolist() for n in prompt_lengths]
    num_samples, total = len(response_lengths) // len(prompts), sum(response_lengths)
    groups_S = torch.arange(len(prompts)).repeat_interleave(num_samples)
    nothing_T = torch.zeros(total)
    return RolloutBatch(
        prompts=[prompt for prompt in prompts for _ in range(num_samples)],
        groups_S=groups_S,
        samples_S=torch.arange(num_samples).repeat(len(prompts)),
        lengths_S=torch.tensor(response_lengths),
        tokens_T=torch.randint(vocab, (total,), generator=generator),
        logprobs_T=nothing_T,
        top_ids_TK=nothing_T.long()[:, None],
        top_logprobs_TK=nothing_T[:, None],
        pages_T=nothing_T.long(),
        terminated_S=torch.ones(len(response_lengths), dtype=torch.bool),
        versions_S=torch.zeros_like(groups_S),
        numbers_S=groups_S,
    )


def spread(count: int, samples: int) -> list[int]:
    """The middle of each of `samples` equal parts of a list; all of a shorter one."""
    samples = min(samples, count)
    return [(2 * part + 1) * count // (2 * samples) for part in range(samples)]


def extrapolate(
    config: DecoderConfig, micros: Sequence[MicroBatch], sampled: Sequence[int], parts: Sequence[PartSeconds]
) -> PartSeconds:
    """Of all micro-batches; what stands behind the layers, from log-prob to rates, goes by response tokens."""

    def flop(part: str, micro: MicroBatch) -> float:
        if part == "update":
            return _update_flop(config, micro)
        return forward_flop(config, micro.lengths, 0) if part == "forward" else len(micro.targets_N)

    totals = {}
    for name in (field.name for field in fields(PartSeconds)):
        run = sum(flop(name, micros[index]) for index in sampled)
        totals[name] = sum(getattr(part, name) for part in parts) / run * sum(flop(name, micro) for micro in micros)
    return PartSeconds(**totals)


def show_rl(result: dict[str, Any]) -> str:
    """A few lines."""
    r, top_k = result, f"top-{result['top_k']}"
    lines = [
        f"{r['model']}: {r['tokens']} tokens of {r['sequences']} sequences in {r['micro_batches']} micro-batches, "
        f"{len(r['sampled'])} of them run",
        f"  score     {r['score_s']:8.2f} s, MFU {r['score_mfu']:.1%}; {r['parts']['top_k']:.2f} s of it the {top_k}",
        f"  update    {r['update_s']:8.2f} s, MFU {r['update_mfu']:.1%}; of score and update {r['mfu']:.1%} of "
        f"{r['flop_per_s'] / 1e12:.0f} TFLOP/s (a large product's)",
        f"  optimizer {r['optimizer_s']:8.2f} s; sync {r['sync_s']:.2f} s, as given",
    ]
    for estimator, seconds in r["metric_s"].items():
        lines.append(
            f"  metric    {seconds:8.2f} s, {estimator}, {r['summary_s'][estimator]:.2f} s of it the summary; with "
            f"the {top_k} it adds {r['metric_adds'][estimator]:.1%} to the training half"
        )
    for step in r["steps"]:
        lines.append(
            f"  step, {step['cache']} {step['backend']}, {step['estimator']}: rollout {step['dense_rollout_s']:.1f} s "
            f"dense, {step['sparse_rollout_s']:.1f} s sparse; training {step['training_s']:.1f} s; step "
            f"{step['dense_step_s']:.1f} s dense, {step['sparse_step_s']:.1f} s sparse: {step['over_dense']:.2f} x; "
            f"rollout's share of the dense step {step['rollout_share_of_dense']:.1%}"
        )
    return "\n".join(lines)


def _run_samples(
    options: RLOptions, config: DecoderConfig, micros: Sequence[MicroBatch], batch: RolloutBatch, device: torch.device
) -> tuple[TrainingHalf, list[dict[str, Any]]]:
    """The training half, and what was run of it."""
    model = random_trainer(config, device, compute_dtype(device))
    prepare_layers(model, options.recompute, options.offload, options.compiled)
    optimizer = OPTIMIZERS[options.optimizer].build(model.named_parameters())
    timer = MicroTimer(model, options.attention, options.chunk, options.top_k, device)
    sampled, parts = spread(len(micros), options.samples), []
    for index in sampled:
        parts.append(timer.measure(micros[index]))
        print(_sample_line(index, micros, parts[-1]), flush=True)
    summary = {name: time_summary(batch, name, options.top_k) for name in ESTIMATORS}
    half = TrainingHalf(extrapolate(config, micros, sampled, parts), time_optimizer(model, optimizer, device), summary)
    described = [
        {"index": i, "lengths": micros[i].lengths, "forward_flop": _update_flop(config, micros[i]), **asdict(part)}
        for i, part in zip(sampled, parts, strict=True)
    ]
    return half, described


def _update_flop(config: DecoderConfig, micro: MicroBatch) -> float:
    """Of one forward; the update takes `UPDATE_FORWARDS` times as much."""
    return forward_flop(config, micro.lengths, len(micro.targets_N))


def _sample_line(index: int, micros: Sequence[MicroBatch], part: PartSeconds) -> str:
    lengths = micros[index].lengths
    return (
        f"micro-batch {index + 1} of {len(micros)} by FLOPs: {sum(lengths)} tokens in {len(lengths)} sequences, "
        f"score {part.score:.3f} s, update {part.update:.3f} s"
    )
