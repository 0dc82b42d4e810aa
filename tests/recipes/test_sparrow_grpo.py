"""The whole loop on a mini model: real files, real processes."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sparrow.recipes import sparrow_grpo
from sparrow.recipes.grpo_report import print_report

from .conftest import HERE, metrics

LORA = [
    "distiller._component_=sparrow.components.distiller.LoRADistiller",
    "distiller.learning_rate=0.001",
    "distiller.rank=4",
]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def test_the_demo_in_short(tmp_path):
    """`make demo` with 12 steps instead of 20: warm-up, then reinforcement learning from sparse rollouts."""
    folders = [f"model={tmp_path / 'sft' / 'model'}", f"output_dir={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_grpo", "--config", "tiny"]
    command += [*folders, "steps=12", "validation.every=12"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    rows = metrics(tmp_path / "run")
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert sum(rewards[6:]) > sum(rewards[:6]), rewards
    assert rows[-1]["val/mean@1"] > rows[0]["val/mean@1"] + 0.1
    assert all(row["budget/kv_read_ratio"] < 0.8 for row in rows[1:]), "the schedule drops pages"
    assert all(row["acceptance/p5"] > row["acceptance/tau"] for row in rows[1:]), "and the tail stays level"
    for words in ("warm-up", "learnt", "saved", "tail", "run.png", "step_000012/model"):
        assert words in done.stdout
    assert (tmp_path / "run" / "run.png").stat().st_size > 10_000
    assert (tmp_path / "run" / "samples.jsonl").read_text().count("\n") == 12 * 2


def test_what_a_step_logs(grpo):
    row = grpo("steps=1")[1]
    # On the first update the policy is the one whose log-probs are the old ones, by the same forward: exactly 1.
    assert row["policy/ratio_error"] == 0.0
    assert row["update/skipped"] == 0.0 and row["grad_norm"] > 0
    for name in (
        "acceptance/p5", "acceptance/mean", "acceptance/floor_p5", "acceptance/top_k_p5", "acceptance/tau",
        "acceptance/p5_bin/32", "sampling/importance_sampling_ratio/mean", "rollout_corr/kl", "rollout_corr/ess",
        "engine/logprob_diff_mean", "clip_ratio/low", "clip_ratio/high", "completions/mean_length",
        "acceptance/p10", "acceptance/kl_k1", "acceptance/kl_k3_p95", "acceptance/p10_bin/32",
        "acceptance/kl_k3_bin/32", "acceptance/p5_response_bin/16",
        "completions/clipped_ratio", "budget/mean_pages", "reward_std", "frac_reward_zero_std", "entropy", "lr",
    ):  # fmt: skip
        assert name in row, name
    assert 0 < row["acceptance/p5"] < 1


COUNTING_REWARD = '''
from pathlib import Path

class Counting:
    """Which response was cut is all that it looks at, and it leaves a file when it is closed."""

    name = "counting"

    def __init__(self, closed, weight=1.0):
        self.closed, self.weight, self.counts = Path(closed), weight, {"cut": 0, "whole": 0}

    def __call__(self, completions, truncated, prompts, completion_lengths, **columns):
        assert all(isinstance(prompt, str) for prompt in prompts) and min(completion_lengths) > 0
        self.counts = {"cut": sum(truncated), "whole": len(truncated) - sum(truncated)}
        return [float(cut) for cut in truncated]

    def close(self):
        self.closed.write_text("closed")
'''


def test_a_reward_counts_its_outcomes_and_is_closed(grpo, tmp_path, monkeypatch):
    (tmp_path / "counting_reward.py").write_text(COUNTING_REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    reward = f"reward=[{{_component_: counting_reward.Counting, closed: {tmp_path / 'closed'}}}]"
    row = grpo(reward, "steps=1")[1]
    assert row["rewards/counting/cut"] + row["rewards/counting/whole"] == 16
    assert row["rewards/counting/cut"] / 16 == row["completions/clipped_ratio"] == row["reward"]
    assert (tmp_path / "closed").read_text() == "closed"


def test_a_step_that_no_reward_scores_is_said_with_the_columns_there_are(grpo, tmp_path, monkeypatch, capsys):
    (tmp_path / "silent_reward.py").write_text(
        "def silent(completions, **columns):\n    return [None] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    row = grpo("reward.0.function=silent_reward.silent", "steps=1", "validation=null")[-1]
    assert row["rewards/not_applicable"] == 16 and row["update/noop"] == 1
    assert "warning: step 1: silent scored no response at all; the data's columns are answer" in capsys.readouterr().err


def test_truncated_responses_teach_nothing_if_told_so(grpo):
    """All are cut after three tokens: a reward that tells them apart moves the weights, unless they are masked."""
    short = ["steps=1", "engine.max_new_tokens=3", "validation=null"]
    free, masked = grpo(*short)[-1], grpo(*short, "mask_truncated=true", name="masked")[-1]
    assert free["completions/clipped_ratio"] == masked["completions/clipped_ratio"] == 1.0
    assert free["reward_std"] == masked["reward_std"] > 0
    assert free["grad_norm"] > 0 and masked.get("grad_norm", 0.0) == 0.0
    # They leave the loss, and so the KL term as well.
    assert grpo(*short, "mask_truncated=true", "kl_coef=0.1", name="reference")[-1]["update/noop"] == 1


def test_tensorboard_gets_the_settings_and_a_trace_is_a_phase(grpo, tmp_path):
    trackers = ["sparrow.tracking.jsonl.JsonlTracker", "sparrow.tracking.tensorboard.TensorBoardTracker"]
    overrides = [f"trackers=[{', '.join(f'{{_component_: {name}}}' for name in trackers)}]", "profile=true"]
    rows = grpo(*overrides)
    assert "tracking/failures" not in rows[-1]
    assert [path.stat().st_size > 10_000 for path in (tmp_path / "run" / "tensorboard").iterdir()] == [True]
    assert rows[2]["time/profile"] > 0 and "time/profile" not in rows[1]
    with gzip.open(tmp_path / "run" / "profile" / "step_000002_rank0.json.gz") as trace:
        assert len(json.load(trace)["traceEvents"]) > 1000


def test_a_pool_without_room_for_the_measurement_costs_the_measurement_only(grpo, capfd):
    row = grpo("steps=1", "engine.kv_tokens=96", "measure_speedup_every=1", "validation=null")[-1]
    assert "speedup/measured" not in row and row["speedup/model"] > 0
    assert "speedup/measured is left out: engine.kv_tokens 96 has no room" in capfd.readouterr().err


def test_the_last_words_of_a_run_survive_odd_lines_in_its_log(grpo, tmp_path, capsys):
    grpo("steps=1")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('[]\n{"step": 2, "reward": "a text"}\n')
    print_report(tmp_path / "run", tmp_path / "run" / "checkpoints", 0.9)
    assert "step_000001/model" in capsys.readouterr().out


def test_dense_rollouts_are_accepted_and_agree_with_the_trainer(grpo):
    row = grpo("steps=1", "kv_cache._component_=sparrow.components.kv_cache.DenseKVCache", "kv_cache.page_size=4")[1]
    assert row["acceptance/p5"] > 0.999
    assert row["engine/logprob_diff_max"] < 1e-3
    assert row["budget/kv_read_ratio"] == 1.0


CONTROLLER = [
    "kv_cache.budget._component_=sparrow.components.tail_controller.TailController",
    "kv_cache.budget.start._component_=sparrow.components.budget.StepSchedule",
    "kv_cache.budget.start.pages=[5,6,7]",
    "kv_cache.budget.start.bin_width=20",
    "kv_cache.budget.grid=[5,6,7,8,10,12,16]",
    "kv_cache.budget.min_tokens=60",
    "kv_cache.budget.correlated_tokens=1",
]


def test_the_controller_raises_the_budget(grpo):
    whole = grpo("steps=4", *CONTROLLER)
    pages = [[row[f"budget/pages_bin/{start}"] for start in (0, 20, 40)] for row in whole[1:]]
    assert pages[0] == [5, 6, 7], "what the step was made with"
    assert sum(row["budget/moves"] for row in whole[1:]) > 0 and pages[-1][2] > 7
    assert whole[-1]["budget/mean_pages"] > whole[1]["budget/mean_pages"]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_an_update_does_not_depend_on_the_micro_batches(grpo, tmp_path, aggregation):
    common = ["steps=1", f"aggregation.mode={aggregation}", "optimizer._component_=torch.optim.SGD", "optimizer.lr=1.0"]
    grpo(*common, "micro_batch_tokens=100000", name="one")
    grpo(*common, "micro_batch_tokens=100", name="many")
    one, many = weights(tmp_path / "one", 1), weights(tmp_path / "many", 1)
    for name in one:
        torch.testing.assert_close(one[name], many[name], atol=2e-5, rtol=0)


@pytest.mark.parametrize("option", ["activation_checkpointing", "offload_activations"])
def test_an_update_does_not_depend_on_what_is_recomputed(grpo, tmp_path, option):
    common = ["steps=1", "optimizer={_component_: torch.optim.AdamW, lr: 0.01, fused: true}"]
    plain = grpo(*common, name="plain")[1]
    row = grpo(*common, "activation_checkpointing=true", f"{option}=true", name="recomputed")[1]
    assert row["policy/ratio_error"] == 0.0 and row["grad_norm"] == plain["grad_norm"]
    expected, ours = weights(tmp_path / "plain", 1), weights(tmp_path / "recomputed", 1)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_an_eight_bit_optimizer_trains_and_logs_its_rate(grpo):
    optimizer = "optimizer={_component_: torchao.optim.AdamW8bit, lr: 0.001}"
    with torch.compiler.set_stance("force_eager"):  # compiling its step takes minutes on the CPU
        row = grpo("steps=1", optimizer, "lr_warmup_steps=1")[1]
    assert row["lr"] == pytest.approx(0.0005) and row["update/skipped"] == 0.0


def test_no_reference_is_kept_without_its_coefficient(arguments):
    from sparrow.config import load_config
    from sparrow.recipes.grpo_config import GRPOConfig
    from sparrow.recipes.sparrow_grpo import SparrowGRPO

    _, config, *overrides = arguments("trackers=[]")
    for coefficient in (0.0, 0.01):
        recipe = SparrowGRPO(load_config(GRPOConfig, config, [*overrides, f"kl_coef={coefficient}"]))
        recipe.setup()
        assert (recipe.reference is None) == (coefficient == 0.0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss._component_=sparrow.components.loss.grpo", "aggregation.mode=seq-mean-token-mean"],
        [
            "loss._component_=sparrow.components.loss.dr_grpo",
            "advantage.normalize_std=false",
            "aggregation.mode=seq-mean-token-sum-norm",
            "aggregation.max_length=36",
        ],
        ["loss._component_=sparrow.components.loss.dapo", "advantage.zero_variance=drop", "minibatches=2"],
        ["loss._component_=sparrow.components.loss.GSPO", "correction.level=sequence", "correction.mode=mask"],
        ["loss._component_=sparrow.components.loss.CISPO", "kl_coef=0.01", "sampling.temperature=0.9"],
        ["correction._component_=sparrow.components.correction.NoCorrection", "acceptance.estimator=top_k"],
    ],
    ids=["grpo", "dr_grpo", "dapo", "gspo", "cispo", "no-correction"],
)
def test_every_component_stands_in_the_loop(grpo, overrides):
    row = grpo("steps=1", *overrides)[1]
    assert row["update/skipped"] == 0.0 and 0 < row["grad_norm"] < float("inf")


def test_distiller_moves_the_adapter_and_nothing_else(grpo, checkpoint, tmp_path):
    frozen = ["optimizer.muon_lr=0.0", "optimizer.adamw_lr=0.0", "optimizer.gain_lr=0.0"]
    rows = grpo("steps=2", *frozen, *LORA)
    start, end = load_file(checkpoint / "model.safetensors"), weights(tmp_path / "run", 2)
    assert all(torch.equal(start[name], end[name]) for name in end)
    # The training forward sees the pages that the rollout saw: its first loss is the rollout's k3.
    assert rows[1]["distill/kl"] == pytest.approx(rows[1]["rollout_corr/k3_kl"], rel=1e-3)
    assert rows[2]["distill/grad_norm"] > 0 and rows[2]["distill/skipped"] == 0
    adapter = load_file(tmp_path / "run" / "checkpoints" / "step_000002" / "adapter" / "adapter_model.safetensors")
    assert all(tensor.abs().sum() > 0 for name, tensor in adapter.items() if "lora_B" in name), "it moved"


def test_two_processes_equal_one(arguments, tmp_path):
    common = ["steps=2", "optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1"]
    command = [sys.executable, "-m", "sparrow", "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "sparrow_grpo", *arguments(*common, name="one")], check=True, env=environment)
    two = [*command, "--nproc_per_node", "2", "sparrow_grpo", *arguments(*common, name="two")]
    subprocess.run(two, check=True, env=environment)
    one, other = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    for key in ("reward", "acceptance/p5", "completions/mean_length", "loss", "grad_norm", "budget/kv_read_ratio"):
        for row, twin in zip(one[1:], other[1:], strict=True):
            assert row[key] == pytest.approx(twin[key], abs=1e-4), key
    assert one[0]["val/mean@1"] == pytest.approx(other[0]["val/mean@1"], abs=1e-6)
    a, b = weights(tmp_path / "one", 2), weights(tmp_path / "two", 2)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=0)


PARTS = """
from dataclasses import replace
from sparrow.components.pointer_chase import PointerChase, pointer_progress

class EveryOther(PointerChase):
    def example(self, number):
        example = super().example(number)
        return replace(example, columns=example.columns | {"teaches": number % 2 == 0})

def reward(completions, teaches, **columns):
    return [r if t else 0.0 for r, t in zip(pointer_progress(completions, **columns), teaches)]
"""


def test_a_minibatch_without_an_advantage_moves_nothing_on_any_number_of_processes(arguments, tmp_path, monkeypatch):
    (tmp_path / "every_other.py").write_text(PARTS)
    # A second step without a gradient would still take a twentieth off every weight, and go on by momentum.
    common = [
        "steps=1",
        "minibatches=2",
        "validation=null",
        "data={_component_: every_other.EveryOther, nodes: 5, hops: 2}",
        "reward.0.function=every_other.reward",
        "optimizer={_component_: torch.optim.SGD, lr: 0.1, weight_decay: 0.5, momentum: 0.9}",
    ]
    monkeypatch.syspath_prepend(tmp_path)
    assert sparrow_grpo.main(arguments(*common, name="one")) == 0
    assert metrics(tmp_path / "one")[0]["grad_norm"] > 0, "the other minibatch learns"
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_grpo"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *arguments(*common, name="two")], check=True, env=environment, cwd=tmp_path)
    a, b = weights(tmp_path / "one", 1), weights(tmp_path / "two", 1)
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-5, rtol=0)


def test_a_resumed_run_needs_neither_model_nor_warm_up(arguments, checkpoint, tmp_path):
    model = tmp_path / "sft" / "model"
    shutil.copytree(checkpoint, model)
    common = [f"model={model}", f"warmup={HERE / 'mini_sft.yaml'}", "validation=null"]
    assert sparrow_grpo.main(arguments(*common, "steps=1")) == 0
    shutil.rmtree(model)
    assert sparrow_grpo.main(arguments(*common, "steps=2", "resume=auto")) == 0
    assert not model.exists() and [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]


def test_ctrl_c_saves_and_the_run_goes_on(arguments, tmp_path):
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_grpo", *arguments("steps=1000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step    2/"):
            process.send_signal(signal.SIGINT)
            break
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "error: stopped after step" in errors and "Traceback" not in errors
    done = metrics(tmp_path / "run")[-1]["step"]
    assert sparrow_grpo.main(arguments(f"steps={done + 1}", "resume=auto")) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(done + 2))


def test_killed_in_the_middle_of_a_step_the_last_save_counts(arguments, tmp_path):
    command = [sys.executable, "-m", "sparrow", "run", "sparrow_grpo"]
    process = subprocess.Popen([*command, *arguments("steps=1000", "checkpoint_every=1")], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("run/checkpoints/step_??????/COMPLETE")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    saved = max(int(path.parent.name[5:]) for path in tmp_path.glob("run/checkpoints/step_??????/COMPLETE"))
    assert sparrow_grpo.main(arguments(f"steps={saved + 1}", "resume=auto")) == 0
    assert [row["step"] for row in metrics(tmp_path / "run")] == list(range(saved + 2))
