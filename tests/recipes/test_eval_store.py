"""Samples on disk: whatever a kill leaves, the next run goes on from whole windows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.errors import UserError
from sparrow.recipes.eval_store import SampleStore, figures_of

SETTINGS = {"model": "m", "sampling.temperature": 0.6}
WINDOWS = [[{"sample": 4 * w + i, "answer": "x" * i, "response": "r\u2028\n"} for i in range(3)] for w in range(4)]


def opened(folder: Path, settings: dict[str, Any] = SETTINGS) -> SampleStore:
    """Closed again at once, so that the next one may have the folder."""
    store = SampleStore(folder, settings, len(WINDOWS))
    store.close()
    return store


def write(folder: Path, windows: int = len(WINDOWS)) -> SampleStore:
    store = opened(folder)
    for number in range(len(store.windows), windows):
        store.append(WINDOWS[number], {"prompts": 3, "counts": {"correct": number}})
    return store


def test_samples_come_back_without_their_texts(tmp_path):
    store = write(tmp_path / "a")
    expected = [{key: row[key] for key in ("sample", "answer")} for window in WINDOWS for row in window]
    assert list(store.samples()) == expected == list(opened(tmp_path / "a").samples())
    assert [window["counts"] for window in store.windows] == [{"correct": n} for n in range(4)]
    assert list(opened(tmp_path / "b").samples()) == []


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@given(data=st.data())
def test_a_kill_at_any_byte_leaves_the_same_files_in_the_end(tmp_path_factory, data):
    """Samples are written first, then the line of their window: the log is cut at any byte, the samples beyond it."""
    whole, cut = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut")
    write(whole)
    log, samples = (whole / "windows.jsonl").read_bytes(), (whole / "samples.jsonl").read_bytes()
    kept = log[: data.draw(st.integers(0, len(log)))]
    complete = kept[: kept.rfind(b"\n") + 1].splitlines()
    least = json.loads(complete[-1])["samples_end"] if complete else 0
    write(cut, 0)
    (cut / "windows.jsonl").write_bytes(kept)
    (cut / "samples.jsonl").write_bytes(samples[: data.draw(st.integers(least, len(samples)))])
    assert len(opened(cut).windows) == len(complete)
    write(cut)
    assert bytes_of(cut) == bytes_of(whole)


def test_half_a_surrogate_pair_of_hostile_output_can_be_written(tmp_path):
    store = opened(tmp_path)
    store.append([{"answer": "\ud800", "sample": 0}], {"prompts": 1})
    assert list(store.samples()) == [{"answer": "?", "sample": 0}]


def test_other_settings_and_damaged_files_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"sampling\.temperature: 0\.6 then, 1\.0 now\); another output_dir"):
        opened(tmp_path, {**SETTINGS, "sampling.temperature": 1.0})
    with pytest.raises(UserError, match="adapter: None then, 'a' now"):
        opened(tmp_path, {**SETTINGS, "adapter": "a"})
    (tmp_path / "samples.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"samples\.jsonl is shorter than \d+ bytes; remove"):
        opened(tmp_path)
    (tmp_path / "windows.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"windows\.jsonl is damaged"):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        opened(tmp_path / "file")


def test_settings_count_only_once_there_are_samples(tmp_path):
    opened(tmp_path, {"model": "another"})
    assert opened(tmp_path).windows == []
    write(tmp_path)
    assert len(opened(tmp_path).windows) == 4


HOLD = "import sys; from pathlib import Path; from sparrow.recipes.eval_store import SampleStore as S; "
HOLD += "s = S(Path(sys.argv[1]), {}, 1); print(1, flush=True); input()"


def test_a_folder_is_of_one_process_until_it_dies(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "1\n"
    with pytest.raises(UserError, match=f"output_dir: {tmp_path} cannot be locked: another evaluation writes it now"):
        SampleStore(tmp_path, SETTINGS, 4)
    holder.kill()
    holder.communicate()
    opened(tmp_path)


def test_more_windows_than_there_are_and_damaged_lines_are_refused(tmp_path):
    store = write(tmp_path)
    with pytest.raises(UserError, match=r"windows\.jsonl has 4 windows, there are 3; remove"):
        SampleStore(tmp_path, SETTINGS, 3)
    lines = store.windows
    for number, end in ((3, -1), (0, 0), (1, lines[0]["samples_end"]), (2, "x"), (1, None)):
        damaged = [line | {"samples_end": end} if i == number else line for i, line in enumerate(lines)]
        (tmp_path / "windows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in damaged))
        with pytest.raises(UserError, match=r"windows\.jsonl is damaged"):
            opened(tmp_path)


def test_figures_are_of_complete_samples_with_these_settings(tmp_path):
    store = write(tmp_path)
    assert figures_of(tmp_path, SETTINGS) is None
    store.finish({"result": {"mean": 0.1}})
    assert figures_of(tmp_path, {"model": "m"}) == figures_of(tmp_path, SETTINGS) == {"result": {"mean": 0.1}}
    assert figures_of(tmp_path, {"model": "another"}) is figures_of(tmp_path, {"adapter": "a"}) is None
    (tmp_path / "figures.json").write_text("{")
    with pytest.raises(UserError, match="has a damaged file"):
        figures_of(tmp_path, SETTINGS)
    store.finish({})
    log = tmp_path / "windows.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    opened(tmp_path)
    assert figures_of(tmp_path, SETTINGS) is None, "samples are missing again"
