"""What a run's trackers are told of the code."""

from __future__ import annotations

import sys
from importlib.metadata import version

import pytest
import torch

from sparrow.recipes.grpo_files import code_version


def test_the_version_is_that_of_the_installed_package_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_version()["sparrow"] == version("sparrow-rl")
    monkeypatch.setattr(sys, "path", [])  # a source tree that was never installed: nothing there describes it
    assert code_version()["sparrow"] is None
    assert code_version()["torch"] == torch.__version__
