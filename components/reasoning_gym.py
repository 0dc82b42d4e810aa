"""Procedural tasks of reasoning-gym (`pip install 'sparrow-rl[gym]'`) as prompts. Only the families of `gym_families`.

The package is imported here to make entries from a seed, an index and the config's settings; nothing that a model wrote
gets here. Answers are judged by `sparrow.components.reasoning_gym_reward`.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sparrow.components.data import Epochs, Example
from sparrow.components.gym_families import FAMILIES, canonical, judged_here
from sparrow.components.gym_refused import REFUSED
from sparrow.components.row_fields import chat as messages
from sparrow.errors import UserError
from sparrow.registry import did_you_mean
from sparrow.sandbox.inside.values import encode

INSTRUCTION = "Give your final answer between <answer> and </answer>."
_DRAWS = 16  # for one example: an entry whose gold answer its own rule refuses is left out


class ReasoningGymPrompts:
    """An endless stream of tasks, each made from (seed, index) alone; the same on all processes.

    Columns: `gym`, what the reward needs (plain JSON); `answer`, a right one; `source`, reasoning_gym/<family>; `id`.

    Args:
        families: one name, or names with their weights.
        seed: another seed is another stream.
        settings: by family, arguments of its configuration in reasoning-gym.
        instruction: is put after each question.
        chat: the prompt is a user's message, for the model's chat template; else text.
        system: message before it.

    Raises:
        UserError: the package is missing; a family is not offered; a setting that its family does not take.
    """

    size = None

    def __init__(
        self,
        families: str | dict[str, float],
        seed: int = 0,
        settings: dict[str, dict[str, Any]] | None = None,
        instruction: str = INSTRUCTION,
        chat: bool = True,
        system: str | None = None,
    ) -> None:
        weights = {families: 1.0} if isinstance(families, str) else families
        if not weights or not all(0 < weight < math.inf for weight in weights.values()):
            raise UserError(f"families: {weights} must be names with weights above 0")
        for name in [*weights, *(settings or {})]:
            _check_offered(name)
        if idle := sorted(set(settings or {}) - set(weights)):
            raise UserError(f"settings: {idle[0]!r} is not one of the families; there are {', '.join(weights)}")
        self._weights, self._seed, self._settings = weights, seed, settings or {}
        self._instruction, self._chat, self._system = instruction, chat, system
        self._datasets = {name: _dataset(name, seed, self._settings.get(name, {})) for name in weights}

    def example(self, index: int) -> Example:
        """Task number `index`."""
        generator = random.Random(f"{self._seed}/{index}")
        (name,) = generator.choices(list(self._weights), list(self._weights.values()))
        for draw in range(index * _DRAWS, (index + 1) * _DRAWS):
            entry = self._datasets[name][draw]
            gym = _gym(name, entry, self._settings.get(name, {}))
            if gold_problem(gym) is None:
                break
        else:
            raise UserError(f"reasoning-gym: {name}: none of {_DRAWS} entries has an answer that is right by its rule")
        question = f"{entry['question'].rstrip()}\n\n{self._instruction}".rstrip()
        prompt: Any = messages(question, self._system) if self._chat else question
        columns = {"gym": gym, "answer": gym["answer"], "source": f"reasoning_gym/{name}"}
        return Example(prompt, {"id": f"{name}-{self._seed}-{draw}", **columns})


class ReasoningGymSet:
    """The first `size` tasks of `ReasoningGymPrompts`, epoch after epoch, checked before the first step.

    Args:
        size: tasks in an epoch.
        shuffle_seed: shuffles each epoch in an order of its own; None keeps that of the stream.
        families, seed, settings, instruction, chat, system: of `ReasoningGymPrompts`.
    """

    def __init__(
        self,
        size: int,
        families: str | dict[str, float],
        seed: int = 0,
        settings: dict[str, dict[str, Any]] | None = None,
        instruction: str = INSTRUCTION,
        chat: bool = True,
        system: str | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
        if size < 1:
            raise UserError(f"size must be at least 1, got {size}")
        stream = ReasoningGymPrompts(families, seed, settings, instruction, chat, system)
        self._epochs = Epochs([stream.example(index) for index in range(size)], shuffle_seed)

    @property
    def size(self) -> int:
        return len(self._epochs.examples)

    def example(self, index: int) -> Example:
        return self._epochs.example(index)

    def examples(self) -> Sequence[Example]:
        return self._epochs.examples

    def drop(self, indices: set[int]) -> None:
        self._epochs = self._epochs.without(indices)


def gold_problem(gym: Mapping[str, Any]) -> str | None:
    """Why an example's gold answer cannot be used, as far as that can be said without its scorer."""
    family = FAMILIES[gym["family"]]
    formed = canonical(family, gym["answer"])
    if formed is None or judged_here(family, formed, gym["answer"], gym["metadata"]) is False:
        return f"answer {gym['answer']!r:.60} is not right by the rule of {gym['family']}"
    return None


def _check_offered(name: str) -> None:
    if name in REFUSED:
        raise UserError(f"reasoning-gym: family {name!r} is not offered: {REFUSED[name]}")
    if name not in FAMILIES:
        raise UserError(
            f"reasoning-gym: no family {name!r} is offered{did_you_mean(name, FAMILIES)}; docs/tasks.md lists them"
        )


def _dataset(name: str, seed: int, settings: Mapping[str, Any]) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise UserError(f"reasoning-gym cannot be imported ({error}): pip install 'sparrow-rl[gym]'") from error
    if own := {"seed", "size"} & set(settings):
        raise UserError(f"settings.{name}: {sorted(own)[0]} is not a setting; entries are drawn by the data's own seed")
    try:
        return gym.create_dataset(name, seed=_first_seed(seed, name), size=1, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"settings.{name}: reasoning-gym refuses {dict(settings)}: {error}") from error


def _first_seed(seed: int, name: str) -> int:
    """Entry i of seed s is entry i + 1 of seed s - 1 there: streams are kept apart by the distance of their seeds."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")


def _gym(name: str, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    family, metadata = FAMILIES[name], entry["metadata"]
    answer = family.gold(metadata) if family.gold else entry["answer"]
    needed = {key: encode(metadata[key]) for key in family.metadata}
    return {"family": name, "answer": str(answer), "metadata": needed, "settings": dict(settings)}
