"""What an operator can set about the KV manager. Knows nothing about Ray or the ledger."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class FrozenConfig(BaseModel):
    """Every layer's configuration: frozen, no unknown keys, no value of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TlsConfig(FrozenConfig):
    """Files in PEM form, on every machine that has replicas."""

    ca: str = Field(description="The certificates of the CAs that replicas' certificates are of.")
    certificate: str = Field(description="A replica's certificate, with those between it and the CA's.")
    key: str = Field(description="The key of that certificate, without a passphrase.")
    name: str = Field(
        default="bifolio", min_length=1, max_length=253, description="The DNS name that every certificate has."
    )

    @field_validator("ca", "certificate", "key")
    @classmethod
    def _is_absolute(cls, path: str) -> str:
        if not PurePath(path).is_absolute():
            raise ValueError(f"{path!r} is not an absolute path; needed is one, the same on every machine")
        return path


class KvConfig(FrozenConfig):
    offer_ttl_s: float = Field(
        default=10.0, ge=0.1, le=600, description="An offered lease that nobody opens dies after this long."
    )
    heartbeat_s: float = Field(
        default=1.0,
        ge=0.05,
        le=60,
        description="Replicas report, and the manager looks for what has expired, this often.",
    )
    silence_s: float = Field(
        default=10.0,
        ge=0.1,
        le=600,
        description="A replica that has not reported for this long is removed with its leases, and its requests go on "
        "elsewhere. A KV manager that has not answered an ingress for this long is started again.",
    )
    growth_s: float = Field(
        default=15.0,
        ge=0.1,
        le=60,
        description="A decode replica's reserve holds the blocks that it draws in this many seconds: so long streams "
        "go on while the KV manager is away.",
    )
    starve_s: float = Field(
        default=0.25,
        ge=0,
        le=60,
        description="When a sequence has waited this long for a block, the latest arrival is preempted.",
    )
    admission_queue: int = Field(
        default=256,
        ge=1,
        le=100_000,
        description="At most this many requests wait for blocks; over that the last in the order is refused.",
    )
    admission_wait_s: float = Field(
        default=60.0,
        ge=0.1,
        le=3600,
        description="A request that has waited this long for blocks is refused.",
    )

    passing_s: float = Field(
        default=2.0,
        ge=0,
        le=600,
        description="While the first in the queue waits for blocks, requests that fit may pass it for this long; then "
        "what comes free is kept for it.",
    )
    split: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="Whether prompts are computed on prefill replicas. auto leaves short remainders, and everything "
        "when no prefill replica is alive, to the decode replica; always fails rather than that; never uses none.",
    )
    local_blocks: int = Field(
        default=4,
        ge=0,
        le=65536,
        description="With split auto, a decode replica computes at most this many blocks of a prompt itself, all that "
        "is not in its cache: what it computes makes its other answers wait.",
    )
    prefill_queue_s: float = Field(
        default=2.0,
        ge=0,
        le=600,
        description="A prefill replica is given prompts for about so many seconds of computing; the rest waits "
        "without holding blocks.",
    )
    confirm_s: float = Field(
        default=10.0,
        ge=0.1,
        le=600,
        description="Blocks of a request that its ingress has not confirmed for this long are taken back.",
    )
    tombstone_s: float = Field(
        default=60.0,
        ge=0.1,
        le=86_400,
        description="A cancelled request that comes only now is refused for this long.",
    )
    stall_s: float = Field(
        default=10.0,
        ge=0.1,
        le=600,
        description="A transfer whose other side neither begins, nor acknowledges, nor says that it is at work for "
        "this long is given up.",
    )
    copies: bool = Field(
        default=True,
        description="Replicas on one host or GPU copy blocks out of each other's memory; false sends all of them as "
        "frames.",
    )
    tls: TlsConfig | None = Field(
        default=None,
        description="TLS between replicas: ca, certificate and key, absolute paths of PEM files, and name, the DNS "
        "name of every certificate (bifolio); null sends blocks and prompts in the clear.",
    )

    @model_validator(mode="after")
    def _a_lost_heartbeat_is_no_silence(self) -> KvConfig:
        for name, what in (
            ("silence_s", "remove the replica"),
            ("offer_ttl_s", "end a lease that is being opened"),
            ("confirm_s", "take a lease back that is in use"),
        ):
            if getattr(self, name) < 3 * self.heartbeat_s:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}, but must be at least three times heartbeat_s "
                    f"({self.heartbeat_s:g}): a heartbeat that is late would {what}"
                )
        return self
