"""`inference.proto` to and from what the cluster computes with: the only file here that knows both."""

from __future__ import annotations

from bifolio.protos import inference_pb2 as pb
from bifolio.protos.messages import RequestId

from .query import Query


def query_from_pb(request: pb.GenerateRequest, id: RequestId) -> Query:
    """A request without a prompt is one with an empty prompt: `resolve` refuses both alike."""
    sampling = request.sampling

    def given(field: str) -> bool:
        return sampling.HasField(field)

    return Query(
        id=id,
        prompt=tuple(request.token_ids.ids) if request.WhichOneof("prompt") == "token_ids" else request.text,
        model=request.model,
        max_tokens=sampling.max_tokens if given("max_tokens") else None,
        temperature=sampling.temperature if given("temperature") else None,
        top_p=sampling.top_p if given("top_p") else None,
        top_k=sampling.top_k if given("top_k") else None,
        seed=sampling.seed if given("seed") else None,
        stop=tuple(sampling.stop),
        stop_token_ids=tuple(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
    )


def query_to_pb(query: Query) -> pb.GenerateRequest:
    """What a client sends for a query; its id is given by the cluster."""
    sampling = pb.Sampling(
        max_tokens=query.max_tokens,
        temperature=query.temperature,
        top_p=query.top_p,
        top_k=query.top_k,
        seed=_unsigned(query.seed),
        stop=query.stop,
        stop_token_ids=query.stop_token_ids,
        ignore_eos=query.ignore_eos,
    )
    if isinstance(query.prompt, str):
        return pb.GenerateRequest(model=query.model, text=query.prompt, sampling=sampling)
    return pb.GenerateRequest(model=query.model, token_ids=pb.TokenIds(ids=query.prompt), sampling=sampling)


def _unsigned(seed: int | None) -> int | None:
    """A negative seed, which HTTP takes as well, is the same 64 bits read with a sign."""
    return seed % 2**64 if seed is not None and -(2**63) <= seed < 0 else seed


def usage_to_json(usage: pb.Usage) -> dict[str, object]:
    """OpenAI's three counts, and beside them what only Bifolio tells."""
    timings, route = usage.timings, usage.route
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "seed": usage.seed,
        "timings": {field.name: getattr(timings, field.name) for field in timings.DESCRIPTOR.fields},
        "route": {field.name: getattr(route, field.name) for field in route.DESCRIPTOR.fields},
    }
