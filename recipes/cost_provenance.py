"""Whether the schedules and surfaces of a cost config were made for its model and its caches."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import SparseKVCache
from sparrow.errors import UserError
from sparrow.models.decoder_config import read_json
from sparrow.protocols import AdaptiveBudget, KVCache
from sparrow.recipes.cost_config import Search

_SIZES = ("sink_pages", "recent_pages", "dense_layers")


def foreign_schedule(model: str, cache: KVCache) -> list[str]:
    """How the settings that a cache's schedule was calibrated for differ from the cache and the model.

    Raises:
        UserError: they differ, and the schedule's `allow_foreign` does not let them.
    """
    budget = cache.budget.start if isinstance(cache.budget, AdaptiveBudget) else cache.budget
    made_for = budget.provenance if isinstance(budget, StepSchedule) else None
    # A cost depends on neither, so that the config has none.
    temperature, estimator = (1.0, "exact") if made_for is None else (made_for.temperature, made_for.estimator)
    return cache.check(model, temperature, estimator)


def foreign_surfaces(search: Search, model: str, cache: SparseKVCache) -> list[str]:
    """The same for the surfaces of a search, whatever their page sizes.

    Raises:
        UserError: they differ, and `search.allow_foreign` does not let them.
    """
    differences = [line for path in search.surfaces for line in _differences(Path(path), model, cache)]
    if differences and not search.allow_foreign:
        raise UserError(
            f"search.surfaces: {'; '.join(differences)}; calibrate this model and cache, or set "
            "search.allow_foreign: true to use them all the same"
        )
    return differences


def _differences(surface: Path, model: str, cache: SparseKVCache) -> list[str]:
    """The CSV itself does not say what it was measured on; sparrow_calibrate notes that beside it."""
    file = surface.parent / "measured" / "settings.json"
    if not file.is_file():
        return [f"{surface} has no {file.relative_to(surface.parent)} beside it, which says what it was measured on"]
    settings, rule = read_json(file), cache.pattern
    defaults = signature(SparseKVCache).parameters
    theirs = {key: settings.get(f"kv_cache.{key}", defaults[key].default) for key in _SIZES}
    theirs["selector"] = str(settings.get("kv_cache.selector._component_")).rpartition(".")[2]
    theirs["model"] = str(settings.get("model")).partition(", weights ")[0].lower()  # the cost asks for the shape alone
    ours = {key: getattr(rule, key) for key in _SIZES}
    ours |= {"selector": type(rule.selector).__name__, "model": Path(model).name.lower()}
    return [
        f"{key} is {theirs[key]!r} in {surface}, {value!r} here" for key, value in ours.items() if theirs[key] != value
    ]
