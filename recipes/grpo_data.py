"""The prompts of a run, looked at before the first step: too long ones and unusable gold answers leave.

All ranks drop the same prompts: what a verifier says of a gold answer is asked on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparrow.components.data import Example, PromptData
from sparrow.components.data_checks import Problems, check_prompts
from sparrow.components.reward import ChecksGold, NamedReward
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.training import distributed


def check_data(
    key: str,
    data: PromptData,
    encode: Callable[[Example], list[int]],
    rewards: Sequence[NamedReward],
    cfg: GRPOConfig,
    model: DecoderConfig,
) -> list[str]:
    """Drops what cannot be used and returns lines for the console; collective.

    Args:
        key: of the data in the config.

    Raises:
        UserError: no room for a prompt, or no prompt left.
    """
    room = model.max_position_embeddings - cfg.engine.max_new_tokens
    if room < 1:
        raise UserError(
            f"engine.max_new_tokens: {cfg.engine.max_new_tokens} leaves no room for a prompt: the model's "
            f"max_position_embeddings is {model.max_position_embeddings}"
        )
    limit = min(room, cfg.max_prompt_tokens or room)
    report = check_prompts(data, encode, limit, _problems_of(rewards))
    return [f"{key}: {line}" for line in report.lines()]


def check_enough(key: str, prompts: int, data: PromptData) -> None:
    """UserError where some of the prompts would come twice, which counts them twice in each figure."""
    if data.size is not None and prompts > data.size:
        raise UserError(f"{key}: {prompts} is above the {data.size} prompts of the data")


def _problems_of(rewards: Sequence[NamedReward]) -> Problems | None:
    """Of all rewards that check gold answers, the first problem of each example."""
    checking = [(name, reward) for name, _, reward in rewards if isinstance(reward, ChecksGold)]
    if not checking:
        return None

    def ask(columns: dict[str, list[Any]]) -> list[str | None]:
        found: list[str | None] = [None] * len(columns["prompts"])
        for name, reward in checking:
            problems = reward.problems(columns)
            found = [old or (new and f"{name}: {new}") for old, new in zip(found, problems, strict=True)]
        return found

    def ask_once(columns: dict[str, list[Any]]) -> list[str | None]:
        # Another verdict on another rank (a time-out on a busy machine) would give it other prompts.
        answer = ask(columns) if distributed.rank() == 0 else None
        first: list[str | None] = distributed.gather_objects(answer)[0]
        return first

    return ask_once
