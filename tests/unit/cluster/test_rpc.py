"""What a gRPC call learns of an error, and which errors go no further."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from bifolio.cluster.rpc import call
from bifolio.protos.errors import DoesNotFit, Overloaded, Revoked


class Context:
    def __init__(self, peer: str = "ipv4:127.0.0.1:5") -> None:
        self.peer = lambda: peer
        self.said: dict[str, Any] = {}
        self.set_code = lambda code: self.said.update(code=code)
        self.set_details = lambda details: self.said.update(details=details)
        self.set_trailing_metadata = lambda metadata: self.said.update(metadata=metadata)


def test_a_clients_mistake_and_its_cancel_end_here() -> None:
    context = Context()
    with call(context):
        raise DoesNotFit("n is 9; allowed: 1 to 8", "n")
    assert context.said == {
        "code": grpc.StatusCode.INVALID_ARGUMENT,
        "details": "n is 9; allowed: 1 to 8",
        "metadata": [("bifolio-field", "n")],
    }
    context = Context()
    with call(context):
        raise Revoked("request r was cancelled")
    assert context.said == {"code": grpc.StatusCode.CANCELLED, "details": "request r was cancelled"}


def test_what_else_goes_wrong_goes_on() -> None:
    context = Context()
    with pytest.raises(Overloaded), call(context):
        raise Overloaded("full")
    assert context.said["code"] is grpc.StatusCode.RESOURCE_EXHAUSTED
    context = Context()
    with pytest.raises(RuntimeError), call(context):
        raise RuntimeError("password")
    assert context.said["code"] is grpc.StatusCode.INTERNAL
    assert "password" not in context.said["details"]


def test_strangers_are_refused() -> None:
    context = Context("ipv4:192.0.2.1:5")
    with pytest.raises(Exception, match=r"192\.0\.2\.1"), call(context):
        raise AssertionError("the method is not reached")
    assert context.said["code"] is grpc.StatusCode.PERMISSION_DENIED
