"""Prompts from documents: a JSONL file for calibrating a checkpoint over long contexts where no data set is at hand.

python tools/document_prompts.py --tokenizer DIR --out prompts.jsonl --lengths 500 8000 --prompts 160 [--seed 0] FILE...

The texts (UTF-8; of a folder all *.txt, *.md, *.rst and *.py below it) are joined and cut into slices that follow each
other. Slice and prompt begin and end with a word. Lengths in tokens are spread evenly over the range: one from each of
`--prompts` equal parts of it, up to a word less; texts and lengths are in random order. Without FILE the text is
Python's own documentation of its language, `pydoc_data.topics`: some 460,000 characters, 100,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from rollout_progress import progress
from tool_results import exit_code

from sparrow.errors import UserError
from sparrow.models.tokenizer import Tokenizer

SUFFIXES = (".txt", ".md", ".rst", ".py")


@dataclass(frozen=True)
class Slice:
    """One prompt, and how many tokens it is when it is encoded by itself."""

    text: str
    tokens: int


def read_texts(paths: Sequence[Path]) -> str:
    """All texts in order, an empty line between them; UserError names what cannot be read."""
    if not paths:
        return "\n\n".join(topics.values())
    return "\n\n".join(_read(file) for path in paths for file in _files(path))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise UserError(f"{path}: no {', '.join('*' + suffix for suffix in SUFFIXES)} in this folder")
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text: {error}") from error


def stratified_lengths(shortest: int, longest: int, count: int, rng: random.Random) -> list[int]:
    """One length from each of `count` equal parts of the range, both ends included, in random order."""
    part = (longest + 1 - shortest) / count
    lengths = [shortest + int((index + rng.random()) * part) for index in range(count)]
    rng.shuffle(lengths)
    return lengths


def cut(text: str, lengths: Sequence[int], tokenizer: Tokenizer) -> Iterator[Slice]:
    """Slices one after the other, each of as many words as fit into its length.

    Raises:
        UserError: the text ends before the last slice, or a word is longer than a slice.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    first, cut_tokens = 0, 0
    for number, length in enumerate(lengths):
        # A word is a token at least.
        ends = [end for _, end in words[first : first + length]]
        start = words[first][0] if ends else len(text)
        fitting = _fitting(text, start, ends, length, tokenizer)
        part = text[start : ends[fitting - 1]] if fitting else ""
        tokens = len(tokenizer.encode(part))
        if first + fitting == len(words) and tokens < length:
            raise UserError(
                f"the text does not suffice: {len(lengths)} prompts of these lengths need {sum(lengths):,} tokens, it "
                f"has {cut_tokens + tokens:,}, enough for {number}; give more files, fewer --prompts or lower --lengths"
            )
        if not fitting:
            raise UserError(f"--lengths: {length} tokens are less than the word {text[start : ends[0]][:60]!r} has")
        yield Slice(part, tokens)
        first, cut_tokens = first + fitting, cut_tokens + tokens


def _fitting(text: str, start: int, ends: Sequence[int], length: int, tokenizer: Tokenizer) -> int:
    """How many of the words from `start` on, with these ends, are at most `length` tokens."""
    ids = tokenizer.encode(text[start : ends[-1]] if ends else "")
    count = bisect_right(ends, start + len(tokenizer.decode(ids[:length])))
    # A character that the last token holds a part of is decoded as one: it seems to fit.
    while count and len(tokenizer.encode(text[start : ends[count - 1]])) > length:
        count -= 1
    return count


def make_prompts(text: str, lengths: Sequence[int], tokenizer: Tokenizer) -> list[Slice]:
    """All slices, with progress on a terminal."""
    started, slices, done = time.perf_counter(), [], 0
    with progress("cutting", sum(lengths)) as report:
        for piece in cut(text, lengths, tokenizer):
            slices.append(piece)
            done += piece.tokens
            report(done, time.perf_counter() - started)
    return slices


def write_prompts(file: Path, slices: Sequence[Slice]) -> None:
    """Written beside, then renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    lines = [json.dumps({"prompt": piece.text}, ensure_ascii=False) for piece in slices]
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(file)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs=2, required=True, metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    # FILE may stand after the options, or before.
    args = parser.parse_intermixed_args(argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    shortest, longest = args.lengths
    if not 1 <= shortest <= longest:
        raise UserError(f"--lengths {shortest} {longest} must ascend from 1")
    if args.prompts < 1:
        raise UserError(f"--prompts {args.prompts} must be at least 1")
    rng = random.Random(args.seed)
    lengths = stratified_lengths(shortest, longest, args.prompts, rng)
    slices = make_prompts(read_texts(args.files), lengths, Tokenizer(args.tokenizer))
    # So that the first prompts are not all from the first file: calibration holds out the last ones.
    rng.shuffle(slices)
    write_prompts(args.out, slices)
    tokens = [piece.tokens for piece in slices]
    print(
        f"{args.out}: {len(tokens)} prompts, {min(tokens):,} to {max(tokens):,} tokens, mean "
        f"{statistics.fmean(tokens):,.0f}, together {sum(tokens):,}"
    )


if __name__ == "__main__":
    sys.exit(main())
