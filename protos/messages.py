"""What crosses a boundary between layers or processes: frozen dataclasses.

Knows nothing about transport, protobuf (`convert.py` translates), models or text. Times are seconds; `arrival` is
seconds since the epoch, every other time is a duration, so that no two clocks are ever compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, NewType

from .measures import Moved, Speeds, Timings, Traffic

MOST_LOGPROBS = 20  # of the most probable tokens at one place, as in OpenAI's API

RequestId = NewType("RequestId", str)
ReplicaId = NewType("ReplicaId", str)
BlockId = NewType("BlockId", int)
Key = NewType("Key", bytes)  # of a full block: a hash over its tokens and all before them (`kv_manager/keys.py`)

Role = Literal["prefill", "decode"]
Stage = Literal["engine", "transfer"]  # of a replica: what may stand still while its process lives
# Why a request is placed again: `kv_manager/resumes.py` says each in words
Cause = Literal[
    "stale",
    "prefill lost",
    "decode lost",
    "transfer failed",
    "engine failed",
    "preempted",
    "drained",
    "revoked",
    "other",
]
FinishReason = Literal["stop", "length"]


class Generation(NamedTuple):
    """Names a lease for ever, and orders all leases of a cell: a later grant compares greater."""

    epoch: int
    counter: int

    def __str__(self) -> str:
        return f"{self.epoch:x}.{self.counter}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. Every field is resolved: the ingress has drawn the seed and named the stop ids."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0  # share of the most probable token's probability that a token must have
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer, as is the next
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0  # stop ids are not chosen before
    seed: int = 0
    choice: int = 0  # which of the request's answers this is: each draws random numbers of its own
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence included, unless the user ignores it
    logprobs: int | None = None  # also report each token's, and those of so many most probable ones


class TokenLogprobs(NamedTuple):
    """A token's natural log-probability under the model's own softmax: before penalties, biases and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the most probable, falling; ties by lower id


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks, in token ids, and the tokens produced so far: a request is resumable from this alone."""

    id: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    arrival: float
    generated: tuple[int, ...] = ()
    prompt_logprobs: int | None = None  # also report the prompt's tokens', and those of so many most probable ones
    n: int = 1  # answers from one prefill: choices 0 .. n - 1. Placed again, each is a request of its own
    salt: str = ""  # blocks are shared with requests of the same salt alone
    tenant: str = ""  # whose turn it is, where requests wait
    priority: int = 0  # lower goes first

    @property
    def history(self) -> tuple[int, ...]:
        return self.prompt + self.generated

    @property
    def most_tokens(self) -> int:
        """Positions the request can ever occupy: the last generated token's K and V are never needed."""
        return len(self.prompt) + self.sampling.max_tokens - 1


def choice_id(request: RequestId, choice: int) -> RequestId:
    """The name of one of several answers of a request: of its lease, and of itself where it is placed again."""
    return RequestId(f"{request}#{choice}")


def family(request: RequestId) -> RequestId:
    """The request that this is an answer of: itself, unless it is named as one of several."""
    return RequestId(request.partition("#")[0])


@dataclass(frozen=True, slots=True)
class Ask:
    """What admission needs to know of a request."""

    request: RequestId
    tokens: int  # its history: prompt and tokens generated so far
    most_tokens: int  # positions it can ever occupy, each of its choices
    arrival: float  # kept when a request is placed again
    exclude: tuple[ReplicaId, ...] = ()  # replicas that failed it
    n: int = 1  # choices, which share the prompt's full blocks
    keys: Mapping[str, tuple[Key, ...]] = field(default_factory=dict, repr=False)  # of its full blocks, by model
    model: str | None = None  # fingerprint of the model it began with, once it has tokens: no other may go on
    tenant: str = ""
    priority: int = 0
    cause: Cause | None = None  # why it is placed again, if it is

    @property
    def resumed(self) -> bool:
        """Whether its answer has begun, and goes on after another placement."""
        return self.model is not None


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one request to blocks of one replica. `blocks[i]` holds positions i*block_size onwards.

    The first `cached` blocks are complete already and may be shared: they are read and never written.
    """

    replica: ReplicaId
    generation: Generation
    blocks: tuple[BlockId, ...]
    request: RequestId = RequestId("")
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """The KV manager's answer to a request. `prefill` is None when the decode replica prefills itself.

    With n > 1 choices, `decode` is the first one's lease and `forks` are those of the others: each begins with the
    prompt's full blocks of `decode`, shared, and goes on with blocks of its own.
    """

    request: RequestId
    decode: Lease
    prefill: Lease | None = None
    prefill_address: str = ""
    prefill_memory: bytes = field(default=b"", repr=False)  # as in ReplicaInfo
    forks: tuple[Lease, ...] = ()
    model: str = ""  # fingerprint of the replicas' model
    reason: str = ""  # why it is split or not: one of kv_manager/split.py
    prefill_secret: bytes = field(default=b"", repr=False)  # proves to the prefill replica that the lease was granted

    @property
    def leases(self) -> tuple[Lease, ...]:
        return (self.decode, *self.forks) if self.prefill is None else (self.decode, *self.forks, self.prefill)


@dataclass(frozen=True, slots=True)
class Geometry:
    """What two replicas must share to exchange blocks byte for byte."""

    fingerprint: str  # of the model's weights and configuration
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layout: str = "plain"  # how K and V lie in a block: of the deployment, never of a machine
    tensor_parallel: int = 1  # into how many caches a replica's heads are divided: its own business, see `fits`

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Whose K and V a block holds, in their order."""
        return tuple(f"layers.{i}.self_attn" for i in range(self.layers))

    def fits(self, other: Geometry) -> bool:
        """Whether blocks can go from the one to the other: what travels says which heads it is of."""
        return replace(self, tensor_parallel=other.tensor_parallel) == other

    def __str__(self) -> str:
        return (
            f"model={self.fingerprint} layers={self.layers} kv_heads={self.kv_heads} head_dim={self.head_dim} "
            f"block_size={self.block_size} dtype={self.dtype} layout={self.layout} tp={self.tensor_parallel}"
        )


@dataclass(frozen=True, order=True, slots=True)
class Heads:
    """KV heads that lie together: `count` of them from `first` on, in one cache of a replica."""

    first: int
    count: int

    def __str__(self) -> str:
        return f"{self.first}..{self.first + self.count - 1}"


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """How a replica introduces itself. Blocks are numbered 1 .. blocks: block 0 is the null block and never leased."""

    id: ReplicaId
    role: Role
    geometry: Geometry
    blocks: int
    address: str = ""  # host:port of the Prefill stream; prefill replicas only
    pid: int = 0
    max_sequences: int = 64
    memory: bytes = field(default=b"", repr=False)  # a handle of its blocks for others on this machine, if there is one
    cache: tuple[str, ...] = ()  # how its KV cache came to its size, for people
    secret: bytes = field(default=b"", repr=False)  # by which its leases are signed (`kv_manager/secret.py`)


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's word on its own blocks. Of leases and reserve it is complete: what is not listed is not held.

    Of the cache it says what changed after `since`, a version that the manager has confirmed; 0 is the beginning, so
    that all keys are there. `beat` counts the replica's reports, `version` the changes of its blocks' keys.
    """

    replica: ReplicaId
    beat: int
    leases: tuple[Lease, ...] = ()
    reserve: tuple[BlockId, ...] = ()  # granted for growth and not drawn yet
    reserve_wanted: int = 0
    held: int = 0  # blocks under leases, each once, or in the reserve
    since: int = 0
    version: int = 0
    keys: tuple[tuple[BlockId, Key | None], ...] = field(default=(), repr=False)  # None: the block holds nothing whole
    draining: bool = False  # the replica is leaving and takes no new work
    speeds: Speeds = field(default_factory=Speeds)
    traffic: Traffic = field(default_factory=Traffic)
    stalled: Mapping[Stage, float] = field(default_factory=dict)  # seconds that it has stood still, beyond its time


@dataclass(frozen=True, slots=True)
class Release:
    """A lease is closed at its replica, which had sent `beat` reports by then. `keys`: of those of its blocks whose
    keys the manager may not know yet."""

    replica: ReplicaId
    generation: Generation
    beat: int
    keys: tuple[tuple[BlockId, Key], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Reply:
    """The manager's reply to a report."""

    beat: int
    known: bool = True  # False: register again
    revoked: tuple[Generation, ...] = ()  # close these leases
    granted: Lease | None = None  # blocks added to the reserve, under a generation of their own
    leave: bool = False  # take no new work, let streams end, make room for another replica


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The manager's answer to an ingress that confirms its open requests."""

    geometries: tuple[Geometry, ...] = ()  # whose keys it should ask with
    lost: Mapping[ReplicaId, str] = field(default_factory=dict)  # replicas that answer nobody any more, and why
    known: frozenset[ReplicaId] = frozenset()  # those that report


@dataclass(frozen=True, slots=True)
class Start:
    """Opens a Prefill stream: what to prefill, under which lease of the prefill replica, and for whom."""

    request: RequestId
    generation: Generation
    blocks: tuple[BlockId, ...]
    tokens: tuple[int, ...]
    geometry: Geometry
    arrival: float
    skip_blocks: int = 0  # leading blocks the decode side already has
    cached_blocks: int = 0  # leading blocks of the lease that are complete already
    salt: str = ""  # as in Request
    prompt_logprobs: int | None = None  # as in Request
    memory: bytes = field(default=b"", repr=False)  # as in ReplicaInfo: blocks are copied from there
    secret: bytes = field(default=b"", repr=False)  # Placement.prefill_secret
    heads: tuple[Heads, ...] = ()  # of each cache of the decode side, in order; empty: all heads are in one


@dataclass(frozen=True, slots=True)
class Commit:
    """Ends a Prefill stream: the manifest of what was sent, and the last position's logits."""

    generation: Generation
    geometry: Geometry  # of the blocks that were sent, in the prefill side's words
    layers: tuple[str, ...]  # whose K and V each block holds, in their order
    heads: tuple[Heads, ...]  # of the parts in which each block was sent: every head is in one of them
    tokens: int
    first_block: int  # block positions first_block .. first_block + block_count - 1 were sent
    block_count: int
    frames: int
    payload_bytes: int  # in all frames, or copied at their word
    logits: bytes  # float32, little endian, [vocabulary]
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of positions 1 onwards: nothing predicts the first token


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens of one choice since the last message of a decode stream, and in its last one how it ended.

    `resumable` names the error (class name, message, replica to avoid) after which the request is placed again: of
    `choice`, or, where that is None, all that have not ended.
    """

    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    resumable: tuple[str, str, str | None] | None = None
    timings: Timings | None = None  # with the first token
    moved: Moved | None = None  # with the first token
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with the first token, as in Commit
    choice: int | None = 0

    def __reduce__(self) -> tuple[type[Delta], tuple[object, ...]]:
        """One for every token of a stream: this way it is written and read in a third of the time."""
        told = (self.tokens, self.finish, self.resumable, self.timings, self.moved)
        return Delta, (*told, self.logprobs, self.prompt_logprobs, self.choice)


# What a decode replica says to an ingress at once: each stream by its number, with None at its end
Batch = tuple[tuple[int, Delta | None], ...]
