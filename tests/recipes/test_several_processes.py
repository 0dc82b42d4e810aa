"""sparrow_grpo in several processes: what does not depend on their number, and what happens when one is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from sparrow.recipes import sparrow_grpo

from .conftest import metrics

SGD = ["optimizer._component_=torch.optim.SGD", "optimizer.lr=0.1", "optimizer.momentum=0.9"]
ADAMW = ["optimizer._component_=torch.optim.AdamW", "optimizer.lr=0.0003"]
TWO = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", "2", "sparrow_grpo"]
COMPARED = ("reward", "acceptance/p5", "completions/mean_length", "loss", "grad_norm", "budget/kv_read_ratio")


def run_two(arguments: list[str]) -> None:
    subprocess.run([*TWO, *arguments], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")


def assert_same(one: Path, other: Path, step: int, atol: float = 2e-5) -> None:
    for row, twin in zip(metrics(one), metrics(other), strict=True):
        for key in COMPARED:
            assert row[key] == pytest.approx(twin[key], abs=1e-4), (row["step"], key)
    assert_same_weights(one, other, step, atol)


def assert_same_weights(one: Path, other: Path, step: int, atol: float = 2e-5) -> None:
    ours, theirs = weights(one, step), weights(other, step)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=0)


def test_a_run_goes_on_with_another_number_of_processes(arguments, tmp_path):
    """One process, then two, then one; momentum and all are as if one had done it."""
    common = [*SGD, "validation=null"]
    assert sparrow_grpo.main(arguments(*common, "steps=3", name="one")) == 0
    assert sparrow_grpo.main(arguments(*common, "steps=1", name="changing")) == 0
    # With rows for half of a share, prompts are claimed from the queue instead of dealt out.
    run_two(arguments(*common, "steps=2", "resume=auto", "engine.max_rows=4", name="changing"))
    saved = tmp_path / "changing" / "checkpoints" / "step_000002"
    assert (saved / "shards" / ".metadata").is_file() and (saved / "model" / "tokenizer.json").is_file()
    assert sparrow_grpo.main(arguments(*common, "steps=3", "resume=auto", name="changing")) == 0
    assert_same(tmp_path / "one", tmp_path / "changing", 3)


def test_a_run_that_has_not_learned_yet_goes_on_with_another_number_of_processes(arguments, tmp_path):
    """Two tokens earn nothing: no step of the optimizer comes before a whole save and one in shards."""
    common = [*SGD, "validation=null", "reward.0.function=sparrow.components.pointer_chase.pointer_reward"]
    short = [*common, "engine.max_new_tokens=2"]
    for name in ("one", "changing"):
        assert sparrow_grpo.main(arguments(*short, "steps=1", name=name)) == 0
    assert sparrow_grpo.main(arguments(*short, "steps=2", "resume=auto", name="one")) == 0
    run_two(arguments(*short, "steps=2", "resume=auto", name="changing"))
    for name in ("one", "changing"):
        assert sparrow_grpo.main(arguments(*SGD, "validation=null", "steps=4", "resume=auto", name=name)) == 0
    rows = metrics(tmp_path / "changing")
    assert [row["update/noop"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert_same_weights(tmp_path / "one", tmp_path / "changing", 4)


def test_two_processes_and_two_more_steps_are_four(arguments, tmp_path):
    """Bit for bit, with an adapter beside the sharded weights; prompts that have rows at once are dealt out in turn."""
    lora = ["distiller._component_=sparrow.components.distiller.LoRADistiller", "distiller.learning_rate=0.001"]
    common = [*ADAMW, *lora, "validation=null"]
    assert sparrow_grpo.main(arguments(*common, "steps=1", name="one")) == 0
    run_two(arguments(*common, "steps=2", name="whole"))
    run_two(arguments(*common, "steps=1", name="parts"))
    run_two(arguments(*common, "steps=2", "resume=auto", name="parts"))
    one, other = weights(tmp_path / "whole", 2), weights(tmp_path / "parts", 2)
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    for key in (*COMPARED, "distill/kl", "distill/grad_norm"):
        assert [row[key] for row in whole] == [row[key] for row in parts], key
    one_process = metrics(tmp_path / "one")[0]
    for key in ("distill/kl", "distill/grad_norm"):
        assert whole[0][key] == pytest.approx(one_process[key], rel=1e-4), "the adapter's weights have the full shape"


def test_bf16_over_fp32_master_weights_in_one_process(grpo, tmp_path):
    """On the first update policy and old policy are equal here too; a resumed run has the master weights, not bf16."""
    common = [*ADAMW, "dtype=bfloat16", "validation=null"]
    whole = grpo(*common, "steps=2", name="whole")
    assert whole[0]["policy/ratio_error"] == 0.0 and whole[0]["grad_norm"] > 0
    assert whole[0]["engine/logprob_diff_mean"] < 0.1
    grpo(*common, "steps=1", name="parts")
    parts = grpo(*common, "steps=2", "resume=auto", name="parts")
    assert [row["loss"] for row in whole] == [row["loss"] for row in parts]
    one, other = weights(tmp_path / "whole", 2), weights(tmp_path / "parts", 2)
    assert all(tensor.dtype == torch.bfloat16 for tensor in one.values())
    assert all(torch.equal(one[name], other[name]) for name in one)


def workers(node: subprocess.Popen) -> list[int]:
    return [child.pid for child in psutil.Process(node.pid).children()]


def wait_for_a_save(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/step_??????/COMPLETE")) and time.monotonic() < deadline:
        time.sleep(0.05)


def goes_on_from_the_last_save(arguments: list[str], folder: Path) -> None:
    saved = max(int(path.parent.name[5:]) for path in folder.glob("checkpoints/step_??????/COMPLETE"))
    assert sparrow_grpo.main([*arguments, f"steps={saved + 1}", "resume=auto"]) == 0
    assert [row["step"] for row in metrics(folder)] == list(range(1, saved + 2))


def test_two_nodes_end_when_a_worker_is_killed_and_the_last_save_counts(arguments, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    node = ["--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{port}"]
    run = arguments(*ADAMW, "steps=1000", "checkpoint_every=1", "validation=null")
    command = [sys.executable, "-m", "sparrow", "run", *node, "sparrow_grpo", *run]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **output) for _ in range(2)]
    wait_for_a_save(tmp_path / "run")
    os.kill(workers(nodes[1])[0], signal.SIGKILL)
    errors = [node.communicate(timeout=100)[1] for node in nodes]
    assert all(node.returncode not in (0, None) for node in nodes)
    assert "was killed by signal 9; where the recipe has saves, resume=auto goes on" in errors[1]
    # Whichever this node notices first: the peer of a collective, or the store that the other node holds.
    lost = "error: (rank . )?lost (the connection to another process|the node at|torchrun's store)"
    assert re.search(lost, errors[0]), errors[0]
    assert "Traceback" not in errors[0]
    goes_on_from_the_last_save(arguments(*ADAMW, "validation=null"), tmp_path / "run")


BF16 = ["dtype=bfloat16", "engine.tune=false", "kv_cache.page_size=16", "kv_cache.block_size=16"]


@pytest.mark.gpu(2)
def test_a_worker_that_is_killed_ends_the_one_on_the_other_gpu(arguments, tmp_path):
    """NCCL does not notice over NVLink: a collective would wait for hours."""
    own = [*ADAMW, *BF16, "validation=null"]
    output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen([*TWO, *arguments(*own, "steps=1000", "checkpoint_every=1")], **output)
    wait_for_a_save(tmp_path / "run")
    os.kill(workers(run)[1], signal.SIGKILL)
    error = run.communicate(timeout=60)[1]
    assert run.returncode == 137 and "error: rank 1 was killed by signal 9; where the recipe has saves" in error
    goes_on_from_the_last_save(arguments(*own), tmp_path / "run")


@pytest.mark.parametrize("processes", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2)])
def test_bf16_on_gpus(arguments, tmp_path, processes):
    """The packed copy is filled from the shares, and its probe compares it with the sharded model at each sync."""
    command = [sys.executable, "-m", "sparrow", "run", "--nproc_per_node", str(processes), "sparrow_grpo"]
    subprocess.run([*command, *arguments(*ADAMW, *BF16, "steps=2")], check=True)
    # One GPU goes on with what several saved.
    assert sparrow_grpo.main(arguments(*ADAMW, *BF16, "steps=3", "resume=auto")) == 0
    rows = metrics(tmp_path / "run")[1:]
    assert len(rows) == 3
    for row in rows:
        assert row["update/skipped"] == 0.0 and row["grad_norm"] > 0
        assert row["engine/logprob_diff_mean"] < 0.1
