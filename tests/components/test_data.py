"""JSONL prompts: order, epochs, columns, and each way a file can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow.components.data import Example, JsonlPrompts
from sparrow.errors import UserError


def written(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def numbered(tmp_path: Path, count: int) -> str:
    return written(tmp_path, *(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(count)))


def answers(data: JsonlPrompts, start: int, stop: int) -> list[int]:
    return [data.example(index).columns["answer"] for index in range(start, stop)]


def test_file_order_goes_round_without_a_seed(tmp_path: Path) -> None:
    data = JsonlPrompts(numbered(tmp_path, 3))
    assert data.size == 3
    assert answers(data, 0, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert data.example(4) == Example("p1", {"answer": 1})


def test_each_epoch_is_a_permutation_of_its_own_and_the_same_every_time(tmp_path: Path) -> None:
    file = numbered(tmp_path, 20)
    data = JsonlPrompts(file, shuffle_seed=7)
    epochs = [answers(data, 20 * epoch, 20 * epoch + 20) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] != list(range(20))
    resumed = JsonlPrompts(file, shuffle_seed=7)
    assert answers(resumed, 45, 60) == epochs[2][5:]
    # Going back is no different.
    assert answers(resumed, 3, 20) == epochs[0][3:]
    assert answers(JsonlPrompts(file, shuffle_seed=8), 0, 20) != epochs[0]


def test_the_shuffle_does_not_change_with_versions(tmp_path: Path) -> None:
    assert answers(JsonlPrompts(numbered(tmp_path, 6), shuffle_seed=0), 0, 6) == [0, 5, 1, 4, 3, 2]


def test_messages_blank_lines_byte_order_mark_and_columns(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße"}]
    first = "\ufeff" + json.dumps({"question": messages, "gold": [1]})
    file = written(tmp_path, first, "", '{"question": "b", "level": 2}')
    data = JsonlPrompts(file, prompt_key="question")
    assert data.example(0) == Example(messages, {"gold": [1], "level": None})
    assert data.example(1) == Example("b", {"gold": None, "level": 2})


def test_limit_takes_the_first_lines(tmp_path: Path) -> None:
    assert JsonlPrompts(numbered(tmp_path, 5), limit=2).size == 2
    assert JsonlPrompts(numbered(tmp_path, 5), limit=9).size == 5
    with pytest.raises(UserError, match="limit must be at least 1, got 0"):
        JsonlPrompts(numbered(tmp_path, 5), limit=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('["prompt"]', "expected a JSON object, got a list"),
        ('{"Prompt": "a"}', "no key 'prompt'; there are 'Prompt'"),
        ("{}", "no key 'prompt'; there are none"),
        ('{"prompt": ""}', "must be text or a list"),
        ('{"prompt": []}', "must be text or a list"),
        ('{"prompt": null}', "must be text or a list"),
        ('{"prompt": [{"role": "user"}]}', "must be text or a list"),
        ('{"prompt": "a", "completions": 1}', "no column may be called 'completions'"),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=f"prompts.jsonl, line 3: .*{message}"):
        JsonlPrompts(written(tmp_path, '{"prompt": "a"}', "", line))


@pytest.mark.parametrize("content", [b"", b"\n \n", b'{"prompt": "\xff"}\n', None])
def test_files_that_give_nothing(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"prompts\.jsonl"):
        JsonlPrompts(str(file))
