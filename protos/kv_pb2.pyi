from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Generation(_message.Message):
    __slots__ = ("epoch", "counter")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    counter: int
    def __init__(self, epoch: _Optional[int] = ..., counter: _Optional[int] = ...) -> None: ...

class Geometry(_message.Message):
    __slots__ = ("fingerprint", "layers", "kv_heads", "head_dim", "block_size", "dtype", "layout", "tensor_parallel")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layout: str
    tensor_parallel: int
    def __init__(self, fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., tensor_parallel: _Optional[int] = ...) -> None: ...

class Heads(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "generation", "blocks", "token_ids", "skip_blocks", "geometry", "arrival", "prompt_logprobs", "cached_blocks", "salt", "memory", "secret", "heads")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ARRIVAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    generation: Generation
    blocks: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_blocks: int
    geometry: Geometry
    arrival: float
    prompt_logprobs: int
    cached_blocks: int
    salt: str
    memory: bytes
    secret: bytes
    heads: _containers.RepeatedCompositeFieldContainer[Heads]
    def __init__(self, request_id: _Optional[str] = ..., generation: _Optional[_Union[Generation, _Mapping]] = ..., blocks: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_blocks: _Optional[int] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., arrival: _Optional[float] = ..., prompt_logprobs: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., salt: _Optional[str] = ..., memory: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., heads: _Optional[_Iterable[_Union[Heads, _Mapping]]] = ...) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top_ids", "top_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("frame",)
    FRAME_FIELD_NUMBER: _ClassVar[int]
    frame: int
    def __init__(self, frame: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("generation", "tokens", "first_block", "block_count", "frames", "payload_bytes", "logits", "queue_seconds", "prefill_seconds", "prompt_logprobs", "geometry", "layers", "heads")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    generation: Generation
    tokens: int
    first_block: int
    block_count: int
    frames: int
    payload_bytes: int
    logits: bytes
    queue_seconds: float
    prefill_seconds: float
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    geometry: Geometry
    layers: _containers.RepeatedScalarFieldContainer[str]
    heads: _containers.RepeatedCompositeFieldContainer[Heads]
    def __init__(self, generation: _Optional[_Union[Generation, _Mapping]] = ..., tokens: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., frames: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., logits: _Optional[bytes] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., layers: _Optional[_Iterable[str]] = ..., heads: _Optional[_Iterable[_Union[Heads, _Mapping]]] = ...) -> None: ...
