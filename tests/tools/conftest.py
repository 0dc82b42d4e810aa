"""The tools are scripts, not a package: they find each other by their folder."""

from __future__ import annotations

import sys
from pathlib import Path

TOOLS = str(Path(__file__).parents[2] / "tools")
if TOOLS not in sys.path:
    sys.path.append(TOOLS)
