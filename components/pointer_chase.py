"""Pointer chasing with a running sum: a procedural, verifiable task for character-level models.

The prompt is a shuffled table of four-character entries and the question. `(ak)` reads "a points to k"; one entry
points to `.`, the end of the path; `?a0:` asks to start at a with the sum 0:

    (kc)(ak)(z.)...?a0:

The response takes one hop per ten characters: the entry restated, the old sum, the value of the node arrived at (its
place in the alphabet modulo 10), the new sum modulo 10; at the end of the path, the answer and the end marker:

    (ak)0+0=0;(kc)0+2=2; ... (z.)#z2$

Every hop is one exact look-up in the prompt and one slip loses the reward: the paper's few rotten tokens in miniature.
"""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from sparrow.components.data import Example
from sparrow.errors import UserError

SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
END = "$"


class PointerChase:
    """Endless problems, each made from (seed, index) alone; columns `answer` and `response`, a full worked response.

    The path goes from the start through `hops` hops; the other nodes form a loop of distractors. Entries and question
    are four characters each, so that with pages of 4, 8 or 16 tokens every entry lies within one page.

    Args:
        nodes: entries in the table, at most 52.
        hops: length of the path, below `nodes`.
        seed: another seed is another stream.
    """

    size = None

    def __init__(self, nodes: int, hops: int, seed: int = 0) -> None:
        if not 1 <= hops < nodes <= len(SYMBOLS):
            raise UserError(f"PointerChase needs 1 <= hops < nodes <= {len(SYMBOLS)}, got hops {hops}, nodes {nodes}")
        self.nodes, self.hops, self.seed = nodes, hops, seed

    def example(self, index: int) -> Example:
        """Problem number `index`."""
        generator = random.Random(f"{self.seed}/{index}")
        names = generator.sample(SYMBOLS, self.nodes)
        path, loop = names[: self.hops + 1], names[self.hops + 1 :]
        target = dict(pairwise([*path, "."])) | dict(pairwise([*loop, *loop[:1]]))
        generator.shuffle(names)
        table = "".join(f"({node}{target[node]})" for node in names)
        response, answer = _solution(path)
        return Example(f"{table}?{path[0]}0:", {"answer": answer, "response": response})


def _solution(path: list[str]) -> tuple[str, str]:
    """The worked response and the answer."""
    total, text = 0, ""
    for node, following in pairwise(path):
        value = SYMBOLS.index(following) % 10
        text += f"({node}{following}){total}+{value}={(total + value) % 10};"
        total = (total + value) % 10
    answer = f"{path[-1]}{total}"
    return f"{text}({path[-1]}.)#{answer}{END}", answer


def pointer_reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    """1.0 where the only `#` of the response is followed by the answer and nothing else, else 0.0.

    The end marker is the EOS token and does not reach the reward; a response that was cut has no complete answer.
    """
    return [float(text.partition("#")[2] == gold) for text, gold in zip(completions, answer, strict=True)]


def pointer_progress(completions: list[str], response: list[str], **_: Any) -> list[float | None]:
    """Share of the worked response that is reproduced before the first slip: partial credit, in [0, 1]."""
    shares: list[float | None] = []
    for text, worked in zip(completions, response, strict=True):
        gold = worked.removesuffix(END)
        same = next((i for i, (a, b) in enumerate(zip(text, gold, strict=False)) if a != b), min(len(text), len(gold)))
        shares.append(same / len(gold))
    return shares
