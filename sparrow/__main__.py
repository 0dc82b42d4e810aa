"""`python -m sparrow`: the same command line as `tune` and `sparrow`."""

import sys

from sparrow.cli import main

if __name__ == "__main__":
    sys.exit(main())
