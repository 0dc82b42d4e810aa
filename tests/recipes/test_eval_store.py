"""Samples on disk: whatever a kill leaves, the next run goes on from whole windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.errors import UserError
from sparrow.recipes.eval_store import SampleStore

SETTINGS = {"model": "m", "sampling.temperature": 0.6}
WINDOWS = [[{"sample": 4 * w + i, "answer": "x" * i, "response": "r\u2028\n"} for i in range(3)] for w in range(4)]


def write(folder: Path, windows: int = len(WINDOWS)) -> SampleStore:
    store = SampleStore(folder, SETTINGS)
    for number in range(len(store.windows), windows):
        store.append(WINDOWS[number], {"prompts": 3, "counts": {"correct": number}})
    return store


def test_samples_come_back_without_their_texts(tmp_path):
    store = write(tmp_path / "a")
    expected = [{key: row[key] for key in ("sample", "answer")} for window in WINDOWS for row in window]
    assert list(store.samples()) == expected == list(SampleStore(tmp_path / "a", SETTINGS).samples())
    assert [window["counts"] for window in store.windows] == [{"correct": n} for n in range(4)]
    assert list(SampleStore(tmp_path / "b", SETTINGS).samples()) == []


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
    assert len(SampleStore(cut, SETTINGS).windows) == len(complete)
    write(cut)
    assert bytes_of(cut) == bytes_of(whole)


def test_half_a_surrogate_pair_of_hostile_output_can_be_written(tmp_path):
    store = SampleStore(tmp_path, SETTINGS)
    store.append([{"answer": "\ud800", "sample": 0}], {"prompts": 1})
    assert list(store.samples()) == [{"answer": "?", "sample": 0}]


def test_other_settings_and_damaged_files_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"sampling\.temperature: 0\.6 then, 1\.0 now\); another output_dir"):
        SampleStore(tmp_path, {**SETTINGS, "sampling.temperature": 1.0})
    with pytest.raises(UserError, match="adapter: None then, 'a' now"):
        SampleStore(tmp_path, {**SETTINGS, "adapter": "a"})
    (tmp_path / "samples.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"samples\.jsonl is shorter than \d+ bytes; remove"):
        SampleStore(tmp_path, SETTINGS)
    (tmp_path / "windows.jsonl").write_text("[]\n")
    with pytest.raises(UserError, match=r"windows\.jsonl is damaged"):
        SampleStore(tmp_path, SETTINGS)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        SampleStore(tmp_path / "file", SETTINGS)


def test_settings_count_only_once_there_are_samples(tmp_path):
    SampleStore(tmp_path, {"model": "another"})
    assert SampleStore(tmp_path, SETTINGS).windows == []
    write(tmp_path)
    assert len(SampleStore(tmp_path, SETTINGS).windows) == 4
