"""JSON over HTTP, for commands: one question, one answer, one clear line if there is none. Knows no paths.

Never through `$http_proxy`: a cluster is on this machine or near it.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from bifolio.protos.errors import InvalidRequest, Unavailable

TIMEOUT_S = 10.0


def get(address: str, path: str) -> Any:
    return _ask(urllib.request.Request(_url(address, path)))


def post(address: str, path: str) -> Any:
    return _ask(urllib.request.Request(_url(address, path), data=b"", method="POST"))


def _url(address: str, path: str) -> str:
    return f"http://{address.removeprefix('http://').rstrip('/')}{path}"


def _ask(request: urllib.request.Request) -> Any:
    url = request.full_url
    try:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(5000).decode(errors="replace")
        if error.code == 400 and (message := _message(body)):
            raise InvalidRequest(message) from error
        raise Unavailable(f"{url} answers {error.code}: {_message(body) or body[:500]}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Unavailable(f"{url} does not answer ({reason}); is `bifolio serve` running there?") from error


def _message(body: str) -> str | None:
    """Of an error as this cluster words it."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return None
