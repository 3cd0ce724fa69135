"""The gRPC door's manners: strangers are refused, and a call learns what went wrong. Knows nothing about models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from bifolio.protos.errors import InvalidRequest, Revoked, status_of

from .convert import FIELD
from .openai import public_message
from .peers import address_of, require_loopback


@contextmanager
def call(context: Any) -> Iterator[None]:
    """Around a method: gives the call the status of the error it ends with. What is not ours is not shown.

    A client's mistake goes no further, nor does its cancel: Serve would drop the trailing metadata, which names the
    field, and write a traceback into the log. What the method returns then is not looked at, but must be there.
    """
    try:
        require_loopback(address_of(context.peer()))
        yield
    except Exception as error:
        context.set_code(grpc.StatusCode[status_of(error)[0]])
        context.set_details(public_message(error))
        if not isinstance(error, InvalidRequest | Revoked):
            raise
        if isinstance(error, InvalidRequest) and error.field:
            context.set_trailing_metadata([(FIELD, error.field)])
