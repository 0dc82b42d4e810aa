"""Rows of local files of every kind, splits of folders, and each way a file can be wrong."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from sparrow.components.tables import open_table
from sparrow.errors import UserError

ROWS: list[dict[str, Any]] = [
    {"q": "2024-01-01", "n": {"x": [1, 2]}},
    {"q": "Grüße\u2028{a}", "n": {"x": []}},
]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if path.name.endswith(".jsonl"):
        path.write_text(lines, encoding="utf-8")
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
    return path


def rows(*arguments: Any, **keys: Any) -> list[dict[str, Any]]:
    return [row for _, row in open_table(*map(str, arguments), **keys).rows()]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "parquet", "arrow"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    file = write(tmp_path / f"a.{suffix}")
    assert rows(file) == ROWS
    assert rows(tmp_path) == ROWS
    assert open_table(str(tmp_path)).files == (file,)


def test_a_json_file_may_be_one_object_over_several_lines(tmp_path: Path) -> None:
    for indent in (None, 0, 4):
        (tmp_path / "a.json").write_text(json.dumps(ROWS[1], indent=indent) + "\n")
        assert rows(tmp_path / "a.json") == ROWS[1:]
    (tmp_path / "a.json").write_text('{\n "q": 1,\n')
    with pytest.raises(UserError, match=r"a\.json: not valid JSON"):
        rows(tmp_path / "a.json")
    long = {"q": "x" * 2**21}
    (tmp_path / "a.json").write_text(2 * (json.dumps(long) + "\n"))
    assert rows(tmp_path / "a.json") == [long, long]


def test_csv_arrow_files_and_json_lines_under_the_name_json(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('q,n\n"a, ""b""\nc",007\n')
    assert rows(tmp_path / "a.csv") == [{"q": 'a, "b"\nc', "n": "007"}]
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert rows(tmp_path / "b.arrow") == ROWS
    write(tmp_path / "c.jsonl").rename(tmp_path / "c.json")
    assert rows(tmp_path / "c.json") == ROWS


def test_rows_say_where_they_stand_and_can_be_limited(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl")
    file.write_text("\n" + file.read_text())
    assert [where for where, _ in open_table(str(file)).rows()] == [f"{file}, line 2", f"{file}, line 3"]
    assert len(list(open_table(str(file)).rows(limit=1))) == 1
    assert [w for w, _ in open_table(str(write(tmp_path / "b.parquet"))).rows(2)][1] == f"{tmp_path}/b.parquet, row 2"


@pytest.mark.parametrize("layout", ["{}-00000-of-00002.parquet", "{}.parquet", "data/{}-1.parquet", "{}/0.parquet"])
def test_splits_are_told_apart_by_the_names_of_files_and_folders(tmp_path: Path, layout: str) -> None:
    write(tmp_path / layout.format("train"), ROWS[:1])
    write(tmp_path / layout.format("test"), ROWS[1:])
    assert rows(tmp_path, split="train") == ROWS[:1]
    assert rows(tmp_path, split="test") == ROWS[1:]
    with pytest.raises(UserError, match="split: must be given, there are files of train, test"):
        open_table(str(tmp_path))
    with pytest.raises(UserError, match="split: no file of split 'tests'; there are"):
        open_table(str(tmp_path), split="tests")


def test_files_that_name_no_split_are_of_train(tmp_path: Path) -> None:
    write(tmp_path / "set-53K.jsonl")
    assert rows(tmp_path, split="train") == ROWS
    with pytest.raises(UserError, match="no file of split 'test'"):
        open_table(str(tmp_path), split="test")


def test_a_configuration_is_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train-0.parquet", ROWS[:1])
    write(tmp_path / "socratic" / "train-0.parquet", ROWS[1:])
    assert rows(tmp_path, name="main", split="train") == ROWS[:1]
    with pytest.raises(UserError, match="name: no folder 'mains'"):
        open_table(str(tmp_path), name="mains")


def test_parts_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "train-00001.jsonl", ROWS[1:])
    write(tmp_path / "train-00000.jsonl", ROWS[:1])
    assert rows(tmp_path) == ROWS


def test_saved_to_disk(tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    data.select([1, 0]).save_to_disk(tmp_path / "one")
    assert rows(tmp_path / "one") == ROWS[::-1]
    DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "both")
    assert rows(tmp_path / "both", split="test") == ROWS[:1]
    for split, words in ((None, "split: must be given; there are train, test"), ("dev", "split: no split 'dev'")):
        with pytest.raises(UserError, match=words):
            open_table(str(tmp_path / "both"), split=split)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "no rows in it"),
        ("a.jsonl", b"\n\n", "no rows in it"),
        ("a.json", b"[]", "no rows in it"),
        ("a.csv", b"q,n\n", "no rows in it"),
        ("a.jsonl", b'{"q": "\xff"}\n', "cannot be read as UTF-8"),
        ("a.json", b'[{"q": "\xff"}]\n', "cannot be read as UTF-8"),
        ("a.csv", b"q\n\xff\n", "cannot be read as UTF-8"),
        ("a.jsonl", b'{"q": 1}\n{"q":\n', "line 2: not valid JSON"),
        ("a.jsonl", b"[" * 100_000, "not valid JSON"),
        ("a.json", b"[1]", "item 1: expected a JSON object, got a int"),
        ("a.jsonl", b"[1]", "line 1: expected a JSON object, got a list"),
        ("a.csv", b"q,n\n1\n", "row 1: not as many fields"),
        ("a.csv", b"q,n\n1,2,3\n", "row 1: not as many fields"),
        ("a.csv", b'q,n\n1,"2', "cannot be read as csv"),
        ("a.parquet", b"PAR1", "cannot be read as parquet"),
        ("a.parquet", b"", "cannot be read as parquet"),
        ("a.arrow", b"ARROW1\0\0", "cannot be read as arrow"),
        ("a.arrow", b"no", "cannot be read as arrow"),
        ("a.jsonl.gz", b'{"q": 1}\n', "cannot be read as jsonl.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"q": 1}\n' * 99, mtime=0)[:-9], "cannot be read as jsonl.gz"),
        ("a.txt", b"hello", "not a kind of file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows(file)
    assert str(file) in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


def test_text_that_is_not_utf8_inside_a_table(tmp_path: Path) -> None:
    raw = pa.array([b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"q": raw}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as UTF-8"):
        rows(tmp_path / "a.parquet")


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no data files"):
        open_table(str(tmp_path))
    for path in ("./absent", "/absent/x", "a/b/c", "absent.jsonl"):
        with pytest.raises(UserError, match=f"{path}: no such file or folder"):
            open_table(path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="absent/set: no such local path, and the hub's data set cannot be had"):
        open_table("absent/set")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="no data files"):
        open_table(str(tmp_path))
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.parquet")
    with pytest.raises(UserError, match="files of several kinds"):
        open_table(str(tmp_path))


def test_a_damaged_gzip_and_a_year_that_python_lacks_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl.gz"
    damaged = bytearray(gzip.compress(b"".join(b'{"prompt": "%d"}\n' % number for number in range(5000))))
    damaged[17] ^= 0x55
    file.write_bytes(damaged)
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: cannot be read as jsonl\.gz"):
        list(open_table(str(file)).rows())
    table = tmp_path / "b.parquet"
    pq.write_table(pa.table({"x": pa.array([-(2**62)], pa.timestamp("us"))}), table)
    with pytest.raises(UserError, match=r"b\.parquet: cannot be read as parquet"):
        list(open_table(str(table)).rows())
