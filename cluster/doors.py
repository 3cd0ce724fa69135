"""The doors of a cluster that stops: new requests are refused there, while answers go on. They are HAProxy's, Serve's
front: told that no ingress is to be had, it answers new requests with its own status 500 (gRPC: UNKNOWN) at once.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

SOCKET = "admin.sock"  # by which it takes commands
PATIENCE_S = 2.0


def shut(directory: Path) -> None:
    """All whose sockets lie there. One that does not listen stays open, which is no harm."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # something there went away meanwhile
        paths += directory.glob(f"**/{SOCKET}")
    for path in paths:
        with contextlib.suppress(OSError):
            rows = [line.split(",") for line in _said(path, "show stat").splitlines() if not line.startswith("#")]
            servers = [f"{row[0]}/{row[1]}" for row in rows if len(row) > 1 and row[1] not in ("FRONTEND", "BACKEND")]
            _said(path, ";".join(f"set server {server} state maint" for server in servers))


def _said(path: Path, commands: str) -> str:
    """What it answers."""
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(PATIENCE_S)
        control.connect(str(path))
        control.sendall(f"{commands}\n".encode())
        with control.makefile(encoding="ascii", errors="replace") as answer:
            return answer.read()
