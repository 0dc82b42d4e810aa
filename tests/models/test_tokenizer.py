from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sparrow.errors import UserError
from sparrow.models.char_tokenizer import build_char_tokenizer
from sparrow.models.tokenizer import Tokenizer

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
