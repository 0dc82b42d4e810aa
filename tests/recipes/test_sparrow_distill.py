"""Offline distillation on a mini model: what it measures, that the adapter moves, and going on."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sparrow.recipes import sparrow_distill, sparrow_grpo
from sparrow.recipes.calibrate_surface import GRID, Measured
from sparrow.recipes.distill_report import OWN_BUDGET, changes, table

from .conftest import metrics

K3 = ["distiller.loss={_component_: sparrow.components.distill_loss.SampledK3}", "distiller.teacher=before_step"]
TOP_K = "distiller.loss={_component_: sparrow.components.distill_loss.TopKKL, top_k: 5}"


def arguments(checkpoint: Path, folder: Path, *overrides: str) -> list[str]:
    small = [
        "warmup=null", "data.nodes=5", "data.hops=2", "steps=2", "held_out_prompts=8", "prompts_per_step=4",
        "engine.max_rows=16", "engine.kv_tokens=4096", "engine.max_new_tokens=36", "kv_cache.block_size=16",
        "kv_cache.budget.pages=4", "budgets=[4,6]", "acceptance.bin_width=16", "resamples=50", "distiller.rank=4",
        "mode=teacher_forced",
    ]  # fmt: skip
    config = ["--config", "tiny_distill_offline", f"model={checkpoint}", f"output_dir={folder}"]
    return [*config, *small, *overrides]


def run(checkpoint: Path, folder: Path, *overrides: str) -> int:
    return sparrow_distill.main(arguments(checkpoint, folder, *overrides))


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.parametrize("overrides", [K3, [TOP_K, "mode=generate"], ["distiller.merge_in_engine=true"]])
def test_before_and_after(checkpoint, tmp_path, capsys, overrides):
    own = "kv_cache.budget={_component_: sparrow.components.budget.StepSchedule, pages: [4, 5], bin_width: 16}"
    assert run(checkpoint, tmp_path, own, *overrides) == 0
    shown = capsys.readouterr().out
    assert "step 2/2" in shown and "P5 before" in shown and "own     all" in shown
    with (tmp_path / "p5.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["budget_pages"] for row in rows} == {str(OWN_BUDGET), "4", "6"}
    assert all(0 <= float(row[side]) <= 1 for row in rows for side in ("before", "after"))
    report = json.loads((tmp_path / "p5.json").read_text())
    assert report["steps"] == 2 and len(report["rows"]) == len(rows)
    assert (tmp_path / "p5.png").stat().st_size > 10_000
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert all(row["distill/kl"] >= 0 and row["distill/tokens"] > 0 for row in metrics(tmp_path))
    assert any(tensor.abs().sum() > 0 for name, tensor in adapter(tmp_path).items() if "lora_B" in name)


def test_the_gain_is_resampled_in_pairs_where_the_tokens_are_the_same() -> None:
    """Sequences differ by .4, and each token gains .1: the gain is certain, however wide the intervals of P5 are."""
    generator = torch.Generator().manual_seed(0)
    sequence_N = torch.arange(12).repeat_interleave(50)
    alpha_N = 0.4 + 0.4 * torch.rand(12, generator=generator)[sequence_N] + 0.05 * torch.rand(600, generator=generator)
    before = Measured(alpha_N, alpha_N, torch.arange(600) % 50, sequence_N)
    after = replace(before, alpha_N=alpha_N + 0.1)
    cfg = SimpleNamespace(confidence=0.95, resamples=200)
    *bins, whole = changes({4: before}, {4: after}, 16, cfg)
    assert [row.bin_start for row in bins] == [0, 16, 32, 48] and whole.bin_start is None
    for row in (*bins, whole):
        assert row.gain == pytest.approx(0.1, abs=1e-6) and row.after_high - row.after_low > 0.05
        assert row.gain_low <= 0.1 <= row.gain_high < row.gain_low + 4 / GRID
        assert row.p1_after - row.p1_before == pytest.approx(row.mean_after - row.mean_before) == pytest.approx(0.1)
    others = replace(after, sequence_N=sequence_N.flip(0))
    assert changes({4: before}, {4: others}, 16, cfg)[-1].gain_low is None
    assert "[+0.100" in table([whole])[1] and "[+" not in table([replace(whole, gain_low=None, gain_high=None)])[1]


def test_one_step_and_one_more_are_two(checkpoint, tmp_path, capsys):
    """Bit for bit; what was measured before is not measured again."""
    assert run(checkpoint, tmp_path / "whole") == 0
    assert run(checkpoint, tmp_path / "parts", "steps=1") == 0
    capsys.readouterr()
    assert run(checkpoint, tmp_path / "parts") == 0
    shown = capsys.readouterr().out
    assert "goes on after step 1" in shown and "P5 before  budget" not in shown
    one, other = adapter(tmp_path / "whole"), adapter(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "whole" / "p5.csv").read_text() == (tmp_path / "parts" / "p5.csv").read_text()
    assert run(checkpoint, tmp_path / "parts", "distiller.learning_rate=0.5") == 2
    assert "distiller" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("distiller.ppo={_component_: sparrow.components.loss.ClippedSurrogate}", "distiller.ppo"),
        ("budgets=[6,4]", "budgets"),
        ("budgets=[2]", "2 pages do not hold"),
        ("kv_cache={_component_: sparrow.components.kv_cache.DenseKVCache}", "no budget to distil under"),
        ("steps=0", "steps: 0"),
    ],
)
def test_what_cannot_be_is_refused(checkpoint, tmp_path, capsys, override, words):
    assert run(checkpoint, tmp_path, override) == 2
    assert words in capsys.readouterr().err


def test_the_whole_of_it_in_reinforcement_learning(arguments, tmp_path):
    """Phases, PPO term, top-k set recorded before the step, a share of the prompts, merged weights; and going on."""
    schedule = "{_component_: sparrow.components.budget.StepSchedule, pages: [%d, %d, 7], bin_width: 20}"
    options = [
        "kv_cache.budget._component_=sparrow.components.phased_budget.PhasedBudget",
        f"kv_cache.budget.first={schedule % (6, 7)}",
        f"kv_cache.budget.cheaper={schedule % (5, 6)}",
        "kv_cache.budget.patience=1", "kv_cache.budget.min_tokens=60", "kv_cache.budget.correlated_tokens=1",
        "acceptance.tau=0.01",
        "distiller={_component_: sparrow.components.distiller.LoRADistiller, rate_factor: 5.0, rank: 4, share: 0.5, "
        "kl_weight: 0.001, merge_in_engine: true}",
        "distiller.loss={_component_: sparrow.components.distill_loss.TopKKL, top_k: 8}",
        "distiller.ppo={_component_: sparrow.components.loss.ClippedSurrogate}",
        "optimizer={_component_: torch.optim.AdamW, lr: 0.0001}",
        "validation=null",
    ]  # fmt: skip
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        for count in steps:
            resume = ["resume=auto"] if count == 3 and name == "parts" else []
            assert sparrow_grpo.main(arguments(*options, f"steps={count}", *resume, name=name)) == 0
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    for key in ("distill/kl", "distill/ppo_loss", "distill/ppo_clipped", "budget/phase", "loss", "distill/lr"):
        assert [row[key] for row in whole] == [row[key] for row in parts], key
    assert [row["budget/phase"] for row in whole] == [0.0, 1.0, 1.0]
    assert whole[0]["distill/lr"] == pytest.approx(5e-4)
    assert whole[0]["distill/tokens"] < whole[0]["completions/tokens"]
    assert whole[0]["policy/ratio_error"] == 0.0, "merging left the dense weights alone"


def test_more_tokens_than_the_dense_pass_keeps_are_refused(arguments, capsys):
    lora = "distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001}"
    loss = "distiller.loss={_component_: sparrow.components.distill_loss.TopKKL, top_k: 50}"
    assert sparrow_grpo.main(arguments(lora, loss)) == 2
    assert "acceptance.top_k 20" in capsys.readouterr().err
