"""Tests on a GPU: `make test-gpu`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("pipeline", "ranks")]
