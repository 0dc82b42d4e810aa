"""The wheel, built from the sources and put on the path of a fresh process, and the roads to a recipe."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from sparrow import registry

ROOT = Path(__file__).parents[1]
PACKAGED = ("sparrow", "components", "recipes", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
METADATA = configparser.ConfigParser()
METADATA.read(ROOT / "setup.cfg")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources: building leaves files among them."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in (ROOT / name for name in PACKAGED):
        if path.is_dir():
            shutil.copytree(path, source / path.name, ignore=ignore)
        elif path.is_file():
            shutil.copy(path, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(built)]
    subprocess.run([*build, str(source)], check=True, capture_output=True)
    return next(built.glob("sparrow_rl-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """Stdout of a Python process that finds the wheel before the editable install."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_every_source_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sparrow").rglob("*.py")}
    expected |= {"sparrow/py.typed", "sparrow/kernels/known_options.json"}
    expected |= {f"sparrow/tracking/report/page.{suffix}" for suffix in ("css", "js")}
    for folder in ("components", "recipes"):
        found = [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.yaml")]
        expected |= {f"sparrow/{path.relative_to(ROOT).as_posix()}" for path in found}
    expected |= {f"{recipe.name}.py" for recipe in registry.recipes()}
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_the_wheel_installs_both_commands(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    entry_points = next(name for name in archive.namelist() if name.endswith("entry_points.txt"))
    parsed = configparser.ConfigParser()
    parsed.read_string(archive.read(entry_points).decode())
    assert dict(parsed["console_scripts"]) == {"tune": "sparrow.cli:main", "sparrow": "sparrow.cli:main"}


def test_every_recipe_is_a_top_level_module_too() -> None:
    modules = METADATA["options"]["py_modules"].split()
    assert modules == [recipe.name for recipe in registry.recipes()]


@pytest.mark.parametrize("module", ["sparrow", "sparrow_grpo"])
def test_an_installed_wheel_validates_a_config_by_name(installed: Path, tmp_path: Path, module: str) -> None:
    arguments = ["validate", "tiny"] if module == "sparrow" else ["--config", "tiny", "--validate"]
    assert run(installed, tmp_path, "-m", module, *arguments) == "ok\n"


def test_packages_come_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import sparrow, sparrow.components, sparrow.recipes as r; print(*sparrow.components.__path__, *r.__path__)"
    assert run(installed, tmp_path, "-c", code).split() == [
        str(installed / "sparrow" / "components"),
        str(installed / "sparrow" / "recipes"),
    ]


@pytest.mark.parametrize("in_sources", [True, False])
def test_the_editable_install_finds_all_packages(tmp_path: Path, in_sources: bool) -> None:
    code = "import sparrow.components, sparrow.recipes, importlib.util as u; print(u.find_spec('sparrow_grpo').origin)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT if in_sources else tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "recipes" / "sparrow_grpo.py"), done.stderr


def test_torchtunes_own_command_line_runs_a_recipe_by_name(tmp_path: Path) -> None:
    """Its `main`, without our console script; torchao 0.16 and later need the shim for it to import at all."""
    arguments = ["tune", "run", "sparrow_grpo", "--config", "tiny", "--validate"]
    code = (
        "import sys; from sparrow.torchtune_adapter import apply_shim; apply_shim(); "
        f"from torchtune._cli.tune import main; sys.argv = {arguments}; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_every_pinned_version_satisfies_its_requirement() -> None:
    from packaging.requirements import Requirement

    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pinned = {name.lower(): version for name, version in pinned.items()}
    required = METADATA["options"]["install_requires"].split("\n")[1:]
    for requirement in map(Requirement, required):
        assert requirement.specifier.contains(pinned[requirement.name]), requirement


def test_every_requirement_is_imported() -> None:
    """What only a dependency needs is for that dependency to ask for."""
    from packaging.requirements import Requirement

    sources = [path for folder in ("sparrow", "components", "recipes") for path in (ROOT / folder).rglob("*.py")]
    imports = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    imported = {module for path in sources for module in imports.findall(path.read_text(encoding="utf-8"))}
    distributions = packages_distributions()
    used = {name.lower() for module in imported for name in distributions.get(module, [])}
    required = METADATA["options"]["install_requires"].split("\n")[1:]
    assert {requirement.name for requirement in map(Requirement, required)} <= used
