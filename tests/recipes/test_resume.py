"""Going on from a save: bit for bit, under other settings, and where that has no meaning."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow.attention.packed import PackedCausal
from sparrow.models.checkpoint import load_decoder
from sparrow.recipes import sparrow_grpo
from sparrow.recipes.sparrow_grpo import SparrowGRPO

from .conftest import metrics

# Of val/, because the last step of each part has a validation of its own.
NOT_COMPARED = ("time/", "time_share/", "tokens_per_second", "train/mfu", "val/", "speedup/", "memory/")
LORA = ["distiller={_component_: sparrow.components.distiller.LoRADistiller, learning_rate: 0.001, rank: 4}"]
CONTROLLER = [
    "kv_cache.budget._component_=sparrow.components.tail_controller.TailController",
    "kv_cache.budget.start={_component_: sparrow.components.budget.StepSchedule, pages: [5, 6, 7], bin_width: 20}",
    "kv_cache.budget.grid=[5,6,7,8,10,12,16]",
    "kv_cache.budget.min_tokens=60",
    "kv_cache.budget.correlated_tokens=1",
]
ADAMW = "optimizer={_component_: torch.optim.AdamW, lr: 0.0005}"


def comparable(folder):
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in metrics(folder)]


def same(one, other) -> bool:
    """Whether two saved states are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


@pytest.mark.parametrize(
    "overrides",
    [[ADAMW, "lr_warmup_steps=3", "final_lr=0.1", "kl_coef=0.01"], CONTROLLER, LORA],
    ids=["schedule", "controller", "distiller"],
)
def test_four_steps_are_two_and_two_bit_for_bit(grpo, arguments, tmp_path, overrides):
    """Weights, metrics, samples, and everything else that a save holds; the second part is stopped, not planned."""
    grpo("steps=4", *overrides, name="whole")
    grpo("steps=4", "checkpoint_every=2", "keep_last=9", *overrides, name="parts")
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step_000004")
    before = (tmp_path / "parts" / "metrics.jsonl").read_text()
    grpo("steps=4", *overrides, "resume=auto", name="parts")
    assert comparable(tmp_path / "whole") == comparable(tmp_path / "parts")
    assert (tmp_path / "parts" / "metrics.jsonl").read_text() != before, "steps 3 and 4 were done again"
    samples = [(tmp_path / name / "samples.jsonl").read_text() for name in ("whole", "parts")]
    assert samples[0] == samples[1]
    saves = [tmp_path / name / "checkpoints" / "step_000004" for name in ("whole", "parts")]
    assert same(*(load_file(save / "model" / "model.safetensors") for save in saves))
    one, other = (torch.load(save / "state.pt", weights_only=True) for save in saves)
    assert one.pop("trackers") != other.pop("trackers"), "each run has an id of its own"
    assert same(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the optimizer's state whole, and in shards
@pytest.mark.parametrize("optimizer", [[], [ADAMW]], ids=["muon", "adamw"])
def test_a_run_that_has_not_learned_yet_goes_on(grpo, optimizer, dtype):
    """Two tokens earn nothing: there was no step of the optimizer when the first save was made."""
    common = [*optimizer, f"dtype={dtype}", "validation=null"]
    nothing = ["engine.max_new_tokens=2", "reward.0.function=sparrow.components.pointer_chase.pointer_reward"]
    grpo("steps=1", *common, *nothing)
    rows = grpo("steps=2", *common, "resume=auto")
    assert [row["update/noop"] for row in rows] == [1.0, 0.0]


def run_ids(folder) -> list[str]:
    saves = sorted((folder / "checkpoints").glob("step_*"))
    return [torch.load(save / "state.pt", weights_only=True)["trackers"]["run_id"] for save in saves]


def test_a_run_keeps_its_id_and_one_that_branches_off_gets_another(grpo, tmp_path):
    grpo("steps=1", name="run")
    grpo("steps=2", f"resume={tmp_path / 'run' / 'checkpoints' / 'step_000001'}", name="run")
    first, second = run_ids(tmp_path / "run")
    assert first == second
    grpo("steps=2", f"resume={tmp_path / 'run' / 'checkpoints' / 'step_000001'}", name="branch")
    assert run_ids(tmp_path / "branch")[0] != first


def test_prompts_are_neither_repeated_nor_left_out_under_another_number_a_step(grpo, tmp_path):
    grpo("steps=1", "prompts_per_step=4")
    grpo("steps=2", "prompts_per_step=2", "resume=auto")
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    grpo("steps=2", "prompts_per_step=4", name="whole")
    whole = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in whole], "prompts 4 and 5 in step 2"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # the optimizer's state whole, and in shards
def test_settings_that_changed_are_printed_and_hold(grpo, monkeypatch, capsys, dtype):
    common = [ADAMW, f"dtype={dtype}", "validation=null"]
    grpo("steps=1", *common)
    recipes = []
    setup = SparrowGRPO.setup
    monkeypatch.setattr(SparrowGRPO, "setup", lambda self: (setup(self), recipes.append(self)))
    capsys.readouterr()
    grpo("steps=2", *common, "optimizer.weight_decay=0.5", "loss.clip_high=0.3", "resume=auto")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed since")]
    assert lines == [
        "changed since the save: steps: 1 -> 2",
        "changed since the save: loss.clip_high: not set -> 0.3",
        "changed since the save: optimizer.weight_decay: not set -> 0.5",
    ]
    (recipe,) = recipes
    assert recipe.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert all(state["step"] == 2 for state in recipe.optimizer.state.values()), "and the moments are those of the save"


def other_model(checkpoint, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    return folder


@pytest.mark.parametrize("what", ["data", "optimizer", "model", "no settings"])
def test_a_save_that_this_run_cannot_go_on_with(grpo, arguments, checkpoint, tmp_path, capsys, what):
    grpo("steps=1")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    override, words = {
        "data": (
            f"data={{_component_: sparrow.components.data.JsonlPrompts, path: {tmp_path / 'data.jsonl'}}}",
            ["data._component_", "PointerChase", "JsonlPrompts"],
        ),
        "optimizer": (ADAMW, ["optimizer._component_", "MuonWithAdamW", "torch.optim.AdamW"]),
        "model": (f"model={other_model(checkpoint, tmp_path)}", ["model", "3 layers", "5 layers"]),
        "no settings": ("seed=0", ["config.yaml", "cannot be read"]),
    }[what]
    if what == "no settings":
        save = tmp_path / "run" / "checkpoints" / "step_000001"
        marker = json.loads((save / "COMPLETE").read_text())
        del marker["sizes"]["config.yaml"]
        (save / "COMPLETE").write_text(json.dumps(marker))
        (save / "config.yaml").unlink()
    capsys.readouterr()
    assert sparrow_grpo.main(arguments("steps=2", "resume=auto", override)) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1, errors
    assert all(word in errors for word in words), errors


def test_the_best_save_is_made_and_kept(grpo, tmp_path):
    rows = grpo("steps=4", "validation.every=1", "keep_best=1", "keep_last=1", "checkpoint_every=100")
    values = [row["val/mean@1"] for row in rows[1:]]
    best = 1 + values.index(max(values))
    saves = tmp_path / "run" / "checkpoints"
    assert os.readlink(saves / "best") == f"step_{best:06d}"
    assert {path.name for path in saves.iterdir()} == {"best", f"step_{best:06d}", "step_000004"}


def test_a_best_metric_of_every_step(grpo, tmp_path, capsys):
    rows = grpo("steps=3", "validation=null", "keep_best=1", "best_metric=entropy", "keep_last=1")
    values = [row["entropy"] for row in rows]
    assert os.readlink(tmp_path / "run" / "checkpoints" / "best") == f"step_{1 + values.index(max(values)):06d}"
    grpo("steps=1", "keep_best=1", "best_metric=rewrd", name="typo")
    assert "warning: best_metric: step 1 has no rewrd, did you mean 'reward'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["keep_best=1", "validation=null"], "best_metric: must be given"),
        (["keep_best=-1"], "keep_best: -1"),
        (["best_metric=reward"], "best_metric: reward has no use with keep_best 0"),
        (["keep_best=1", "best_metric=val/mean@8"], "best_metric: val/mean@8 is not measured; val/mean@1"),
        (["keep_best=1", "best_metric=time/step"], "best_metric: time/step"),
    ],
)
def test_best_saves_that_make_no_sense(arguments, capsys, overrides, words):
    assert sparrow_grpo.main(arguments(*overrides)) == 2
    assert f"error: {words}" in capsys.readouterr().err


def test_the_saved_model_is_transformers_own(grpo, checkpoint, tmp_path):
    """Base and adapter of a save load in transformers and peft, with the logits of the policy that was trained."""
    grpo("steps=1", *LORA)
    save = tmp_path / "run" / "checkpoints" / "step_000001"
    tokenizer = AutoTokenizer.from_pretrained(save / "model")
    ids_T = torch.tensor(tokenizer.encode("a1b2:c(3)=d;e?f"))
    model = load_decoder(save / "model")
    attention = PackedCausal([len(ids_T)], torch.device("cpu"))
    theirs, start = (AutoModelForCausalLM.from_pretrained(folder) for folder in (save / "model", checkpoint))
    with torch.no_grad():
        ours = model.logits(model(ids_T, torch.arange(len(ids_T)), attention))
        before, after = (other(ids_T[None]).logits[0] for other in (start, theirs))
        adapted = PeftModel.from_pretrained(theirs, save / "adapter")(ids_T[None]).logits[0]
    assert ours.abs().max() > 1
    torch.testing.assert_close(after, ours, atol=1e-4, rtol=0)
    assert not torch.equal(before, after), "it was trained"
    assert 0 < (adapted - ours).abs().max() < 1
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {file.name for file in (save / "model").iterdir()} == names


def test_saves_keep_their_tokenizer_when_the_one_the_run_went_on_with_is_gone(grpo, tmp_path):
    grpo("steps=1", "keep_last=1", "checkpoint_every=1")
    grpo("steps=4", "keep_last=1", "checkpoint_every=1", "resume=auto")
    (save,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert save.name == "step_000004"
    assert AutoTokenizer.from_pretrained(save / "model").eos_token_id is not None
    grpo("steps=5", "keep_last=1", "resume=auto")
