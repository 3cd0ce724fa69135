"""What replicas have measured, as their reports and deltas carry it. Times are durations in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a replica has measured lately; 0 is not yet."""

    prefill: float = 0.0  # prompt tokens computed in a second
    transfer: float = 0.0  # seconds that a hand-over added to the prefill it came with; decode replicas


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a replica has moved since it began: sent, if it prefills; received, if it decodes."""

    streams: int = 0  # under way
    in_flight: int = 0  # frames that were sent and are not acknowledged
    done: int = 0  # streams that ended with everything at its place
    failed: Mapping[str, int] = field(default_factory=dict)  # streams that did not, by the class of the error
    ways: Mapping[str, int] = field(default_factory=dict)  # streams begun, by how blocks travel, or why not by copies
    frames: int = 0
    bytes: int = 0  # in frames, or copied
    moving_s: float = 0.0  # seconds in which bytes were moved: cut and sent, or landed
    stalled_s: Mapping[str, float] = field(default_factory=dict)  # seconds of waiting, by what for


@dataclass(frozen=True, slots=True)
class Timings:
    """The parts of the time to the first token that the replicas measure, in seconds."""

    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    first_decode: float = 0.0
    elapsed: float = 0.0  # in the decode replica, from the call to the first token


@dataclass(frozen=True, slots=True)
class Moved:
    """What one hand-over carried."""

    blocks: int = 0
    bytes: int = 0
    cached: int = 0  # tokens of the history that nobody had to compute
