"""The tokenizer of a Hugging Face folder: text to ids and back, chat template, end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from sparrow.errors import UserError
from sparrow.models.decoder_config import read_config, read_json


class Tokenizer:
    """Wraps transformers' AutoTokenizer; reads local files only and runs no code of the checkpoint.

    Attributes:
        path: the folder, for messages.
        eos_ids: every id that ends a sequence: the union of generation_config.json, config.json and tokenizer, sorted.
    """

    def __init__(self, path: Path | str) -> None:
        """Loads the tokenizer of a folder.

        Raises:
            UserError: no folder, no tokenizer files, files that cannot be read, or no EOS token anywhere.
        """
        self.path = Path(path)
        self._tokenizer = _load(self.path)
        self.eos_ids: tuple[int, ...] = tuple(sorted(self._collect_eos_ids()))
        if not self.eos_ids:
            raise UserError(
                f"{self.path}: no eos_token_id in generation_config.json or config.json, no eos_token in"
                " tokenizer_config.json: nothing would end a response"
            )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; a model's embedding is often padded beyond it."""
        return len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text` as it stands: no BOS, EOS or template is added.

        Raises:
            UserError: the vocabulary cannot express the text (character-level tokenizers).
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:
            # The Rust library raises bare Exception, whose message names neither the character nor the file.
            unknown = sorted(set(text) - self._tokenizer.get_vocab().keys())
            if not unknown:
                raise
            raise UserError(f"{self.path}: no token for {', '.join(map(repr, unknown))} in {_excerpt(text)}") from error

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids; special tokens are written out unless `skip_special`."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        )

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], enable_thinking: bool | None) -> list[int]:
        """Token ids of a conversation, up to and including the opening of the assistant's answer.

        Args:
            messages: dicts with `role` and `content`.
            enable_thinking: passed on to the template (Qwen3 understands it); None leaves the template its default.

        Raises:
            UserError: the tokenizer has no chat template, or the template refuses the messages.
        """
        if not self._tokenizer.chat_template:
            raise UserError(f"{self.path}: the tokenizer has no chat template; use prompts of plain text")
        switches = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **switches
            )
        except TemplateError as error:
            raise UserError(f"{self.path}: the chat template refuses the messages: {error}") from error
        return self.encode(str(text))

    def check_fits(self, embeddings: int) -> None:
        """UserError where a token has no row of the embedding, or an EOS id of the checkpoint is no token."""
        known = set(self._tokenizer.get_vocab().values())
        if max(known) >= embeddings:
            raise UserError(
                f"{self.path}: the tokenizer has ids up to {max(known)}, and vocab_size of config.json is "
                f"{embeddings}: it is not the tokenizer of this model"
            )
        for name, ids in self._eos_ids_by_file().items():
            if foreign := sorted(ids - known):
                raise UserError(
                    f"{self.path / name}: eos_token_id {foreign[0]} is no token of the tokenizer, whose ids end at "
                    f"{max(known)}: it is not the tokenizer of this model"
                )

    def _collect_eos_ids(self) -> set[int]:
        return ({self._tokenizer.eos_token_id} - {None}).union(*self._eos_ids_by_file().values())

    def _eos_ids_by_file(self) -> dict[str, set[int]]:
        ids = {}
        for name in ("generation_config.json", "config.json"):
            if (self.path / name).is_file():
                value = read_json(self.path / name).get("eos_token_id")
                ids[name] = set(value if isinstance(value, list) else [value]) - {None}
        return ids


def tokenizer_of_model(path: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint's folder; UserError where the two do not fit. The weights are not looked at."""
    config = read_config(Path(path))
    tokenizer = Tokenizer(path)
    tokenizer.check_fits(config.vocab_size)
    return tokenizer


def _load(path: Path) -> Any:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; a tokenizer is read from a local Hugging Face folder")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise UserError(f"{path} holds no tokenizer.json, tokenizer.model or vocab.json")
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers raises ValueError, OSError, KeyError or bare Exception here, depending on the broken file.
        raise UserError(f"{path}: the tokenizer cannot be loaded: {error}") from error


def _excerpt(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")
