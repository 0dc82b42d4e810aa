"""What a resumed run does differently from the one that made the save: settings that changed, and those that may not.

A save holds the settings it was made with, as config.yaml. Those of the present config hold from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparrow.config import leaves, to_yaml
from sparrow.errors import UserError
from sparrow.models.identity import architecture
from sparrow.recipes.grpo_config import GRPOConfig

SETTINGS = "config.yaml"
_NOT_COMPARED = ("resume", "replay", "dump_rollouts", "trackers")
# A save has no place in another stream of prompts, nor a state for another optimizer.
_THE_SAME = ("data._component_", "optimizer._component_")
_ABSENT = "not set"


def write_settings(cfg: GRPOConfig, folder: Path) -> None:
    """Beside what was made with them."""
    (folder / SETTINGS).write_text(to_yaml(cfg), encoding="utf-8")


def changed_settings(cfg: GRPOConfig, folder: Path) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose value is another one now: then and now, "not set" where a key was left out.

    Raises:
        UserError: the folder has no readable settings.
    """
    file = folder / SETTINGS
    try:
        saved, present = (yaml.safe_load(text) for text in (file.read_text(encoding="utf-8"), to_yaml(cfg)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}: the settings of that run cannot be read: {error}") from None
    then, now = dict(leaves(saved)), dict(leaves(present))
    keys = [key for key in dict.fromkeys([*now, *then]) if key.split(".")[0] not in _NOT_COMPARED]
    pairs = {key: (then.get(key, _ABSENT), now.get(key, _ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def check_resumable(cfg: GRPOConfig, save: Path) -> list[str]:
    """One line for each setting that changed.

    Raises:
        UserError: the save is of a run that this one cannot go on with: other prompts, another optimizer, or a model
            of another architecture. A model that is no longer there is not missed.
    """
    changed = changed_settings(cfg, save)
    for key in _THE_SAME:
        if key in changed:
            raise UserError(f"resume: {key}: {save} was made with {changed[key][0]}, this run has {changed[key][1]}")
    saved, named = architecture(save / "model"), architecture(Path(cfg.model))
    if named is not None and named != saved:
        raise UserError(f"resume: model: {save} holds a {saved}; {cfg.model} is a {named}")
    return changed_lines("changed since the save", changed)


def changed_lines(what: str, changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{what}: {key}: {then} -> {now}" for key, (then, now) in changed.items()]
