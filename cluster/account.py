"""What an answer cost: noted while it streams, told with its last piece. Times are durations of one clock, in seconds.

Knows nothing about text or doors.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.measures import Moved, Timings
from bifolio.protos.messages import Delta, Placement, Request


@dataclass(slots=True)
class Account:
    began: float = field(default_factory=time.monotonic)
    asked: float | None = None  # when a placement was asked for, for the first time
    waited: float = 0.0  # from then to the attempt that brought the first token
    ttft: float = 0.0
    timings: Timings = field(default_factory=Timings)  # of that attempt, as are the next two
    cached: int = 0  # tokens
    model: str | None = None  # its fingerprint; None, as long as there is no token
    moved: Moved = field(default_factory=Moved)  # of the last attempt that brought tokens
    placement: Placement | None = None  # the last one
    resumes: int = 0
    paused: float = 0.0  # from ends of attempts to the next tokens, of all choices

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def first_tokens(self, delta: Delta, placement: Placement, began: float) -> None:
        """The first of an attempt, which began then; later ones say nothing new."""
        if delta.moved is not None:
            self.moved = delta.moved
        if self.model is None:
            self.model = placement.model
            self.cached = self.moved.cached
        if delta.timings is not None and self.ttft == 0.0:
            self.ttft, self.timings = self.elapsed(), delta.timings
            self.waited = began - (began if self.asked is None else self.asked)

    def usage(self, request: Request, completion_tokens: int) -> pb.Usage:
        parts, placement = self.timings, self.placement
        assert placement is not None
        return pb.Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=completion_tokens,
            cached_tokens=min(self.cached, len(request.prompt)),
            seed=request.sampling.seed,
            timings=pb.Timings(
                ttft=self.ttft,
                queue=self.waited + parts.queue,
                prefill=parts.prefill,
                transfer=parts.transfer,
                first_decode=parts.first_decode,
                # What the ingress waited for the first token, less what decode spent on it
                overhead=self.ttft - self.waited - parts.elapsed,
                total=self.elapsed(),
            ),
            route=pb.Route(
                prefill_replica=placement.prefill.replica if placement.prefill else "",
                decode_replica=placement.decode.replica,
                blocks=self.moved.blocks,
                bytes=self.moved.bytes,
                resumes=self.resumes,
                reason=placement.reason,
                paused_s=self.paused,
            ),
        )
