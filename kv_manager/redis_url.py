"""The address of a Redis: which forms there are, and how one is shown. Knows nothing about Redis itself, so a
configuration can be read without its client.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DATABASE]      rediss:// is the same over TLS
    unix://[[USER]:PASSWORD@]/PATH/OF/THE/SOCKET[?db=DATABASE]
"""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qs, urlsplit

FORMS = "redis://[:PASSWORD@]HOST[:PORT][/DATABASE], rediss://… for TLS, or unix:///SOCKET[?db=DATABASE]"


def checked(url: str) -> str:
    """ValueError if it is none of the forms; the message shows nothing of the address, which may hold a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError(f"this address cannot be read; allowed: {FORMS}") from None
    what = _mistake(parts, port)
    if what is not None:
        raise ValueError(f"{what}; allowed: {FORMS}")
    return url


def shown(url: str) -> str:
    """Without user, password and options: for messages and logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _mistake(parts: SplitResult, port: int | None) -> str | None:
    database = parts.path.removeprefix("/")
    if ours := {"decode_responses", "protocol"} & parse_qs(parts.query).keys():
        return f"its option {min(ours)} is not yours to choose"
    match parts.scheme:
        case "redis" | "rediss":
            if not parts.hostname:
                return "this address names no host"
            if port == 0:
                return "port 0 is nobody's"
            if database and not (database.isascii() and database.isdigit()):
                return "what follows the host is not the number of a database"
        case "unix":
            if parts.netloc.rpartition("@")[2] or not database:
                return "this address names no socket by its whole path"
        case _:
            return "this address begins with none of redis://, rediss:// and unix://"
    return None
