"""Evaluation: mean@k, maj@k and pass@k of a checkpoint on benchmarks, with dense or sparse rollouts, or both.

    tune run sparrow_eval --config eval_tiny

benchmarks -> prompts -> rollouts, window by window -> rewards and answers -> samples.jsonl -> results.json, tables.

What is sampled already is not sampled again: the same command goes on where an earlier one ended or was killed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from sparrow.components.data import Example
from sparrow.components.kv_cache import DenseKVCache, check_runs
from sparrow.components.reward import Closes, CountsOutcomes, NamedReward, named_rewards
from sparrow.config import Component, to_yaml
from sparrow.engine.engine import Engine
from sparrow.errors import Interrupted
from sparrow.launch import check_stop, run_recipe
from sparrow.models.checkpoint import load_decoder
from sparrow.models.decoder_config import read_config
from sparrow.models.identity import adapter_fingerprint, adapter_identity, fingerprint
from sparrow.models.merge import merge_adapter
from sparrow.models.tokenizer import tokenizer_of_model
from sparrow.protocols import AdaptiveBudget, KVCache
from sparrow.recipes.eval_benchmark import Task, load_task, plan_lines
from sparrow.recipes.eval_config import Benchmark, EvalConfig, Mode, check, check_windows, windows
from sparrow.recipes.eval_progress import SampleProgress
from sparrow.recipes.eval_report import joined, result_of, tables, tokens_per_second, write_results
from sparrow.recipes.eval_store import SampleStore
from sparrow.recipes.evaluate import encode_prompt, generate, gives_answers, judge, stop_between_tokens
from sparrow.recipes.grpo_report import decode_responses
from sparrow.recipes.sparrow_sft import ensure_warmup
from sparrow.training import distributed
from sparrow.training.device import resolve_device
from sparrow.training.run_state import resolve_resume


class SparrowEval:
    """Evaluates a checkpoint on benchmarks."""

    def __init__(self, cfg: EvalConfig) -> None:
        check(cfg)
        self.cfg = cfg
        self.output_dir = Path(cfg.output_dir)
        self.rewards: dict[str, list[NamedReward]] = {}
        self.stores: dict[tuple[str, Mode], SampleStore] = {}  # on rank 0

    # Setup

    def setup(self) -> None:
        """Every benchmark and the settings of earlier parts first, then the model."""
        cfg = self.cfg
        torch.manual_seed(cfg.seed)
        self.device = resolve_device(cfg.device, cfg.threads)
        self.tasks = [load_task(benchmark, self._reward(benchmark.reward)) for benchmark in cfg.chosen]
        self.caches = self._build_caches()
        if cfg.warmup is not None:
            ensure_warmup(cfg.warmup, Path(cfg.model))
        self.folder = model_folder(Path(cfg.model))
        self.tokenizer = tokenizer_of_model(self.folder)
        self._check_against_model()
        if distributed.rank() == 0:
            self._open_stores()
            self._print_plan()
        dtype = getattr(torch, cfg.dtype)
        self.model = load_decoder(self.folder, self.device, dtype).requires_grad_(False)
        if cfg.adapter is not None:
            merge_adapter(self.model, Path(cfg.adapter))

    def _reward(self, component: Component) -> list[NamedReward]:
        """One object for all benchmarks with the same reward: it may have processes of its own."""
        key = to_yaml(component)
        if key not in self.rewards:
            (name, _, function), *_ = named_rewards([component.build()])
            self.rewards[key] = [(name, 1.0, function)]  # what is measured has no weight
        return self.rewards[key]

    def _build_caches(self) -> dict[Mode, KVCache]:
        sparse: KVCache | None = None if self.cfg.kv_cache is None else self.cfg.kv_cache.build()
        dense = DenseKVCache() if sparse is None else DenseKVCache(sparse.page_size, sparse.block_size)
        caches: dict[Mode, KVCache] = {"dense": dense}
        return caches if sparse is None else caches | {"sparse": sparse}

    def _check_against_model(self) -> None:
        cfg, config = self.cfg, read_config(self.folder)
        for task in self.tasks:
            check_windows(task.name, task.size, cfg.prompts_per_window)
            task.encode(self.tokenizer)
            for mode in cfg.modes:
                task.check_fits(config, cfg.engine, self.caches[mode])
        for mode in cfg.modes:
            check_runs(self.caches[mode], config, self.device, getattr(torch, cfg.engine.dtype or cfg.dtype))
        self.notes = self._schedule_notes() if "sparse" in cfg.modes else []

    def _schedule_notes(self) -> list[str]:
        """A schedule for another model, page or selector is refused; at which temperature to sample is open here."""
        cache = self.caches["sparse"]
        budget = cache.budget.start if isinstance(cache.budget, AdaptiveBudget) else cache.budget
        made_for: Any = getattr(budget, "provenance", None)
        adapter = None if self.cfg.adapter is None else adapter_identity(Path(self.cfg.adapter))
        if made_for is None:
            return cache.check(self.cfg.model, 1.0, "exact", adapter=adapter)
        notes = cache.check(self.cfg.model, made_for.temperature, made_for.estimator, made_for.tau, adapter)
        at = {task.sampling.temperature for task in self.tasks} - {made_for.temperature}
        return notes + [f"its P5 was measured at temperature {made_for.temperature}, not at {t}" for t in sorted(at)]

    def _open_stores(self) -> None:
        self.settings = {(one.name, mode): self._settings(one, mode) for one in self.cfg.filled for mode in self.caches}
        for task in self.tasks:
            of_data = {"prompts": task.size, "data": task.fingerprint()}
            for mode in self.caches:
                self.settings[task.name, mode] |= of_data
            for mode in self.cfg.modes:
                folder, settings = self.output_dir / task.name / mode, self.settings[task.name, mode]
                self.stores[task.name, mode] = SampleStore(folder, settings, len(self._windows(task.name)))

    def _settings(self, benchmark: Benchmark, mode: Mode) -> dict[str, Any]:
        """What the samples depend on, but for the data. How many rows, tokens of the pool and processes there are only
        rounds."""
        cfg, cache = self.cfg, self.caches[mode]
        kv_cache = cfg.kv_cache if mode == "sparse" else None
        adapter = None if cfg.adapter is None else Path(cfg.adapter)
        assert benchmark.sampling is not None
        return {
            "model": cfg.model,
            "model.weights": fingerprint(self.folder),
            "eos_ids": list(self.tokenizer.eos_ids),
            "adapter": cfg.adapter,
            "adapter.weights": adapter and adapter_fingerprint(adapter),
            "dtype": cfg.dtype,
            "engine.dtype": cfg.engine.dtype,
            "kv_cache": kv_cache and yaml.safe_load(to_yaml(kv_cache)),
            "kv_cache.page_size": cache.page_size,
            "seed": cfg.seed,
            "prompts_per_window": cfg.prompts_per_window,
            "reward": yaml.safe_load(to_yaml(benchmark.reward)),
            "num_samples": benchmark.num_samples,
            "max_new_tokens": benchmark.max_new_tokens,
            "enable_thinking": benchmark.enable_thinking,
            **{f"sampling.{key}": value for key, value in asdict(benchmark.sampling).items()},
        }

    def _print_plan(self) -> None:
        cfg = self.cfg
        adapter = "" if cfg.adapter is None else f", with the adapter {cfg.adapter} merged"
        print(f"model {self.folder}{adapter}, eos ids {self.tokenizer.eos_ids}")
        for note in self.notes:
            print(f"schedule: {note}")
        for task in self.tasks:
            for note in task.notes:
                print(f"benchmark {task.name}: {note}")
        for task in self.tasks:
            print("\n".join(plan_lines(task, cfg.seed_of(task.settings), cfg.modes, self.tokenizer.decode)))
        for (name, mode), store in self.stores.items():
            if store.windows:
                print(f"going on: {name}, {mode} has {len(store.windows)} of {len(self._windows(name))} windows")
        sys.stdout.flush()

    def _windows(self, name: str) -> list[range]:
        size = next(task.size for task in self.tasks if task.name == name)
        return windows(size, self.cfg.prompts_per_window)

    # The loop

    def train(self) -> None:
        """Each benchmark, dense and then sparse; figures after each of them."""
        try:
            for task in self.tasks:
                for mode in self.cfg.modes:
                    self._run(task, mode)
                    if distributed.rank() == 0:
                        self._finish(task, mode)
        except Interrupted:
            raise Interrupted(f"stopped; the same command goes on from the samples in {self.output_dir}") from None
        if distributed.rank() == 0:
            self._print_tables()

    def _run(self, task: Task, mode: Mode) -> None:
        """The windows that are missing."""
        cfg, store = self.cfg, self.stores.get((task.name, mode))
        done = distributed.gather_objects(0 if store is None else len(store.windows))[0]
        plan = windows(task.size, cfg.prompts_per_window)
        N = task.settings.num_samples
        engine = self._engine(task, mode)
        name, ready = f"{task.name}, {mode}", sum(map(len, plan[:done])) * N
        with SampleProgress(name, task.size * N, ready, distributed.rank() == 0) as progress:
            for window in plan[done:]:
                check_stop()
                rows, entry = self._sample(task, mode, engine, window, progress)
                if store is not None:
                    store.append(rows, entry)
        engine.sleep()

    def _engine(self, task: Task, mode: Mode) -> Engine:
        seed, decode = self.cfg.seed_of(task.settings), self.tokenizer.decode
        limits, eos_ids = task.engine(self.cfg.engine), self.tokenizer.eos_ids
        return Engine(self.model, self.caches[mode], eos_ids, limits, seed, top_k=1, decode=decode)

    def _sample(
        self, task: Task, mode: Mode, engine: Engine, window: range, progress: SampleProgress
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The lines of a window's samples, of all ranks and in order, and the line about the window itself."""
        started, N = time.perf_counter(), task.settings.num_samples

        def on_step(tokens: int, sequences: int) -> None:
            ranks = distributed.world_size()
            done = min(sequences * ranks, len(window) * N)  # the other ranks go about as fast
            progress.update(window.start * N + done, tokens * ranks / (time.perf_counter() - started))
            stop_between_tokens(tokens, sequences)

        def encode(example: Example) -> list[int]:
            return encode_prompt(self.tokenizer, example.prompt, task.settings.enable_thinking)

        batch = generate(engine, task, window, encode, N, task.sampling, on_step=on_step)
        distributed.barrier()
        seconds = time.perf_counter() - started
        batch.texts = decode_responses(batch, self.tokenizer)
        judged = judge(batch, task.reward)
        layers = self.model.config.num_layers
        mine = task.rows(batch, judged, mode, self.caches[mode], layers, self.tokenizer.decode)
        rows = [row for part in distributed.gather_objects(mine) for row in part]
        rows.sort(key=lambda row: (row["number"], row["sample"]))
        counts = distributed.sum_values(self._outcomes(task))
        tokens = sum(row["tokens"] for row in rows)
        return rows, {"prompts": len(window), "counts": counts, "tokens": tokens, "seconds": round(seconds, 3)}

    def _outcomes(self, task: Task) -> dict[str, float]:
        """Of the last call of its reward."""
        function = task.reward[0][2]
        return {key: float(n) for key, n in function.counts.items()} if isinstance(function, CountsOutcomes) else {}

    # Results

    def _finish(self, task: Task, mode: Mode) -> None:
        store = self.stores[task.name, mode]
        result, problems = result_of(store, task.settings.num_samples, gives_answers(task.reward))
        about = task.description() | {"seed": self.cfg.seed_of(task.settings)}
        data = self.settings[task.name, mode]["data"]
        store.finish({"data": data, "about": about, "result": result, "problems": problems})
        run = {"model": self.cfg.model, "adapter": self.cfg.adapter, "seed": self.cfg.seed}
        write_results(self.output_dir / "results.json", run, joined(self.output_dir, self.settings))

    def _print_tables(self) -> None:
        results = joined(self.output_dir, self.settings)
        speeds: dict[tuple[str, str], float] = {key: tokens_per_second(store) for key, store in self.stores.items()}
        print("\n".join(["", *tables(results, speeds)]))
        measured = [(name, mode) for name, one in results.items() for mode in ("dense", "sparse") if mode in one]
        if earlier := [f"{name}, {mode}" for name, mode in measured if (name, mode) not in speeds]:
            print(f"of earlier commands, with the same settings: {'; '.join(earlier)}")
        print(f"results  {self.output_dir / 'results.json'}", flush=True)

    def cleanup(self) -> None:
        for store in self.stores.values():
            store.close()
        for ((_, _, function),) in self.rewards.values():
            if isinstance(function, Closes):
                function.close()


def model_folder(path: Path) -> Path:
    """The Hugging Face folder: `path`, or that within a save of sparrow_grpo.

    Raises:
        UserError: a save that is not complete.
    """
    if (path / "config.json").is_file() or not (path / "model").is_dir():
        return path
    save = resolve_resume(path, path.parent)
    assert save is not None
    return save / "model"


def main(argv: Sequence[str] | None = None) -> int:
    return run_recipe(SparrowEval, EvalConfig, argv)


if __name__ == "__main__":
    sys.exit(main())
