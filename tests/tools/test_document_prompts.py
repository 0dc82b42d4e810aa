"""Prompts cut from documents, with tokens of a character (a length is then plain to see) and of more bytes than one."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from pydoc_data.topics import topics

import document_prompts
import pytest
from document_prompts import cut, stratified_lengths
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from sparrow.components.data import JsonlPrompts
from sparrow.models.char_tokenizer import build_char_tokenizer
from sparrow.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("characters")
    alphabet = sorted({character for text in topics.values() for character in text} | set("äß\n "))
    build_char_tokenizer("".join(alphabet), path, eos="<eos>")
    return path


@pytest.fixture
def texts(tmp_path) -> Path:
    """A folder of small files; every word in it is another."""
    path = tmp_path / "texts"
    (path / "deeper").mkdir(parents=True)
    for number, name in enumerate(["b.txt", "a.md", "deeper/c.rst", "d.py"]):
        words = [f"w{number}{index:03d}" for index in range(300)]
        (path / name).write_text("\n".join(" ".join(words[at : at + 10]) for at in range(0, 300, 10)))
    (path / "not.json").write_text("{}")
    return path


def run(folder: Path, out: Path, *arguments: str | Path) -> int:
    return document_prompts.main(["--tokenizer", str(folder), "--out", str(out), *map(str, arguments)])


def prompts(out: Path) -> list[str]:
    data = JsonlPrompts(str(out))
    return [str(data.example(index).prompt) for index in range(data.size)]


def test_slices_follow_each_other_and_their_lengths_fill_the_range(folder, texts, tmp_path, capsys):
    out = tmp_path / "new" / "prompts.jsonl"
    assert run(folder, out, "--lengths", "100", "600", "--prompts", "10", texts) == 0
    made = prompts(out)
    assert list(out.parent.iterdir()) == [out]
    lengths = sorted(map(len, made))
    for part, length in enumerate(lengths):
        # A part of 50.1 tokens each; a slice ends up to a word and a blank, 6 characters, before its length.
        assert 100 + 50.1 * part - 6 < length <= 100 + 50.1 * (part + 1)
    assert [len(prompt) for prompt in made] not in (lengths, lengths[::-1])
    said = f"10 prompts, {lengths[0]} to {lengths[-1]} tokens, mean {sum(lengths) / 10:,.0f}, "
    assert said in capsys.readouterr().out
    # In the order of the text they are its first words, none left out and none twice: files by name.
    read = " ".join((texts / name).read_text() for name in ("a.md", "b.txt", "d.py", "deeper/c.rst")).split()
    in_order = [
        word for prompt in sorted(made, key=lambda prompt: read.index(prompt.split()[0])) for word in prompt.split()
    ]
    assert in_order == read[: len(in_order)]
    assert in_order != [word for prompt in made for word in prompt.split()], "the first prompts are of all of the text"


def test_the_seed_decides_and_files_may_stand_before_the_options(folder, texts, tmp_path):
    common = ["--lengths", "50", "90", "--prompts", "8"]
    contents = []
    for number, seed in enumerate((0, 0, 1)):
        out = tmp_path / f"{number}.jsonl"
        assert document_prompts.main(
            [str(texts / "a.md"), *common, "--seed", str(seed), "--tokenizer", str(folder), "--out", str(out)]
        ) == 0  # fmt: skip
        contents.append(out.read_text())
    assert contents[0] == contents[1] != contents[2]
    assert all(
        word.startswith("w1") for line in contents[0].splitlines() for word in json.loads(line)["prompt"].split()
    )


def test_without_files_it_is_pythons_documentation(folder, tmp_path):
    out = tmp_path / "prompts.jsonl"
    assert run(folder, out, "--lengths", "2000", "9000", "--prompts", "12") == 0
    text = "\n\n".join(topics.values())
    for prompt in prompts(out):
        assert re.search(rf"(?<!\S){re.escape(prompt)}(?!\S)", text), "a slice of the text, from a word to a word"


def test_each_part_of_the_range_has_one_length():
    lengths = stratified_lengths(1, 1000, 100, random.Random(3))
    assert [(length - 1) // 10 for length in sorted(lengths)] == list(range(100))
    assert stratified_lengths(7, 7, 3, random.Random(0)) == [7, 7, 7]


def test_a_character_of_several_tokens_is_not_cut(tmp_path):
    """Tokens are bytes: the word of four bytes does not fit into three, though its two characters seem to."""
    bytes_of = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = RawTokenizer(models.BPE(vocab=bytes_of, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<eos>", special=True)])
    raw.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    slices = cut("ab äß ab äß ab", [7, 7, 2], Tokenizer(tmp_path))
    assert [(piece.text, piece.tokens) for piece in slices] == [("ab äß", 7), ("ab äß", 7), ("ab", 2)]
    shorter = cut("ab äß ab äß ab", [6, 7, 4], Tokenizer(tmp_path))
    assert [(piece.text, piece.tokens) for piece in shorter] == [("ab", 2), ("äß ab", 7), ("äß", 4)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lengths", "800", "900", "--prompts", "9"], r"need 7,\d\d\d tokens, it has 7,\d\d\d, enough for 8"),
        (["--lengths", "90", "80", "--prompts", "9"], "--lengths 90 80 must ascend from 1"),
        (["--lengths", "80", "90", "--prompts", "0"], "--prompts 0 must be at least 1"),
        (["--lengths", "3", "4", "--prompts", "9"], "tokens are less than the word 'w1000' has"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(folder, texts, tmp_path, capsys, arguments, words):
    out = tmp_path / "prompts.jsonl"
    assert run(folder, out, *arguments, texts) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and re.search(words, error), error
    assert not out.exists()


@pytest.mark.parametrize("name", ["absent.txt", "empty", "latin1.txt"])
def test_what_cannot_be_read_is_named(folder, tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin1.txt").write_bytes("äß".encode("latin-1"))
    assert run(folder, tmp_path / "out.jsonl", "--lengths", "2", "3", "--prompts", "1", tmp_path / name) == 2
    assert f"error: {tmp_path / name}: " in capsys.readouterr().err
