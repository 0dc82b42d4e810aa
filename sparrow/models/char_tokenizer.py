"""A character-level tokenizer as an ordinary Hugging Face folder, for small models trained from nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from sparrow.errors import UserError


def build_char_tokenizer(alphabet: str, path: Path | str, eos: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json with one token per character.

    Token i is the i-th character of `alphabet`. There is no unknown token: encoding any other character raises.

    Args:
        alphabet: the characters, each once; may contain spaces and line breaks.
        path: folder to write into, made if need be.
        eos: text of the end-of-sequence token: a character of the alphabet, or a word of its own such as `<eos>`,
            which then gets the last id.

    Raises:
        UserError: an empty alphabet or EOS, or a character that stands twice.
    """
    _check_alphabet(alphabet, eos)
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary.setdefault(eos, len(vocabulary))
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(eos, special=True, normalized=False)])
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": vocabulary[eos]})


def _check_alphabet(alphabet: str, eos: str) -> None:
    if not alphabet or not eos:
        raise UserError(f"alphabet and eos must not be empty, not {alphabet!r} and {eos!r}")
    repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if repeated:
        raise UserError(f"alphabet: {', '.join(map(repr, repeated))} stands more than once")


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
