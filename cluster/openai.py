"""What every endpoint of the HTTP door says alike: server-sent events and errors, in OpenAI's shape.

An error's `param` is the field that is wrong, as the user called it; inside `messages` with the place, as in
`messages[0].content[1]`. It is "body" where the body as a whole is at fault, and null where no body was looked at.
"""

from __future__ import annotations

import json
from typing import Any

from bifolio.protos.errors import (
    BifolioError,
    DoesNotFit,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    status_of,
)

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
PATHS = (
    "POST /v1/completions, /v1/chat/completions, /v1/requests/{id}/cancel, "
    "/v1/replicas/{id}/drain, /tokenize, /detokenize, GET /v1/models, /health, /status, /metrics"
)

_CODES: dict[type[BaseException], str] = {
    DoesNotFit: "context_length_exceeded",
    ModelNotFound: "model_not_found",
}


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # `json.dumps` makes one for each call


def event(content: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content).encode() + b"\n\n"


def not_served(path: str, method: str) -> Json:
    """The body of a 404 or 405."""
    message = f"{method} {path} is not served here; allowed: {PATHS}"
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


def public_message(error: BaseException) -> str:
    """What a client is told. An error that is not ours is not shown: it may tell too much."""
    return error.message if isinstance(error, BifolioError) else "internal error; the server's log has it"


def error_response(error: BaseException) -> tuple[int, dict[str, str], Json]:
    """HTTP status, headers and body."""
    _, status, kind = status_of(error)
    code = _CODES.get(type(error))
    param = error.field if isinstance(error, InvalidRequest) else None
    headers = {"Retry-After": str(max(1, round(error.retry_after)))} if isinstance(error, Overloaded) else {}
    return status, headers, {"error": {"message": public_message(error), "type": kind, "param": param, "code": code}}
