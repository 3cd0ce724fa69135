"""Where the own lines of a replica, of the ingress or of the KV manager go: to its worker's stderr, which Ray keeps in
the session's logs.

Ray and Serve configure their loggers and nobody else's, so without this only warnings would be kept. And Serve puts a
logger of its own in the place of `sys.stderr`, which holds back a thousand lines.
"""

from __future__ import annotations

import logging
import sys


def log_to_stderr() -> None:
    """Once a process, by whoever owns it."""
    ours = logging.getLogger("bifolio")
    if not ours.handlers:
        handler = logging.StreamHandler(sys.__stderr__)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)
        ours.setLevel(logging.INFO)
