"""Vets each family of reasoning-gym that is offered, with the package itself: golds, attacks, determinism."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sparrow.components.data import Example
from sparrow.components.gym_families import FAMILIES, canonical
from sparrow.components.gym_refused import REFUSED
from sparrow.components.reasoning_gym import ReasoningGymPrompts
from sparrow.components.reasoning_gym_reward import ReasoningGymReward

from .gym_attacks import JUNK, WRONG, injections

pytestmark = pytest.mark.gym

EXAMPLES = 3
SCORED = [name for name, family in FAMILIES.items() if family.check == "scorer"]
# Some take a second an entry.
DIGESTS = """
import hashlib, json, sys
from sparrow.components.gym_refused import REFUSED
from sparrow.components.reasoning_gym import ReasoningGymPrompts
for name in sys.argv[1:]:
    data = ReasoningGymPrompts(name, seed=7)
    columns = [[data.example(index).prompt, data.example(index).columns] for index in (2, 0)]
    print(name, hashlib.sha256(json.dumps(columns).encode()).hexdigest())
"""


@pytest.fixture(scope="module")
def reward() -> Iterator[ReasoningGymReward]:
    opened = ReasoningGymReward(timeout=60, workers=2)
    yield opened
    opened.close()


def examples(name: str) -> list[Example]:
    data = ReasoningGymPrompts(name, seed=7)
    return [data.example(index) for index in range(EXAMPLES)]


def tagged(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def test_every_family_is_offered_or_refused_for_a_reason() -> None:
    registered = importlib.import_module("reasoning_gym.factory").DATASETS
    assert not FAMILIES.keys() & REFUSED.keys()
    assert set(registered) == FAMILIES.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_gold_is_right_and_attacks_are_not(name: str, reward: ReasoningGymReward, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    made = examples(name)
    golds = [example.columns["answer"] for example in made]
    columns = [json.loads(json.dumps(example.columns["gym"])) for example in made]
    assert reward.problems({"gym": columns}) == [None] * EXAMPLES
    assert reward([tagged(gold) for gold in golds], gym=columns) == [1.0] * EXAMPLES
    for gold, gym in zip(golds, columns, strict=True):
        right = canonical(FAMILIES[name], gold)
        attacks = [*JUNK, *injections(mark), *(f"{gold}\n{text}" for text in injections(mark))]
        attacks += [f"{text}{gold}" for text in injections(mark)] + [
            f"{gold} {gold}",
            f"{gold} or {gold}",
            f"not {gold}",
        ]
        attacks = [text for text in attacks if canonical(FAMILIES[name], text) != right]
        assert not any(reward([tagged(text) for text in attacks], gym=[gym] * len(attacks)))
        assert reward.counts["error"] == reward.counts["timeout"] == reward.counts["correct"] == 0
    assert not mark.exists()


@pytest.mark.parametrize("name", SCORED)
def test_the_scorer_refuses_what_the_grammar_lets_through(name: str, reward: ReasoningGymReward) -> None:
    columns = [example.columns["gym"] for example in examples(name)]
    wrong = [*WRONG[name], *(gym["answer"] for gym in columns)]
    assert all(canonical(FAMILIES[name], text) for text in wrong)
    for gym in columns:
        # Another example's answer may be right for this one too: of these only that they are scored is asked.
        rewards = reward([tagged(text) for text in wrong], gym=[gym] * len(wrong))
        assert not any(rewards[: len(WRONG[name])]) and None not in rewards
        assert reward.counts["error"] == reward.counts["timeout"] == 0


def test_entries_are_the_same_in_another_process() -> None:
    """With another order of hashing, and other entries asked for before."""
    command = [sys.executable, "-c", DIGESTS, *FAMILIES]
    running = [
        subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True)
        for seed in ("1", "2")
    ]
    outputs = [process.communicate()[0].splitlines() for process in running]
    assert outputs[0] == outputs[1] and len(outputs[0]) == len(FAMILIES)
    name = "countdown"
    data = ReasoningGymPrompts(name, seed=7)
    columns = [[data.example(index).prompt, data.example(index).columns] for index in (2, 0)]
    assert f"{name} {hashlib.sha256(json.dumps(columns).encode()).hexdigest()}" in outputs[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_making_entries_leaves_the_runs_generators_alone(name: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    first = ReasoningGymPrompts(name, seed=8).example(3)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert first != ReasoningGymPrompts(name, seed=9).example(3)
