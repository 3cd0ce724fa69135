"""The benchmarks are scripts beside each other, and import each other so."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))  # not first: some are called as packages are
