from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow import registry, torchtune_adapter
from sparrow.cli import RUN_USAGE, main
from sparrow.config import load_tree

TORCHTUNE_RECIPE = "lora_finetune_single_device"

pytestmark = pytest.mark.usefixtures("program")


def lines(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, list[str], list[str]]:
    """Exit code, stdout and stderr of one command."""
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def test_ls_lists_each_recipe_with_its_configs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = lines(capsys, "ls")
    assert (code, err) == (0, [])
    start = next(i for i, line in enumerate(out) if line.startswith("sparrow_grpo "))
    assert any(line.startswith("  tiny ") for line in out[start:])
    assert not any("schedules/" in line or TORCHTUNE_RECIPE in line for line in out)


def test_ls_all_lists_torchtune_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "ls", "--all")[1]
    assert TORCHTUNE_RECIPE in out and "  llama2/7B_lora_single_device" in out


@pytest.mark.parametrize("command", [["ls"], ["ls", "--all"], ["cat", "tiny"], ["--help"], ["run", "--help"]])
def test_reading_commands_import_no_torch(command: list[str]) -> None:
    code = f"import sys; from sparrow.cli import main; assert main({command}) == 0; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_cat(capsys: pytest.CaptureFixture[str]) -> None:
    assert "recipe: sparrow_grpo" in lines(capsys, "cat", "tiny")[1]
    assert (
        lines(capsys, "cat", "sparrow_grpo")[1]
        == registry.recipes_dir().joinpath("sparrow_grpo.py").read_text().splitlines()
    )
    assert any("_component_" in line for line in lines(capsys, "cat", "llama2/7B_lora_single_device")[1])


def test_cp(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = registry.find_config("tiny").read_text()
    for destination, made in [("mine", "mine.yaml"), ("v1.5", "v1.5.yaml"), ("x.yaml", "x.yaml"), ("", "tiny.yaml")]:
        assert lines(capsys, "cp", "tiny", str(tmp_path / destination))[0] == 0
        assert (tmp_path / made).read_text() == source
    (tmp_path / "x.yaml").write_text("kept")
    assert lines(capsys, "cp", "tiny", str(tmp_path / "x.yaml"), "-n")[0] == 0
    assert (tmp_path / "x.yaml").read_text() == "kept"


def test_cp_makes_folders_when_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    destination = tmp_path / "a" / "b.py"
    code, _, err = lines(capsys, "cp", "sparrow_grpo", str(destination))
    assert code == 2 and err == [f"error: tune cp: {destination}: No such file or directory; see --make-parents"]
    assert lines(capsys, "cp", "sparrow_grpo", str(destination), "--make-parents")[0] == 0
    assert destination.is_file()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rnu"], "unknown command 'rnu', did you mean 'run'?"),
        (["frobnicate"], "unknown command 'frobnicate', known: ls, run, validate, cp, cat, download"),
        (["cat", "tinny"], "no recipe or config named 'tinny', did you mean 'tiny'?"),
        (["cat"], "tune cat: the following arguments are required: name"),
        (["ls", "-x"], "tune ls: unrecognized arguments: -x"),
        (["run", "sparow_grpo"], "unknown recipe 'sparow_grpo', did you mean 'sparrow_grpo'?"),
        (["run", "lora_finetune_singel_device"], f"did you mean '{TORCHTUNE_RECIPE}'?"),
        (["run", "sparow_grpo.py"], "no recipe file 'sparow_grpo.py', did you mean 'sparrow_grpo'?"),
        (["run", "no.such.module"], "unknown recipe 'no.such.module'; `tune ls` lists the recipes"),
        (["run", "sparrow_grpo"], "--config NAME_OR_PATH is missing"),
        (
            ["run", "sparrow_grpo", "--config", "tinny"],
            "no config named 'tinny', nor such a file, did you mean 'tiny'?",
        ),
        (["run", "sparrow_grpo", "--config", "tiny_sft"], "this is a config for sparrow_sft, not for sparrow_grpo"),
        (["run", "--config", "tiny", "sparrow_grpo"], "options of torchrun come first, then RECIPE --config CONFIG"),
        (["run", "--nproc_per_node", "2"], "options of torchrun come first"),
        (["run", "--nproc_per_node", "two", "sparrow_grpo", "--config", "tiny"], "--nproc_per_node two: Unsupported"),
        (["validate"], "tune validate: the following arguments are required"),
        (["validate", "none.yaml"], "no config named 'none.yaml'"),
        (["validate", "tiny", "stepz=1"], "command line: stepz: unknown key, did you mean 'steps'?"),
        (["validate", "schedules/qwen3-4b-0.86"], "recipe: missing key"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    code, _, err = lines(capsys, *argv)
    assert code == 2 and len(err) == 1
    assert err[0].startswith("error: ") and message in err[0]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # one process validates several
@pytest.mark.parametrize("config", [config.name for config in registry.configs() if config.recipe])
def test_every_config_that_comes_with_a_recipe_is_valid(capsys: pytest.CaptureFixture[str], config: str) -> None:
    # Some configs leave the checkpoint, or the copy of a data set, to the user.
    given = [f"{key}=given" for key, value in load_tree(config).items() if value == "???"]
    assert lines(capsys, "validate", config, *given) == (0, ["ok"], [])


def test_validate_prints_the_effective_config(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    code, out, _ = lines(capsys, "validate", "toy.yaml", "-v", "nested.size=5")
    assert code == 0 and "  size: 5" in out and out[-1] == "ok"
    (toy / "again.yaml").write_text("\n".join(out[:-1]))
    assert lines(capsys, "validate", "again.yaml", "-v")[1] == out


@pytest.mark.parametrize("recipe", ["toy_recipe.py", "./toy_recipe", "toy_recipe"])
def test_run_takes_a_users_recipe_by_path_or_module(capsys: pytest.CaptureFixture[str], toy: Path, recipe: str) -> None:
    code, out, _ = lines(capsys, "run", recipe, "--config=toy.yaml")
    assert code == 0 and out[-3:] == ["setup rank=0 part=Part(width=2)", "trained size=3", "cleanup"]


def test_the_component_of_the_contributing_guide_is_valid(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    guide = Path(__file__).parents[1].joinpath("CONTRIBUTING.md").read_text()
    code, test, node = re.findall(r"```(?:python|yaml)\n(.+?)```", guide, re.DOTALL)
    (toy / "brevity.py").write_text(f"{code}\n\n{test}")
    exec(compile(f"{code}\n{test}\ntest_brevity_counts_characters()", "CONTRIBUTING.md", "exec"), {})
    (toy / "my.yaml").write_text(f"base: tiny\nreward:\n{node.replace('sparrow.components.', '')}")
    assert lines(capsys, "validate", "my.yaml") == (0, ["ok"], [])


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m sparrow cat sparrow_grpo | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout.startswith('"""GRPO') and done.stderr == ""


def test_torchtune_imports_after_the_shim_alone() -> None:
    code = (
        "from sparrow.torchtune_adapter import apply_shim; apply_shim(); import torchtune.training, torchtune._cli.tune"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_torchtunes_files_are_found_without_importing_it() -> None:
    files = torchtune_adapter.files()
    assert len(files) > 150 and {TORCHTUNE_RECIPE, "llama2/7B_lora_single_device"} <= set(files)


def test_a_torchtune_recipe_runs_in_its_own_process(tmp_path: Path) -> None:
    """As far as its config parser, which tells that the name was made a path and the shim was there."""
    run = [sys.executable, "-m", "sparrow", "run"]
    arguments = [TORCHTUNE_RECIPE, "--config", "llama2/7B_lora_single_device", "--help"]
    done = subprocess.run([*run, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--config CONFIG" in done.stdout


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_overrides_that_the_help_shows_are_valid(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = re.findall(r"[\w.]+=[\w.-]*\w|~[\w.]+", RUN_USAGE.replace("key=value", "").replace("~key", ""))
    assert {word.partition("=")[0] for word in overrides} >= {"steps", "reward.0.weight", "~validation", "~trackers.1"}
    code, out, err = lines(capsys, "validate", "tiny", *overrides)
    assert (code, out) == (0, ["ok"]), err
