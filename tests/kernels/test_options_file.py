"""The file of measured options: several writers at once, folders that may not be written, damage."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from sparrow.errors import UserError
from sparrow.kernels.options_file import add_known, cache_file, read_known

WRITER = """
import sys
from pathlib import Path
from sparrow.kernels.options_file import add_known

print("ready", flush=True)
sys.stdin.readline()
for number in range(50):
    add_known(Path(sys.argv[1]), {f"{sys.argv[2]} {number}": [number]})
"""


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPARROW_CACHE", str(tmp_path / "cache"))
    return cache_file()


def test_answers_of_processes_that_write_at_once_are_all_kept(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([*command, str(rank)], **pipes) for rank in range(4)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    while any(writer.poll() is None for writer in writers):
        read_known(path)  # what is there is whole at every moment
    for writer in writers:
        assert writer.communicate()[0] == "" and writer.returncode == 0
    assert read_known(path) == {f"{rank} {number}": [number] for rank in range(4) for number in range(50)}
    assert {file.suffix for file in path.parent.iterdir()} == {".json", ".lock"}


def test_an_answer_replaces_that_of_before_and_leaves_the_others(path):
    assert read_known(path) == {}
    add_known(path, {"a": [1], "b": None})
    add_known(path, {"b": [2]})
    assert read_known(path) == json.loads(path.read_text()) == {"a": [1], "b": [2]}


def test_a_folder_that_cannot_be_had_is_a_warning_with_its_path(path):
    path.parent.parent.write_text("a file stands where the folder should")
    with pytest.warns(UserWarning, match=rf"{path}: .* cannot be kept"):
        add_known(path, {"a": [1]})
    with pytest.warns(UserWarning, match=rf"{path}: .* cannot be read"):
        assert read_known(path) == {}


def test_a_folder_without_the_file_is_no_reason_to_warn(path):
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_known(path) == {}
        add_known(path, {"a": None})


@pytest.mark.parametrize("content", [b'{"NVIDIA', b"\xff\xfe\x00"])
def test_a_damaged_file_is_named_and_left(path, content):
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for touch in (lambda: read_known(path), lambda: add_known(path, {"a": [1]})):
        with pytest.raises(UserError, match=r"kernel_options\.json: .*delete it"):
            touch()
    assert path.read_bytes() == content
