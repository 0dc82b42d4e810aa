"""What runs in the sandbox, and nowhere else: reasoning-gym's scorer of one answer."""

import sys
import types
from typing import Any

# It makes entries of the game of life, whose scorer is not asked, and brings matplotlib, which at import looks for a
# folder to write to.
sys.modules["cellpylib"] = types.ModuleType("cellpylib")

import reasoning_gym  # noqa: E402


def score(family: str, settings: dict[str, Any], answer: str, entry: dict[str, Any]) -> Any:
    return reasoning_gym.create_dataset(family, seed=0, size=1, **settings).score_answer(answer, entry)
