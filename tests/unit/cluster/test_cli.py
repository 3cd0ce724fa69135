"""The command as users call it: output, exit status, one line for a mistake; and its gRPC client."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from bifolio.cluster import cli
from bifolio.cluster.chat import Chat
from bifolio.cluster.client import Client
from bifolio.protos import inference_pb2 as pb
from bifolio.protos.errors import InvalidRequest, Overloaded, Revoked, Unavailable
from bifolio.protos.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


class Servicer(InferenceServicer):  # type: ignore[misc]
    """Answers in three messages; the prompts 'refuse' and 'hang' do what they say."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: dict[str, Any] = {}
        self.cancelled: list[str] = []
        self.left = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if request.text == "refuse":
            context.set_trailing_metadata((("bifolio-field", "top_p"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "top_p is 3; allowed: above 0 to 1")
        if request.text == "full":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "256 requests wait already")
        if request.text == "gone":
            context.abort(grpc.StatusCode.CANCELLED, "request x was cancelled")
        if request.n > 1:
            yield from self._choices()
            return
        context.add_callback(self.left.set)
        yield pb.GenerateResponse(text="Once ")
        if request.text == "hang":
            self.left.wait(10)
        yield pb.GenerateResponse(text="더 upon")
        yield pb.GenerateResponse(finish_reason="stop", usage=self._usage())

    def _choices(self) -> Iterator[pb.GenerateResponse]:
        for choice, text, finish in ((2, "c", ""), (0, "a", ""), (2, "c", "stop"), (0, "a", "length"), (1, "b", "")):
            yield pb.GenerateResponse(text=text, choice=choice, finish_reason=finish)
        yield pb.GenerateResponse(choice=1, finish_reason="stop", usage=self._usage())

    def _usage(self) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=3,
            completion_tokens=2,
            cached_tokens=1,
            seed=7,
            timings=pb.Timings(ttft=0.05, prefill=0.03),
            route=pb.Route(prefill_replica="p-1", decode_replica="d-1", blocks=4, bytes=2_000_000, reason="long"),
        )

    def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        self.cancelled.append(request.request_id)
        if "#" in request.request_id:
            context.set_trailing_metadata((("bifolio-field", "request_id"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "request_id is 'a#1'; allowed: others")
        return pb.CancelResponse()

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="tiny", context_length=128)])


@pytest.fixture
def server() -> Iterator[tuple[str, Servicer]]:
    servicer = Servicer()
    with ThreadPoolExecutor(2) as pool:
        grpc_server = grpc.server(pool)
        add_InferenceServicer_to_server(servicer, grpc_server)
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        grpc_server.start()
        yield f"127.0.0.1:{port}", servicer
        grpc_server.stop(0).wait()


def test_the_client_streams_and_names_the_application(server: tuple[str, Servicer]) -> None:
    address, servicer = server
    with Client(address) as client:
        responses = list(client.generate([1, 2], max_tokens=5, stop=["x"], ignore_eos=True))
        assert [model.id for model in client.models()] == ["tiny"]
    assert "".join(r.text for r in responses) == "Once 더 upon"
    assert responses[-1].usage.seed == 7
    request = servicer.requests[0]
    assert list(request.token_ids.ids) == [1, 2]
    assert request.sampling.max_tokens == 5
    assert not request.sampling.HasField("temperature")
    assert servicer.metadata["application"] == "bifolio"


def test_the_client_sends_every_option(server: tuple[str, Servicer]) -> None:
    address, servicer = server
    chat = Chat(({"role": "user", "content": "Hi"},), template_kwargs={"a": 1})
    with Client(address) as client:
        list(client.generate(chat, min_p=0.5, logit_bias={7: -1.0}, min_tokens=2, logprobs=3, prompt_logprobs=0))
        list(client.generate("hi", n=2, request_id="mine", cache_salt="s", priority=-1, user="me"))
    request, other = servicer.requests
    assert (other.n, other.request_id, other.cache_salt, other.priority, other.user) == (2, "mine", "s", -1, "me")
    assert not request.HasField("n")
    assert (request.chat.messages[0].content, request.chat.template_kwargs) == ("Hi", '{"a": 1}')
    assert (request.sampling.min_p, dict(request.sampling.logit_bias)) == (0.5, {7: -1.0})
    assert (request.sampling.min_tokens, request.sampling.logprobs, request.prompt_logprobs) == (2, 3, 0)


def test_leaving_the_loop_cancels(server: tuple[str, Servicer]) -> None:
    address, servicer = server
    with Client(address) as client:
        stream = client.generate("hang")
        assert next(stream).text == "Once "
        stream.close()
        assert servicer.left.wait(5)


@pytest.mark.parametrize(
    ("prompt", "kind", "says"),
    [
        ("refuse", InvalidRequest, "top_p is 3"),
        ("full", Overloaded, "256 requests wait"),
        ("gone", Revoked, "request x was cancelled"),
    ],
)
def test_the_clusters_errors_come_back_as_themselves(
    server: tuple[str, Servicer], prompt: str, kind: type[Exception], says: str
) -> None:
    with Client(server[0]) as client, pytest.raises(kind, match=says) as caught:
        list(client.generate(prompt))
    assert getattr(caught.value, "field", None) == ("top_p" if kind is InvalidRequest else None)


def test_what_cannot_be_sent_is_refused_here(server: tuple[str, Servicer]) -> None:
    with Client(server[0]) as client:
        for wrong in (
            {"top_k": 2**40},
            {"seed": 2**64},
            {"stop": ["\ud800"]},
            {"logit_bias": {2**31: 1.0}},
            {"logit_bias": {"504": 1.0}},
            {"temperature": "hot"},
            {"prompt_logprobs": 1.5},
            {"n": 2**31},
            {"priority": "high"},
            {"cache_salt": 5},
            {"request_id": "\ud800"},
        ):
            (name,) = wrong
            with pytest.raises(InvalidRequest, match=f"{name} is .*, which cannot be sent") as refused:
                list(client.generate("hi", **wrong))  # type: ignore[arg-type]
            assert refused.value.field == name


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([{"role": "user", "content": "hi"}], "a conversation is given as Chat"),
        (Chat(({"role": "user"},)), "over gRPC each has a role and a content"),
        (Chat(({"role": "user", "content": "hi", "name": "Ada"},)), "over gRPC each has a role and a content"),
        (Chat("hi"), "'h' is no message"),  # type: ignore[arg-type]
        ([1.5], "which cannot be sent"),
    ],
)
def test_a_prompt_that_is_none_is_refused_here(server: tuple[str, Servicer], prompt: Any, says: str) -> None:
    with Client(server[0]) as client, pytest.raises(InvalidRequest, match=says) as refused:
        list(client.generate(prompt))
    assert refused.value.field == "prompt"


def test_one_stop_text_may_stand_alone(server: tuple[str, Servicer]) -> None:
    with Client(server[0]) as client:
        list(client.generate("hi", stop="end"))
    assert list(server[1].requests[-1].sampling.stop) == ["end"]


def test_a_deadline_is_an_unavailable(server: tuple[str, Servicer]) -> None:
    with Client(server[0]) as client, pytest.raises(Unavailable, match="in the time that was given"):
        list(client.generate("hang", timeout=0.1))


def test_generate_streams_to_stdout_and_sums_up_on_stderr(
    server: tuple[str, Servicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = server
    assert cli.main(["generate", "hi", "--address", address, "--stop", "a", "--stop", "b", "--seed", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "Once 더 upon\n"
    assert "3 (1 cached) + 2 tokens, stop, seed 7; TTFT 50 ms" in err
    assert "prefilled on p-1 (long), decoded on d-1, KV blocks moved: 4 (2.0 MB)" in err
    assert list(servicer.requests[0].sampling.stop) == ["a", "b"]
    assert cli.main(["generate", "hi", "--address", address, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_generate_hands_on_every_option_and_asks_as_a_chat(
    server: tuple[str, Servicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = server
    flags = "--min-p 0.5 --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 2 --min-tokens 3"
    assert cli.main(["generate", "--chat", "hi", "--system", "Be brief.", "--address", address, *flags.split()]) == 0
    (request,) = servicer.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "Be brief."), ("user", "hi")]
    assert (request.sampling.min_p, request.sampling.repetition_penalty, request.sampling.min_tokens) == (0.5, 1.5, 3)
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (-1, 2)
    assert not request.sampling.HasField("max_tokens"), "a chat takes what fits"
    capsys.readouterr()
    assert cli.main(["generate", "hi", "--system", "Be brief.", "--address", address]) == 1
    assert capsys.readouterr().err == "bifolio: --system is given; allowed only with --chat\n"


def test_generate_prints_each_choice_under_its_number(
    server: tuple[str, Servicer], capsys: pytest.CaptureFixture[str]
) -> None:
    address, servicer = server
    assert cli.main(["generate", "hi", "--address", address, "-n", "3", "--request-id", "mine"]) == 0
    out, err = capsys.readouterr()
    assert out == "[0] aa\n[1] b\n[2] cc\n"
    assert "tokens, length, stop, seed 7" in err
    assert (servicer.requests[0].n, servicer.requests[0].request_id) == (3, "mine")


def test_a_request_is_cancelled_by_its_id(server: tuple[str, Servicer], capsys: pytest.CaptureFixture[str]) -> None:
    address, servicer = server
    assert cli.main(["cancel", "req/7", "--address", address]) == 0
    assert capsys.readouterr().out == "req/7: cancelled\n"
    assert servicer.cancelled == ["req/7"]
    assert cli.main(["cancel", "a#1", "--address", address]) == 1
    assert capsys.readouterr().err == "bifolio: request_id is 'a#1'; allowed: others\n"
    assert cli.main(["cancel", "x", "--address", "127.0.0.1:1"]) == 1
    assert "nothing answers at 127.0.0.1:1" in capsys.readouterr().err
    with Client(address) as client, pytest.raises(InvalidRequest) as refused:
        client.cancel("a#1")
    assert refused.value.field == "request_id"


def test_a_failure_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "hi", "--address", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "bifolio: nothing answers at 127.0.0.1:1; is `bifolio serve` running there?\n"


STATUS = {
    "model": "tiny",
    "store": {"where": "redis://here:6379", "answers": False},
    "waiting": 3,
    "epoch": 1,
    "splits": {"short": 1, "long": 12},
    "resumes": {},
    "lost": [],
    "cache": {"asked_tokens": 400, "hit_tokens": 100, "evicted_blocks": 7},
    "replicas": [
        {
            "id": "prefill-1", "role": "prefill", "state": "alive", "stalled": {}, "silent_s": 0.5,
            "pid": 42, "address": "127.0.0.1:7001",
            "free": 10, "cached": 0, "leased": 6, "total": 16, "offered": 0, "active": 2, "held": 6,
            "transfer": {
                "streams": 1, "in_flight": 2, "done": 3, "failed": {}, "ways": {"copied": 4}, "frames": 5,
                "bytes": 6_000_000, "moving_s": 0.1, "bandwidth": 6e7, "stalled_s": {"acks": 0.5},
            },
        }
    ],
}  # fmt: skip


@pytest.fixture
def http_address() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/status"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(STATUS).encode() if found else b"no")

        def do_POST(self) -> None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"message": f"{self.path} is not known"}}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_status_as_a_table_and_as_json(
    http_address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["status", "--address", http_address]) == 0
    table = capsys.readouterr().out
    assert "tiny: 3 waiting" in table
    assert all(text in table for text in ("prefill-1", "127.0.0.1:7001", "16", "copied", "acks"))
    lines = table.splitlines()
    assert "cache: 100 of 400 tokens (25.0%) were there when they were asked for, 7 blocks evicted" in lines
    assert "Redis is away: redis://here:6379; serving goes on, a cancel is not kept for a restart" in lines
    assert "long: 12 requests, split: the decode replica lacks more than kv.local_blocks blocks" in lines
    assert "short: 1 request, local: done before a prefill replica would come to it" in lines
    assert cli.main(["status", "--address", http_address, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--address", "127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1/status does not answer" in capsys.readouterr().err


def test_a_refusal_over_http_is_told_in_the_clusters_words(
    http_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["drain", "prefill", "--address", http_address]) == 1
    assert capsys.readouterr().err == "bifolio: /v1/replicas/prefill-1/drain is not known\n"
    assert cli.main(["status", "--address", f"{http_address}/elsewhere"]) == 1
    assert capsys.readouterr().err == f"bifolio: http://{http_address}/elsewhere/status answers 404: no\n"


def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("pools: {decode: {replicas: 3}}")
    bad.write_text("pools: {decod: {replicas: 3}}")
    assert cli.main(["config", "check", str(good)]) == 0
    assert cli.main(["config", "check", str(bad)]) == 1
    assert "pools.decod: unknown name; did you mean pools.decode?" in capsys.readouterr().err
    assert cli.main(["config", "show", str(good)]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["pools"]["decode"]["replicas"] == 3
    assert shown["model"]["served_name"] == "smollm2-135m"
    assert cli.main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "ClusterConfig"


def test_serve_flags_reach_the_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bifolio.cluster import serve

    given = []
    monkeypatch.setattr(serve, "serve", lambda config: given.append(config) or 0)
    flags = "--model m.gguf --prefill 0 --decode 2 --dtype float32 --http-port 81 --grpc-port 82"
    assert cli.main(["serve", *flags.split(), "--served-model-name", "mine"]) == 0
    (config,) = given
    assert (config.model.source, config.model.served_name, config.model.dtype) == (
        "m.gguf",
        "mine",
        "float32",
    )
    assert (config.pools.prefill.replicas, config.pools.decode.replicas) == (0, 2)
    assert (config.http.port, config.grpc.port) == (81, 82)
    assert cli.main(["serve", "--dtype", "fp8"]) == 1
    assert "model.dtype: got 'fp8'; allowed: one of bfloat16, float16, float32 or null" in capsys.readouterr().err


COMPUTING = ("--kernels", "generic", "--quantization", "int8", "--threads", "3")


@pytest.mark.parametrize("command", ["serve", "verify"])
def test_flags_of_what_computes_reach_the_configuration(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.cluster import serve, verify

    given = []
    monkeypatch.setattr(serve, "serve", lambda config: given.append(config) or 0)
    monkeypatch.setattr(verify, "verify", lambda config, long: given.append(config) or 0)
    assert cli.main([command, *COMPUTING]) == 0
    assert cli.main([command, *COMPUTING, "--dtype", "bfloat16", "--exact"]) == 0
    for config in given:
        assert (config.engine.kernels, config.engine.threads) == ("generic", 3)
        assert config.model.quantization == "int8"
    assert [(config.model.dtype, config.engine.exact) for config in given] == [("bfloat16", False), ("bfloat16", True)]


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        ((), True),
        (("--dtype", "float32"), True),
        (("--device", "cpu"), True),
        (("--dtype", "float16"), False),
        (("--quantization", "int8"), False),
        (("--device", "cuda"), False),
        (("--device", "cuda", "--dtype", "float32"), False),
        (("--kernels", "triton"), False),
    ],
)
def test_verify_is_exact_where_float32_is_verified_on_cpus(
    flags: tuple[str, ...], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bifolio.cluster import verify

    monkeypatch.setattr(verify, "verify", lambda config, long: int(config.engine.exact))
    assert cli.main(["verify", *flags]) == exact


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        ("model: {dtype: float16}", False),
        ("model: {quantization: int8}", False),
        ("model: {dtype: bfloat16}", False),
        ("engine: {exact: false}", False),
        ("engine: {threads: 2}", True),
    ],
)
def test_verify_goes_by_the_file_too(text: str, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.cluster import verify

    (tmp_path / "cluster.yaml").write_text(text)
    monkeypatch.setattr(verify, "verify", lambda config, long: int(config.engine.exact))
    assert cli.main(["verify", str(tmp_path / "cluster.yaml")]) == exact


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--kernels", "sse"), "engine.kernels: got 'sse'; allowed: one of auto, avx512, avx2, generic, triton, torch"),
        (("--quantization", "int4"), "model.quantization: got 'int4'; allowed: "),
        (("--threads", "0"), "engine.threads: got 0; allowed: a whole number, at least 1, at most 256"),
        (("--exact", "--kernels", "torch", "--dtype", "bfloat16"), "engine.exact with engine.kernels torch"),
    ],
)
def test_computing_that_cannot_be_is_one_line(
    flags: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("serve", "verify"):
        assert cli.main([command, *flags]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_models_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path))
    assert cli.main(["models", "list"]) == 0
    assert "not pulled" in capsys.readouterr().out
    assert cli.main(["models", "pull", "smollm"]) == 1
    assert "did you mean smollm2-135m?" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [[], ["fly"], ["generate"], ["serve", "--decode", "two"], ["config"]])
def test_wrong_usage_is_status_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(wrong)
    assert caught.value.code == 2
    assert "usage: bifolio" in capsys.readouterr().err


def test_the_installed_command_starts_without_what_takes_seconds_to_import() -> None:
    command = [str(Path(sys.executable).with_name("bifolio")), "config", "show"]
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "bifolio.cluster.config" in imported
    assert not imported & {"ray", "torch", "grpc", "tokenizers", "numpy"}


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{Path(sys.executable).with_name('bifolio')} config show | true"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert result.stderr == ""
