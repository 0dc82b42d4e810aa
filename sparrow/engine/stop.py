"""Stop strings: a response ends with the first token whose text completes one.

That token stays in the response, with all its characters, also those past the stop string; later tokens are dropped.
A stop string may stretch over tokens. Only the response is searched, as text written by the tokenizer, special tokens
included; what stands in the prompt, or begins there, does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence


class StopStrings:
    """Looks for stop strings in the new tokens of growing responses.

    Args:
        stop: the strings; none of them empty.
        decode: text of token ids.
    """

    def __init__(self, stop: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.stop, self.decode = stop, decode
        # Earlier tokens to look at: a token is at least one byte of text, so a string of n bytes that ends in a new one
        # begins at most n - 1 before it. One more, because decoders treat the first differently (its leading space).
        self.reach = max(len(string.encode()) for string in stop)
        self._tails: dict[int, list[int]] = defaultdict(list)

    def kept(self, sequence: int, tokens: list[int]) -> int | None:
        """How many of a response's new tokens stay where one completes a stop string, else None."""
        tail = self._tails[sequence]
        if self._found(tail + tokens):
            return next(n for n in range(1, len(tokens) + 1) if self._found(tail + tokens[:n]))
        self._tails[sequence] = (tail + tokens)[-self.reach :]
        return None

    def _found(self, tokens: list[int]) -> bool:
        text = self.decode(tokens)
        return any(string in text for string in self.stop)
