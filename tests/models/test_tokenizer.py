from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparrow.errors import UserError
from sparrow.models.char_tokenizer import build_char_tokenizer
from sparrow.models.decoder_config import DecoderConfig, to_huggingface
from sparrow.models.tokenizer import Tokenizer, tokenizer_of_model

ALPHABET = "ab0 \n.;|#é日𝄞"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.content }};{% endfor %}{% if add_generation_prompt %}#{% endif %}"
    "{% if enable_thinking is defined %}{{ 'a' if enable_thinking else 'b' }}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("characters")
    build_char_tokenizer(ALPHABET, path, eos="$")
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def write_json(path, **content) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))


@given(text=st.text(alphabet=ALPHABET + "$"))
def test_characters_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == [(ALPHABET + "$").index(character) for character in text]
    assert tokenizer.decode(ids) == text


@given(text=st.text(alphabet=ALPHABET), stranger=st.sampled_from("xB1\tÉ本𝄢"))
def test_an_unknown_character_is_named(tokenizer, text, stranger):
    with pytest.raises(UserError) as caught:
        tokenizer.encode(text + stranger)
    assert repr(stranger) in str(caught.value)


def test_special_tokens_are_kept_unless_asked(tokenizer):
    ids = tokenizer.encode("ab$")
    assert tokenizer.decode(ids) == "ab$"
    assert tokenizer.decode(ids, skip_special=True) == "ab"


def test_an_eos_of_its_own_and_one_of_the_alphabet(tmp_path):
    build_char_tokenizer("ab", tmp_path / "word", eos="<eos>")
    word = Tokenizer(tmp_path / "word")
    assert (word.vocab_size, word.eos_ids, word.encode("b<eos>a")) == (3, (2,), [1, 2, 0])
    build_char_tokenizer("a$b", tmp_path / "letter", eos="$")
    letter = Tokenizer(tmp_path / "letter")
    assert (letter.vocab_size, letter.eos_ids, letter.encode("b$a")) == (3, (1,), [2, 1, 0])


def test_the_folder_is_an_ordinary_one(folder):
    plain = AutoTokenizer.from_pretrained(folder)
    assert plain.eos_token == "$"
    assert plain("a b").input_ids == [0, 3, 1]


@pytest.mark.parametrize(("alphabet", "eos"), [("", "$"), ("ab", ""), ("aba", "$")])
def test_alphabets_that_cannot_be(tmp_path, alphabet, eos):
    with pytest.raises(UserError):
        build_char_tokenizer(alphabet, tmp_path, eos)


def test_eos_ids_are_the_union_of_all_sources(tmp_path):
    build_char_tokenizer("abcd", tmp_path, eos="$")
    write_json(tmp_path / "generation_config.json", eos_token_id=[2, 0])
    write_json(tmp_path / "config.json", model_type="llama", eos_token_id=1)
    assert Tokenizer(tmp_path).eos_ids == (0, 1, 2, 4)
    write_json(tmp_path / "config.json", eos_token_id=None)
    assert Tokenizer(tmp_path).eos_ids == (0, 2, 4)


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    build_char_tokenizer("abcd", tmp_path, eos="$")
    (tmp_path / "generation_config.json").unlink()
    write_json(tmp_path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="nothing would end a response"):
        Tokenizer(tmp_path)


def test_chat_template(tmp_path):
    build_char_tokenizer(ALPHABET, tmp_path, eos="$")
    write_json(tmp_path / "tokenizer_config.json", chat_template=TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    messages = [{"role": "user", "content": "0"}, {"role": "user", "content": "a"}]
    for switch, ending in ((None, ""), (True, "a"), (False, "b")):
        assert tokenizer.decode(tokenizer.apply_chat_template(messages, enable_thinking=switch)) == "0;a;#" + ending
    with pytest.raises(UserError, match="no system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "a"}], enable_thinking=None)


def test_no_chat_template(tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], enable_thinking=None)


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match="is not a folder"):
        Tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no tokenizer.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        Tokenizer(tmp_path)


def model_folder(folder, vocab_size: int, **config):
    """A folder with a tokenizer and a config.json, no weights."""
    build_char_tokenizer(ALPHABET, folder, eos="$")
    sizes = DecoderConfig(
        vocab_size=vocab_size, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8
    )
    (folder / "config.json").write_text(json.dumps(to_huggingface(sizes, torch.float32, config)))
    return folder


def test_an_embedding_may_have_more_rows_than_there_are_tokens(tmp_path):
    tokens = len(ALPHABET) + 1
    for rows in (tokens, tokens + 100):
        assert tokenizer_of_model(model_folder(tmp_path, rows, eos_token_id=tokens - 1)).eos_ids == (tokens - 1,)


def test_a_token_without_an_embedding(tmp_path):
    last = len(ALPHABET)
    with pytest.raises(UserError, match=f"ids up to {last}, and vocab_size of config.json is {last}: it is not the"):
        tokenizer_of_model(model_folder(tmp_path, last))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_tokenizer_of_another_model(tmp_path, name):
    write_json(model_folder(tmp_path, 151_936) / name, eos_token_id=[1, 151_645])
    with pytest.raises(UserError, match=f"{name}: eos_token_id 151645 is no token of the tokenizer, whose ids end at"):
        tokenizer_of_model(tmp_path)
