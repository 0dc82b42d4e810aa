"""A calibration with a rollout-only adapter: where it is on, what is noted of it, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from sparrow.components.budget import StepSchedule
from sparrow.components.distiller import LoRADistiller
from sparrow.components.kv_cache import SparseKVCache
from sparrow.config import load_config
from sparrow.models.checkpoint import load_decoder
from sparrow.models.identity import adapter_identity
from sparrow.models.merge import merge_adapter
from sparrow.recipes import sparrow_calibrate, sparrow_grpo
from sparrow.recipes.calibrate_config import CalibrateConfig
from sparrow.recipes.calibrate_measure import Scorer, Trajectories, share_of
from sparrow.recipes.calibrate_sweep import Sweep

CONFIG = str(Path(__file__).parent / "mini_calibrate.yaml")
ALL_PAGES = 16  # of 4 tokens hold every sequence: what is left of a difference is the adapter's
LOW_TAU = "acceptance.tau=0.05"


@pytest.fixture
def calibrate(checkpoint: Path, tmp_path: Path) -> Callable[..., int]:
    def run(name: str, *overrides: str) -> int:
        paths = [f"model={checkpoint}", f"output_dir={tmp_path / name}"]
        return sparrow_calibrate.main(["--config", CONFIG, *paths, "device=cpu", LOW_TAU, *overrides])

    return run


@pytest.fixture
def adapter(checkpoint: Path, tmp_path: Path) -> Path:
    """As the distiller exports it, far enough from nothing to be seen."""
    distiller = LoRADistiller(learning_rate=0.1, rank=2)
    distiller.attach(load_decoder(checkpoint))
    torch.manual_seed(0)
    for name, parameter in distiller.adapter.items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    distiller.export(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_it_is_on_for_the_sparse_side_alone(
    calibrate: Callable[..., int], adapter: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Re-scored with all pages: the base's trajectories, and the acceptance of the merged model against the base."""
    wanted = ["mode=both", "budgets=[16]", "held_out_prompts=16"]
    assert calibrate("without", *wanted) == 0
    assert calibrate("with", *wanted, f"adapter={adapter}") == 0
    without, measured = tmp_path / "without" / "measured", tmp_path / "with" / "measured"
    trajectories = torch.load(measured / "trajectories.pt")
    assert torch.equal(trajectories["tokens_T"], torch.load(without / "trajectories.pt")["tokens_T"])

    cfg = replace(load_config(CalibrateConfig, CONFIG), model=str(checkpoint), device="cpu")
    base, merged, device = load_decoder(checkpoint), load_decoder(checkpoint), torch.device("cpu")
    merge_adapter(merged, adapter)
    scorer, other = (Scorer(cfg, model, cfg.acceptance.build(), device) for model in (base, merged))
    batch = share_of(Trajectories(**trajectories), 1, 0, 1)
    batch.hidden_TE = torch.zeros(batch.num_tokens, base.config.hidden_size)
    for micro in other.pack(batch):
        batch.hidden_TE[micro.index_N] = other.dense_hidden(micro)
    expected = scorer.generated(batch).alpha_N
    forced = torch.load(measured / f"teacher_forced_{ALL_PAGES:05d}.pt")
    torch.testing.assert_close(forced["alpha_N"], expected, atol=1e-4, rtol=0)
    assert expected.quantile(0.05) < 0.9

    generated = torch.load(measured / f"generate_{ALL_PAGES:05d}.pt")["alpha_N"]
    assert generated.quantile(0.05) < 0.9, "its rollouts have it on, the dense pass over them has not"
    for name in ("held_out.csv", "surface.csv", "surface_teacher_forced.csv"):
        p5 = [float(line.split(",")[3]) for line in (tmp_path / "with" / name).read_text().splitlines()[1:]]
        assert max(p5) < 0.99, name


def test_an_adapter_of_zeros_changes_no_figure(calibrate: Callable[..., int], adapter: Path, tmp_path: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    zeros = {name: 0 * tensor if "lora_B" in name else tensor for name, tensor in load_file(weights).items()}
    save_file(zeros, weights)
    for mode in ("generate", "teacher_forced"):
        assert calibrate("without", f"mode={mode}") == 0
        assert calibrate("with", f"mode={mode}", f"adapter={adapter}") == 0
        assert (tmp_path / "with" / "surface.csv").read_text() == (tmp_path / "without" / "surface.csv").read_text()


def test_the_schedule_knows_it_and_a_run_without_it_is_told(
    calibrate: Callable[..., int],
    adapter: Path,
    checkpoint: Path,
    arguments: Callable[..., list[str]],
    tmp_path,
    capsys,
) -> None:
    assert calibrate("with", f"adapter={adapter}", "budgets=[5]") == 0
    file = tmp_path / "with" / "schedule.yaml"
    identity = adapter_identity(adapter)
    assert identity.startswith("adapter, weights ") and yaml.safe_load(file.read_text())["adapter"] == identity
    cache = SparseKVCache(StepSchedule(path=str(file)), page_size=4, block_size=16, dense_layers=1)
    assert cache.check(str(checkpoint), 1.0, "exact", 0.05, identity) == []
    (note,) = cache.check(str(checkpoint), 1.0, "exact", 0.05)
    assert "none in this run" in note

    capsys.readouterr()
    schedule = f"kv_cache.budget={{_component_: sparrow.components.budget.StepSchedule, path: {file}}}"
    lora = "distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001, rank: 2}"
    run = ["~kv_cache.budget", schedule, "kv_cache.dense_layers=1", LOW_TAU, "steps=1", "validation=null", lora]
    assert sparrow_grpo.main(arguments(*run, "optimizer={_component_: torch.optim.AdamW, lr: 0.0001}")) == 0
    assert f"allowed to differ: adapter is '{identity}' in the schedule" in capsys.readouterr().out


def test_measurements_of_two_adapters_are_not_mixed(calibrate: Callable[..., int], adapter: Path, capsys) -> None:
    assert calibrate("run", f"adapter={adapter}", "budgets=[5]") == 0
    assert calibrate("run", f"adapter={adapter}", "budgets=[5,8]") == 0
    before, weights = adapter_identity(adapter), adapter / "adapter_model.safetensors"
    assert calibrate("run", "budgets=[5]") == 2
    assert f"adapter: '{before}' then, None now" in capsys.readouterr().err
    save_file({name: 2 * tensor for name, tensor in load_file(weights).items()}, weights)
    assert calibrate("run", f"adapter={adapter}", "budgets=[5]") == 2
    assert f"adapter: '{before}' then, '{adapter_identity(adapter)}' now" in capsys.readouterr().err


def test_an_adapter_that_goes_while_it_is_measured_is_named_all_the_same(
    calibrate: Callable[..., int], adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves of a run that goes on are pruned."""
    identity, measure = adapter_identity(adapter), Sweep.measure
    monkeypatch.setattr(Sweep, "measure", lambda *sweep: (measure(*sweep), shutil.rmtree(adapter)))
    assert calibrate("run", f"adapter={adapter}", "budgets=[5]") == 0
    assert yaml.safe_load((tmp_path / "run" / "schedule.yaml").read_text())["adapter"] == identity


def test_what_does_not_fit_is_refused_before_anything_is_measured(
    calibrate: Callable[..., int], adapter: Path, tmp_path: Path, capsys
) -> None:
    assert calibrate("run", f"adapter={tmp_path / 'elsewhere'}") == 2
    assert "elsewhere holds no adapter_config.json and no adapter_model.safetensors" in capsys.readouterr().err
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    tensors, text = load_file(weights), config.read_text()
    save_file({name: tensor.repeat(1, 2) for name, tensor in tensors.items()}, weights)
    assert calibrate("run", f"adapter={adapter}") == 2
    assert "down_proj.lora_A.weight has shape [2, 256], the model wants [2, 128]" in capsys.readouterr().err
    save_file(tensors, weights)
    config.write_text(json.dumps(json.loads(text) | {"target_modules": ["q_proj", "query"]}))
    assert calibrate("run", f"adapter={adapter}") == 2
    assert "target_modules 'query', the model has" in capsys.readouterr().err
    config.unlink()
    assert calibrate("run", f"adapter={adapter}") == 2
    assert "holds no adapter_config.json" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.pt"))
