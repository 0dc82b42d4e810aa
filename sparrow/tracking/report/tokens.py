"""A sample as HTML: its tokens coloured by acceptance, the lowest ones marked and listed."""

from __future__ import annotations

from collections.abc import Sequence

from sparrow.tracking.report.samples import NOT_MEASURED, Sample, Samples
from sparrow.tracking.report.text import escaped, number
from sparrow.tracking.samples import shorten

MOST_CHARACTERS = 4000
MOST_PIECE = 80
# Bounds of alpha in thousandths; below the first is the strongest colour, above the last there is none.
BOUNDS = (100, 300, 500, 700, 900)


def section(samples: Samples, most_bytes: int) -> str:
    """The newest samples that fit, the first of them open."""
    if not samples.rows:
        return "<p>No samples: there is no samples.jsonl, or no whole line in it yet.</p>"
    parts: list[str] = []
    for sample in samples.rows:
        part = _sample(sample, opened=not parts)
        if parts and sum(map(len, parts)) + len(part) > most_bytes:
            break
        parts.append(part)
    left_out = f" The first {samples.skipped / 2**20:,.0f} MB of the file were not read." if samples.skipped else ""
    return f'<p class="note">The newest {len(parts)} samples, newest first.{left_out}</p>{_key()}{"".join(parts)}'


def _key() -> str:
    names = ("below .1", ".1 to .3", ".3 to .5", ".5 to .7", ".7 to .9")
    shades = "".join(f'<i class="a{level}">{name}</i>' for level, name in enumerate(names))
    return f'<p class="tokens key">alpha of a token: {shades} <i>.9 and above</i> <i class="n">not measured</i></p>'


def _sample(sample: Sample, opened: bool) -> str:
    facts = [("reward", sample.reward), *sample.rewards.items(), ("advantage", sample.advantage)]
    facts += [("mean alpha", sample.alpha_mean), ("lowest alpha", sample.alpha_min)]
    words = [f"step {sample.step}", *(f"{escaped(name)} {number(v)}" for name, v in facts if v is not None)]
    if sample.length is not None:
        words.append(f"{sample.length} tokens")
    if sample.terminated is not None:
        words.append("ended by itself" if sample.terminated else "cut at the limit")
    return (
        f"<details{' open' if opened else ''}><summary>{' · '.join(words)}</summary>"
        f"<h4>Prompt</h4><bdi>{escaped(shorten(sample.prompt, MOST_CHARACTERS))}</bdi>"
        f"<h4>Response</h4>{_response(sample)}{_lowest(sample)}</details>"
    )


def _response(sample: Sample) -> str:
    if not sample.tokens:
        return f"<bdi>{escaped(shorten(sample.response, MOST_CHARACTERS))}</bdi>"
    marked = {low["position"] for low in sample.lowest}
    # The row has the first and the last tokens; `omitted` ones are missing in the middle.
    half = (len(sample.tokens) + 1) // 2 if sample.omitted else len(sample.tokens)
    head = _tokens(sample.tokens[:half], sample.alphas[:half], 0, marked)
    if not sample.omitted:
        return head
    tail = _tokens(sample.tokens[half:], sample.alphas[half:], half + sample.omitted, marked)
    return f'{head}<p class="note">... {sample.omitted} tokens left out ...</p>{tail}'


def _tokens(tokens: Sequence[str], alphas: Sequence[int], first: int, marked: set[int]) -> str:
    pieces = [
        f"<i{_class(alpha, first + order in marked)} data-a={alpha}>{escaped(shorten(token, MOST_PIECE))}</i>"
        for order, (token, alpha) in enumerate(zip(tokens, alphas, strict=True))
    ]
    return f'<div class="tokens" data-first="{first}">{"".join(pieces)}</div>'


def _class(alpha: int, marked: bool) -> str:
    level = next((level for level, bound in enumerate(BOUNDS) if alpha < bound), None)
    name = "n" if alpha == NOT_MEASURED else "" if level is None else f"a{level}"
    names = " ".join(filter(None, [name, "low" if marked else ""]))
    return f' class="{names}"' if names else ""


def _lowest(sample: Sample) -> str:
    """The table is what a keyboard or a screen reader has of the colours."""
    if not sample.lowest:
        return ""
    rows = [
        f"<tr><td>{low['position']}</td><td>{number(float(low['alpha']))}</td><td><bdi>{_text(low, 'before')}"
        f"<mark>{_text(low, 'token')}</mark>{_text(low, 'after')}</bdi></td></tr>"
        for low in sample.lowest
    ]
    head = "<tr><th>position</th><th>alpha</th><th>token in its place</th></tr>"
    return f'<h4>Lowest tokens</h4><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _text(low: dict[str, object], key: str) -> str:
    return escaped(shorten(str(low.get(key, "")), MOST_PIECE))
