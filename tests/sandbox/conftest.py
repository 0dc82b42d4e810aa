"""The table of programs beside the tests is found by its name, in the tests of the reward too."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.append(HERE)
