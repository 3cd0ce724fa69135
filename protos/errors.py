"""The error tree, and the one table that translates it at the doors: error -> gRPC status -> HTTP status.

Knows nothing about grpc or HTTP libraries: statuses are names and numbers. Every message says what was asked, what is
allowed and what to do. All errors pickle, because they cross Ray and process boundaries.

    BifolioError
    ├── InvalidRequest         the client's mistake; names the field
    │   └── DoesNotFit         prompt + max_tokens can never fit
    ├── ModelNotFound
    ├── PeerRefused            the caller is not allowed to connect
    ├── Overloaded             not now; retry after some seconds
    ├── Unavailable            nothing can serve this at the moment, or every attempt failed
    ├── ConfigError            a configuration or model file cannot be used; nothing has started
    ├── GeometryMismatch       two replicas cannot exchange blocks
    ├── Revoked                the request was given up while it waited
    └── Resumable              this attempt is over, the request is not: place it again with the tokens it has
        ├── StalePlacement     a block of the placement belongs to another lease by now
        ├── ReplicaGone        the replica named in the placement is not (or no longer) there
        ├── TransferFailed     the Prefill stream was refused, or its content does not match the manifest
        ├── EngineFailed       a step of the replica's engine raised
        ├── Preempted          out of blocks; a request that arrived earlier keeps them
        └── Draining           the replica is leaving
"""

from __future__ import annotations


class BifolioError(Exception):
    """Base of everything this package raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(BifolioError):
    """The client asked for something that is not allowed; `field` names the request's field."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str | None]]:
        return type(self), (self.message, self.field)


class DoesNotFit(InvalidRequest):
    pass


class ModelNotFound(InvalidRequest):
    pass


class PeerRefused(BifolioError):
    pass


class Overloaded(BifolioError):
    """Refused for now. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (self.message, self.retry_after)


class Unavailable(BifolioError):
    pass


class ConfigError(BifolioError):
    pass


class GeometryMismatch(BifolioError):
    pass


class Revoked(BifolioError):
    pass


class Resumable(BifolioError):
    """`replica` is the one to keep the next placement away from, if any."""

    def __init__(self, message: str, replica: str | None = None) -> None:
        super().__init__(message)
        self.replica = replica

    def __reduce__(self) -> tuple[type[Resumable], tuple[str, str | None]]:
        return type(self), (self.message, self.replica)


class StalePlacement(Resumable):
    pass


class ReplicaGone(Resumable):
    pass


class TransferFailed(Resumable):
    pass


class EngineFailed(Resumable):
    pass


class Preempted(Resumable):
    pass


class Draining(Resumable):
    pass


# error -> (gRPC status name, HTTP status, OpenAI error type); the first match along the class's ancestors counts
STATUS: dict[type[BifolioError], tuple[str, int, str]] = {
    ModelNotFound: ("NOT_FOUND", 404, "invalid_request_error"),
    InvalidRequest: ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    PeerRefused: ("PERMISSION_DENIED", 403, "permission_error"),
    Overloaded: ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    Unavailable: ("UNAVAILABLE", 503, "service_unavailable"),
    GeometryMismatch: ("FAILED_PRECONDITION", 409, "conflict"),
    ConfigError: ("FAILED_PRECONDITION", 500, "server_error"),
    Revoked: ("CANCELLED", 499, "request_cancelled"),
    StalePlacement: ("ABORTED", 503, "service_unavailable"),
    Draining: ("UNAVAILABLE", 503, "service_unavailable"),
    Resumable: ("UNAVAILABLE", 503, "service_unavailable"),
    BifolioError: ("INTERNAL", 500, "server_error"),
}


def status_of(error: BaseException) -> tuple[str, int, str]:
    """(gRPC status name, HTTP status, error type) of any exception; what is not ours is INTERNAL, 500."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return STATUS[BifolioError]
