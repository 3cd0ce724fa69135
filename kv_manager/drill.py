"""Standing still on purpose, to see what the rest does about it: for tests and drills, off unless it is asked for.

With BIFOLIO_DRILL naming a directory, a loop that passes its point stands still for as long as a file {pid}-{loop} is
there. Knows nothing about the loops.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

DIRECTORY = "BIFOLIO_DRILL"  # the variable; read once, when the process begins
LOOK_S = 0.02

Loop = Literal["engine", "transfer", "loop", "manager"]

_directory = os.environ.get(DIRECTORY)


def point(loop: Loop) -> None:
    """Every pass of a loop comes here, in the thread that is to stand still."""
    if _directory is None:
        return
    file = Path(_directory, f"{os.getpid()}-{loop}")
    while file.exists():
        time.sleep(LOOK_S)
