"""The names of requests: given by their users, or drawn. A user cancels a request by its name.

Over HTTP the name comes in a header. Serve adds one that it has drawn to a request without it, so there a given and a
drawn name look alike; both are in the response's headers too. Knows nothing else of the doors.
"""

from __future__ import annotations

import re
import uuid

from bifolio.protos.errors import InvalidRequest
from bifolio.protos.messages import RequestId

from .mistakes import short

HEADER = "X-Request-Id"
LONGEST = 128
_ALLOWED = re.compile(f'[!"$-~]{{1,{LONGEST}}}')


def named(given: str | None, field: str, prefix: str) -> RequestId:
    """What the user calls it in `field`, or a name of our own."""
    return RequestId(f"{prefix}-{uuid.uuid4().hex}") if given is None else checked(given, field)


def checked(id: str, field: str) -> RequestId:
    """As it was given. "#" names the choices of a request, so no request."""
    if not _ALLOWED.fullmatch(id):
        raise InvalidRequest(
            f'{field} is {short(repr(id))}; allowed: 1 to {LONGEST} visible ASCII characters without "#"', field
        )
    return RequestId(id)
