"""A query resolved: what is left open, what is in range, what fits; and that both doors resolve one alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from bifolio.cluster.chat import Chat
from bifolio.cluster.completion_schema import CompletionRequest
from bifolio.cluster.convert import logprobs_to_pb, query_from_pb, query_to_pb
from bifolio.cluster.query import Query, Resolved, Served, check_model, resolve
from bifolio.cluster.ranges import float32
from bifolio.cluster.request_ids import named
from bifolio.cluster.schema import parse
from bifolio.kv_manager.ledger import Ledger
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import DoesNotFit, InvalidRequest, ModelNotFound
from bifolio.protos.messages import (
    Ask,
    Geometry,
    ReplicaId,
    ReplicaInfo,
    Report,
    Request,
    RequestId,
    Sampling,
    TokenLogprobs,
)
from bifolio.replicas.config import EngineConfig
from bifolio.replicas.kv_memory import BlockShape, Budget, context_of, size_cache
from bifolio.replicas.model_config import LlamaConfig

ID = RequestId("r-1")
HELLO = Chat(({"role": "user", "content": "Hello"},))


def resolved(served: Served, prompt: Any = "Hello", **fields: Any) -> Resolved:
    return resolve(Query(ID, prompt, **fields), served, lambda: 77)


def test_what_is_left_open_is_resolved(served: Served) -> None:
    sampling = Sampling(max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, seed=77, stop_token_ids=(2,))
    assert resolved(served) == ((19556,), sampling, (), None, 1, "", "", 0)


def test_what_is_given_is_taken_as_32_bits_hold_it(served: Served) -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -0.3,
              "frequency_penalty": 0.3}  # fmt: skip
    exact = {"max_tokens": 5, "top_k": 3, "min_tokens": 2, "logprobs": 20}
    sampling = resolved(
        served, **fields, **exact, seed=-1, logit_bias=((9, 0.1), (7, -100.0)), ignore_eos=True
    ).sampling
    assert sampling == Sampling(
        **exact,
        **{name: float32(value) for name, value in fields.items()},
        seed=2**64 - 1,
        logit_bias=((7, -100.0), (9, float32(0.1))),
    )
    assert sampling.temperature != 0.7


def test_the_ends_of_a_range_are_in_it(served: Served) -> None:
    for fields in (
        {"temperature": 2, "min_p": 1, "repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": -2},
        {"temperature": 0, "min_p": 0, "repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": 2},
        {"top_p": 1, "top_k": 2**31 - 1, "min_tokens": 16, "logprobs": 0, "prompt_logprobs": 20},
        {"logit_bias": tuple((id, 100.0) for id in range(1024)), "stop": ("x" * 1000,) * 4, "seed": 2**64 - 1},
        {"n": 16, "priority": 100, "cache_salt": "日" * 256, "user": "日" * 256},
        {"n": 1, "priority": -100, "cache_salt": "", "user": ""},
    ):
        resolved(served, **fields)


def test_a_temperature_that_would_overflow_is_greedy(served: Served) -> None:
    assert resolved(served, temperature=1e-30).sampling.temperature == 0.0


def test_what_can_never_fit_is_refused_with_the_numbers(served: Served) -> None:
    with pytest.raises(DoesNotFit, match=r"has 120 tokens and max_tokens is 9: 129 together.*holds 128") as caught:
        resolved(served, (5,) * 120, max_tokens=9)
    assert caught.value.field == "max_tokens"
    with pytest.raises(DoesNotFit, match=r"has 128 tokens, and an answer takes one at least.*holds 128") as caught:
        resolved(served, (5,) * 128)
    assert caught.value.field == "prompt"
    assert resolved(served, (5,) * 120, max_tokens=8).sampling.max_tokens == 8
    assert resolved(served, (5,) * 127).sampling.max_tokens == 1


def test_a_text_beyond_all_context_is_refused_before_it_is_tokenized(served: Served) -> None:
    with pytest.raises(DoesNotFit, match=r"at most 1048576 characters, and 128 tokens"):
        resolved(served, "x" * (2**20 + 1))


def test_an_open_max_tokens_takes_what_room_there_is(served: Served) -> None:
    assert resolved(served, (5,) * 120).sampling.max_tokens == 8
    assert resolved(served, (5,) * 20).sampling.max_tokens == 16


def test_whatever_fits_here_the_ledger_can_place() -> None:
    """The last context is the model's own, in the others the cache is smaller than that."""
    model = LlamaConfig(1000, 64, 128, 1, 1, 1, 32, 1e-5, 10_000.0, 8192, True)
    budget = Budget(1 << 40, 1 << 40, overhead=0, device="cpu")
    for kv_memory, block_size, context in (
        ("256 tokens", 8, 256),
        ("300 tokens", 16, 288),
        ("1000 tokens", 256, 768),
        ("128 KiB", 16, 1008),  # 64 blocks of 2 KiB, one of them the null block
        ("auto", 16, 8192),
    ):
        engine = EngineConfig(device="cpu", kv_memory=kv_memory, block_size=block_size, max_batched_tokens=512)
        assert context_of(model, engine, 2) == context
        blocks = size_cache(kv_memory, BlockShape.of(model, block_size, 2), budget, context).blocks
        for prompt in (1, context // 2, context - 1):
            ledger = Ledger(1)
            for role in ("prefill", "decode"):
                geometry = Geometry("m", 1, 1, 8, block_size, "float32")
                info = ReplicaInfo(ReplicaId(role), role, geometry, blocks)
                ledger.register(info, Report(info.id, 1), 0.0)
            request = Request(ID, (5,) * prompt, Sampling(context - prompt), 0.0)
            assert ledger.admit(Ask(ID, prompt, request.most_tokens, 0.0), 0.0) is not None


def test_a_chat_is_put_into_words_and_may_fill_the_context(served: Served) -> None:
    prompt, sampling, *_ = resolved(served, HELLO)
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert served.template is not None
    assert served.template.render(HELLO).endswith(text)
    assert prompt == tuple(served.tokenizer.encode(served.template.render(HELLO), special_tokens=False))
    assert len(prompt) + sampling.max_tokens == 128


def test_mistakes_in_a_chat_are_named_as_the_chat_names_them(served: Served) -> None:
    long = Chat(({"role": "user", "content": "word " * 200},))
    with pytest.raises(DoesNotFit) as caught:
        resolved(served, long)
    assert caught.value.field == "messages"
    with pytest.raises(DoesNotFit, match="max_completion_tokens is 128") as caught:
        resolved(served, HELLO, max_tokens=128, door_names={"max_tokens": "max_completion_tokens"})
    assert caught.value.field == "max_completion_tokens"
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role is 'king'; allowed: system, developer, user"):
        resolved(served, Chat(({"role": "king", "content": "Hello"},)))


def test_a_model_without_a_template_points_to_completions(served: Served) -> None:
    with pytest.raises(InvalidRequest, match=r"smollm2 has no chat template.*/v1/completions") as caught:
        resolve(Query(ID, HELLO), replace(served, template=None), lambda: 1)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": ()}, "prompt", "prompt is empty"),
        ({"prompt": Chat(())}, "messages", "messages is empty"),
        ({"prompt": (1, 49152)}, "prompt", "prompt[1] is 49152; token ids are 0 to 49151"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; allowed: 1 to 128"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan; allowed: 0 to 2"),
        ({"top_p": 1e-60}, "top_p", "top_p is 1e-60; allowed: above 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty is 0.0; allowed: 0.01 to 10"),
        ({"min_p": 1.5}, "min_p", "min_p is 1.5; allowed: 0 to 1"),
        ({"min_tokens": 17}, "min_tokens", "min_tokens is 17; allowed: 0 to max_tokens, which is 16"),
        ({"stop": ("a",) * 5}, "stop", "stop has 5 texts; allowed: at most 4"),
        ({"stop": ("a", "")}, "stop", "stop has a text of 0 characters"),
        ({"logit_bias": ((49152, 1.0),)}, "logit_bias", "logit_bias names token 49152; token ids are 0 to 49151"),
        ({"logit_bias": ((5, float("nan")),)}, "logit_bias", "logit_bias of token 5 is nan; allowed: -100 to 100"),
        ({"logprobs": 21}, "logprobs", "logprobs is 21; allowed: 0 to 20"),
        ({"n": 0}, "n", "n is 0; allowed: 1 to 16"),
        ({"n": 17}, "n", "n is 17; allowed: 1 to 16"),
        ({"priority": -101}, "priority", "priority is -101; allowed: -100 to 100"),
        ({"cache_salt": "x" * 257}, "cache_salt", "cache_salt has 257 characters; allowed: at most 256"),
        ({"user": "x" * 257}, "user", "user has 257 characters; allowed: at most 256"),
    ],
)
def test_a_mistake_names_its_field(served: Served, fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolved(served, **fields)
    assert caught.value.field == field
    assert says in caught.value.message


def test_no_more_answers_than_a_replica_computes_at_once(served: Served) -> None:
    few = replace(served, most_choices=3)
    assert resolved(few, n=3).n == 3
    with pytest.raises(InvalidRequest, match="n is 4; allowed: 1 to 3") as refused:
        resolved(few, n=4)
    assert refused.value.field == "n"


@pytest.mark.parametrize("id", ["a", "!", "~" * 128, 'req/1?"x"=%20', "3f8a4e0c-1d5b-4a4b-9f53-1f2b6c1f0e77"])
def test_a_request_may_be_named(id: str) -> None:
    assert named(id, "request_id", "gen") == id


@pytest.mark.parametrize("id", ["", " ", "a b", "a#1", "#", "é", "a\n", "a" * 129, "\x7f"])
def test_what_is_no_name_is_refused(id: str) -> None:
    with pytest.raises(InvalidRequest, match="allowed: 1 to 128 visible ASCII characters") as refused:
        named(id, "X-Request-Id", "cmpl")
    assert refused.value.field == "X-Request-Id"


def test_a_name_is_drawn_where_none_is_given() -> None:
    first, second = (named(None, "request_id", "gen") for _ in range(2))
    assert first != second
    assert first.startswith("gen-")


def test_only_the_served_model_is_found() -> None:
    check_model("", "smollm2-135m")
    check_model("smollm2-135m", "smollm2-135m")
    with pytest.raises(ModelNotFound, match="'gpt-4' is not served here; this cluster serves smollm2-135m"):
        check_model("gpt-4", "smollm2-135m")


# --- gRPC ------------------------------------------------------------------------------------------------

FULL = Query(
    ID, (1, 2), "m", max_tokens=5, temperature=0.5, top_p=0.25, top_k=3, min_p=0.125, repetition_penalty=1.5,
    presence_penalty=-1.0, frequency_penalty=2.0, logit_bias=((7, 0.5), (12, -100.0)), min_tokens=2, seed=2**64 - 1,
    stop=("a", "b"), stop_token_ids=(7,), ignore_eos=True, logprobs=0, prompt_logprobs=20, n=3,
    cache_salt="s", priority=-100, user="",
)  # fmt: skip
CHAT = Chat(
    ({"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "So"}),
    continue_final_message=True,
    template_kwargs={"enable_thinking": False, "n": [1, {"a": None}]},
)


@pytest.mark.parametrize("query", [Query(ID, "text"), FULL, Query(ID, HELLO), Query(ID, CHAT, max_tokens=3)])
def test_a_query_survives_the_wire(query: Query) -> None:
    request = pb.GenerateRequest.FromString(query_to_pb(query).SerializeToString())
    assert request.request_id == ID
    assert query_from_pb(request, ID) == query


def test_both_doors_draw_with_the_same_numbers(served: Served) -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.3}
    body = json.dumps({"prompt": "Hello", "logit_bias": {"7": 0.1}, **fields}).encode()
    http = parse(body, CompletionRequest).to_query(ID)
    wire = query_from_pb(pb.GenerateRequest(text="Hello", sampling=pb.Sampling(logit_bias={7: 0.1}, **fields)), ID)
    assert resolve(http, served, lambda: 1) == resolve(wire, served, lambda: 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.0])
def test_no_number_that_is_none_gets_through_grpc(served: Served, value: float) -> None:
    fields = (
        *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        "logit_bias",
    )
    for field in fields:
        given: Any = {field: {5: value * 100} if field == "logit_bias" else value}
        with pytest.raises(InvalidRequest) as caught:
            resolve(query_from_pb(pb.GenerateRequest(text="Hi", sampling=pb.Sampling(**given)), ID), served, lambda: 1)
        assert caught.value.field == field


@pytest.mark.parametrize("request_pb", [pb.GenerateRequest(), pb.GenerateRequest(token_ids=pb.TokenIds())])
def test_a_missing_prompt_is_an_empty_one(served: Served, request_pb: pb.GenerateRequest) -> None:
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        resolve(query_from_pb(request_pb, ID), served, lambda: 1)


@pytest.mark.parametrize("kwargs", ["[1]", "nope", '{"a": 1, "a": 2}', '{"a": "\\ud800"}', '{"a": NaN}'])
def test_template_kwargs_over_grpc_are_an_object(kwargs: str) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="Hi")], template_kwargs=kwargs)
    with pytest.raises(InvalidRequest, match=r"chat.template_kwargs") as caught:
        query_from_pb(pb.GenerateRequest(chat=chat), ID)
    assert caught.value.field == "chat.template_kwargs"


def test_logprobs_over_grpc() -> None:
    (entry,) = logprobs_to_pb([TokenLogprobs(5, -1.5, ((7, -0.5), (5, -1.5)))])
    assert (entry.token_id, entry.logprob) == (5, -1.5)
    assert [(top.token_id, top.logprob) for top in entry.top] == [(7, -0.5), (5, -1.5)]


def test_a_text_of_tokens_the_model_does_not_have_is_refused_at_the_door(served: Served) -> None:
    small = replace(served, vocab_size=19556)
    with pytest.raises(
        InvalidRequest, match="prompt holds token 19556, which the tokenizer knows and the model does not"
    ):
        resolved(small)
    with pytest.raises(InvalidRequest, match=r"messages holds token \d+, which"):
        resolved(replace(served, vocab_size=100), HELLO)


def test_an_end_that_the_model_cannot_choose_is_left_out(served: Served) -> None:
    assert resolved(replace(served, vocab_size=2), (1,)).sampling.stop_token_ids == ()


def test_prompt_logprobs_are_bounded_in_all(served: Served) -> None:
    wide = replace(served, context_length=1 << 17)
    assert resolved(wide, (5,) * 3120, prompt_logprobs=20).prompt_logprobs == 20
    with pytest.raises(InvalidRequest, match="20 for a prompt of 3121 tokens, 65541 logprobs in all; allowed: at most"):
        resolved(wide, (5,) * 3121, prompt_logprobs=20)


def test_template_variables_over_grpc_have_a_bound(served: Served) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")], template_kwargs=" " * (1 << 16) + "{}")
    with pytest.raises(InvalidRequest, match=r"chat\.template_kwargs has 65538 characters"):
        query_from_pb(pb.GenerateRequest(chat=chat), ID)
