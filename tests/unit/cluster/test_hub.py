"""Models of the Hugging Face hub: brought once, found without a network, refused in one line. The hub is on loopback.

The library reads its environment when it is imported, so everything that asks it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_kit import Hub, Repository, running

from bifolio.cluster.hub import HubModel, parse
from bifolio.cluster.models import default_name
from bifolio.protos.errors import ConfigError
from bifolio.replicas.model_files import check_model, fingerprint

# Each step is [function, argument]; the answer is what it returned, or the message of its ConfigError
DRIVER = """
import json, sys
from bifolio.cluster import models
from bifolio.protos.errors import ConfigError
from bifolio.replicas.model_files import check_model, fingerprint

def listed(_):
    return [[m.name, m.state, m.bytes, str(m.path)] for m in models.list_models() if "/" in m.name]

def progress(name):
    seen = []
    models.pull(name, lambda stage, done, total: seen.append([stage, done, total]))
    return seen

def loaded(source):
    check_model(models.resolve(source))
    return fingerprint(models.resolve(source))

pull, resolve = models.pull, models.resolve
answers = []
for function, argument in json.loads(sys.argv[1]):
    try:
        answer = globals()[function](argument)
        answers.append(answer if isinstance(answer, list) else str(answer))
    except ConfigError as error:
        answers.append("refused: " + error.message)
print(json.dumps(answers))
"""


@dataclass
class Machine:
    """Has a cache of its own, and asks one hub."""

    hub: Hub
    cache: Path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        proxies = {"NO_PROXY": "*", "no_proxy": "*"}
        ours = {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.cache), "BIFOLIO_CACHE": str(self.cache / "known")}
        return {**kept, **proxies, **ours, **more}

    def do(self, *steps: tuple[str, str], **environment: str) -> list[Any]:
        command = [sys.executable, "-W", "error", "-c", DRIVER, json.dumps(steps)]
        done = subprocess.run(
            command, env=self.environment(**environment), cwd=self.cache, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        answers: list[Any] = json.loads(done.stdout)
        return answers

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-W", "error", "-m", "bifolio.cluster.cli", *words]
        return subprocess.run(
            command, env=self.environment(COLUMNS="200"), cwd=self.cache, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def files(glassllm_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in glassllm_dir.iterdir()}


@pytest.fixture
def machine(files: dict[str, bytes], tmp_path: Path) -> Iterator[Machine]:
    unread = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.onnx", "original/params.json"]
    unread += ["original/model.safetensors", "tokenizer.model"]
    whole = files | {"chat_template.jinja": b"{{ messages }}"}
    with running({"glass/en": Repository({"main": whole | dict.fromkeys(unread, b"never read")})}) as hub:
        yield Machine(hub, tmp_path)


def test_a_pulled_model_is_the_model(machine: Machine, files: dict[str, bytes], glassllm_dir: Path) -> None:
    pulled = machine.command("models", "pull", "glass/en")
    assert pulled.returncode == 0, pulled.stderr
    folder = machine.cache / "hub" / "models--glass--en" / "snapshots"
    assert re.fullmatch(rf"glass/en: pulled: {folder}/\w{{40}}\n", pulled.stdout)
    assert "download" in pulled.stderr
    assert "Fetching" not in pulled.stderr  # our bar, not the library's besides
    assert sorted(machine.hub.transfers()) == sorted([*files, "chat_template.jinja"])

    again = machine.command("models", "pull", "glass/en")
    assert again.stdout.startswith("glass/en: already there: /")
    assert machine.hub.transfers() == []

    path = Path(pulled.stdout.split(": ")[-1].strip())
    assert check_model(path) == check_model(glassllm_dir)
    nowhere = "http://127.0.0.1:9"  # serving asks no network
    assert machine.do(("resolve", "glass/en"), ("loaded", "glass/en"), HF_ENDPOINT=nowhere) == [
        str(path),
        fingerprint(glassllm_dir),
    ]
    assert machine.hub.asked == []


def test_a_broken_connection_is_resumed(machine: Machine) -> None:
    content = os.urandom(12 << 20)
    machine.hub.repositories["glass/big"] = Repository({"main": {"big.gguf": content}})
    machine.hub.break_after = [11 << 20]
    (path,) = machine.do(("pull", "glass/big:big.gguf"))
    assert Path(path).read_bytes() == content
    ranges = [range for method, path, range in machine.hub.asked if method == "GET" and "/cdn/" in path]
    assert ranges == ["", f"bytes={10 << 20}-"]  # the library writes 10 MiB at a time


def test_progress_counts_every_byte(machine: Machine, files: dict[str, bytes]) -> None:
    (seen,) = machine.do(("progress", "glass/en"))
    total = sum(len(files[name]) for name in files if name != "config.json") + len(b"{{ messages }}")
    assert seen[0] == ["download", 0, total]
    assert seen[-1] == ["download", total, total]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_what_is_half_there_is_not_served(machine: Machine) -> None:
    machine.hub.repositories["glass/en"].forbidden = {"model.safetensors"}
    pull, resolve, listed = machine.do(("pull", "glass/en"), ("resolve", "glass/en"), ("listed", ""))
    assert re.fullmatch(r"refused: http://.* refuses the token for glass/en \(.*403 .*\); check HF_TOKEN", pull)
    assert resolve == "refused: glass/en is not whole; bring it with: bifolio models pull glass/en"
    assert [(name.split("@")[0], state) for name, state, *_ in listed] == [("glass/en", "not whole")]
    machine.hub.transfers()

    machine.hub.repositories["glass/en"].forbidden = set()
    path, found = machine.do(("pull", "glass/en"), ("resolve", "glass/en"))
    assert path == found
    assert machine.hub.transfers() == ["model.safetensors"]


def test_the_old_model_stays_until_the_new_is_whole(machine: Machine) -> None:
    repository = machine.hub.repositories["glass/en"]
    (old,) = machine.do(("pull", "glass/en"))
    repository.revisions["main"] = repository.revisions["main"] | {"model.safetensors": b"trained on"}
    repository.forbidden = {"model.safetensors"}
    refused, found = machine.do(("pull", "glass/en"), ("resolve", "glass/en"))
    assert refused.startswith("refused: ")
    assert found == old
    repository.forbidden = set()
    new, found = machine.do(("pull", "glass/en"), ("resolve", "glass/en"))
    assert new == found != old


def test_a_revision_is_a_model_of_its_own(machine: Machine, files: dict[str, bytes]) -> None:
    repository = machine.hub.repositories["glass/en"]
    repository.revisions["v2"] = files
    commit, _ = repository.commit("v2")
    pulled, found, by_commit, main, listed = machine.do(
        ("pull", "glass/en@v2"),
        ("resolve", "glass/en@v2"),
        ("resolve", f"glass/en@{commit}"),
        ("resolve", "glass/en"),
        ("listed", ""),
    )
    assert Path(pulled).name == commit
    assert pulled == found == by_commit
    assert main == (
        "refused: glass/en is not here yet (it is no path, nor in the Hugging Face cache); "
        "bring it with: bifolio models pull glass/en"
    )
    assert listed == [["glass/en@v2", "here", sum(len(content) for content in files.values()), pulled]]


def test_gguf_files_are_pulled_one_by_one(machine: Machine) -> None:
    quants = {name: b"GGUF" + name.encode() for name in ("glass-Q4_0.gguf", "glass-Q8_0.gguf", "more/glass-F16.gguf")}
    machine.hub.repositories["glass/quants"] = Repository({"main": quants})
    path, found, inner, wrong, none, listed = machine.do(
        ("pull", "glass/quants:glass-Q8_0.gguf"),
        ("resolve", "glass/quants:glass-Q8_0.gguf"),
        ("pull", "glass/quants:more/glass-F16.gguf"),
        ("pull", "glass/quants:glass-Q2_K.gguf"),
        ("pull", "glass/quants"),
        ("listed", ""),
    )
    assert path == found
    assert Path(path).read_bytes() == quants["glass-Q8_0.gguf"]
    assert Path(inner).read_bytes() == quants["more/glass-F16.gguf"]
    has = "it has glass-Q4_0.gguf, glass-Q8_0.gguf, more/glass-F16.gguf"
    assert wrong == f"refused: glass/quants has no file glass-Q2_K.gguf; {has}"
    assert none.endswith(f"no model.safetensors; {has}; name one: bifolio models pull glass/quants:FILE.gguf")
    assert [name for name, *_ in listed] == ["glass/quants:glass-Q8_0.gguf", "glass/quants:more/glass-F16.gguf"]


def test_shards_are_those_the_index_names(machine: Machine, files: dict[str, bytes]) -> None:
    halves = {f"model-0000{n}-of-00002.safetensors": b"half" for n in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", halves, strict=True))}).encode()}
    small = {name: content for name, content in files.items() if name != "model.safetensors"}
    other = {"consolidated.safetensors": b"never read"}
    machine.hub.repositories["glass/sharded"] = Repository({"main": small | halves | index | other})
    del halves["model-00002-of-00002.safetensors"]
    machine.hub.repositories["glass/torn"] = Repository({"main": small | halves | index})
    machine.hub.repositories["glass/no-index"] = Repository({"main": small | halves | dict.fromkeys(index, b"{}")})
    path, torn, no_index = machine.do(("pull", "glass/sharded"), ("pull", "glass/torn"), ("pull", "glass/no-index"))
    shards = sorted(each.name for each in Path(path).glob("*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert "glass/torn has no model-00002-of-00002.safetensors, which its model.safetensors.index.json names" in torn
    assert "glass/no-index: its model.safetensors.index.json names no weights" in no_index


def test_what_cannot_be_pulled_is_refused_in_one_line(machine: Machine, files: dict[str, bytes]) -> None:
    small = {name: content for name, content in files.items() if name != "model.safetensors"}
    other = json.dumps({"architectures": ["BertModel"], "model_type": "bert"}).encode()
    machine.hub.repositories |= {
        "glass/pickled": Repository({"main": small | {"pytorch_model.bin": b"code"}}),
        "glass/nothing": Repository({"main": {"README.md": b""}}),
        "glass/bert": Repository({"main": files | {"config.json": other}}),
        "glass/gated": Repository({"main": files}, gated=True),
        "glass/private": Repository({"main": files}, token="right"),
    }
    says = {
        "glass/unknown": f"{machine.hub.url} shows no repository glass/unknown; check the name, or set HF_TOKEN",
        "glass/private": f"{machine.hub.url} shows no repository glass/private; check the name, or set HF_TOKEN",
        "glass/gated": f"glass/gated is gated; ask for access on {machine.hub.url}/glass/gated, and set HF_TOKEN",
        "glass/en@v9": "glass/en has no revision v9; give a branch, a tag or a whole commit id",
        "glass/pickled": "glass/pickled has no model.safetensors; weights in .bin and .pth files are not read",
        "glass/nothing": "glass/nothing has no config.json and no tokenizer.json and no model.safetensors; a ",
        "glass/bert": "glass/bert cannot be served, and no weights were brought: model: ",
        "glass/en:x.gguf": "glass/en has no file x.gguf; it has no .gguf file at all",
        "glass/en:x.bin": "glass/en:x.bin: x.bin is no .gguf file; allowed: ORG/NAME:FILE.gguf, or ORG/NAME",
        "glass/a--b": "'glass/a--b' is no name of a repository: ",
    }
    for answer, said in zip(machine.do(*(("pull", source) for source in says)), says.values(), strict=True):
        assert answer.startswith(f"refused: {said}")
        assert "\n" not in answer


def test_a_token_opens_what_is_private(machine: Machine, files: dict[str, bytes]) -> None:
    machine.hub.repositories["glass/private"] = Repository({"main": files}, token="right")
    (wrong,) = machine.do(("pull", "glass/private"), HF_TOKEN="wrong")
    assert wrong.startswith(f"refused: {machine.hub.url} refuses the token for glass/private (")
    (path,) = machine.do(("pull", "glass/private"), HF_TOKEN="right")
    assert (Path(path) / "model.safetensors").is_file()


def test_without_a_network_it_says_what_was_tried(machine: Machine) -> None:
    nowhere = "http://127.0.0.1:9"
    (answer,) = machine.do(("pull", "glass/en"), HF_ENDPOINT=nowhere)
    assert answer.startswith(f"refused: asking {nowhere} for glass/en failed (ConnectError: ")
    (answer,) = machine.do(("pull", "glass/en"), HF_HUB_OFFLINE="1")
    assert answer == ("refused: glass/en is not fetched while HF_HUB_OFFLINE is set; unset it, or serve what is here")
    assert machine.hub.asked == []
    (answer,) = machine.do(("pull", "glass/en"), HF_ENDPOINT=f"{machine.hub.url}/no-hub")
    assert re.match("refused: http://.*/no-hub answers 404 for glass/en .*check HF_ENDPOINT", answer)


def test_a_path_wins_over_a_name_of_the_hub(machine: Machine, glassllm_dir: Path) -> None:
    (machine.cache / "glass").mkdir()
    (machine.cache / "glass" / "en").symlink_to(glassllm_dir)
    assert machine.do(("resolve", "glass/en"), ("loaded", "glass/en")) == ["glass/en", fingerprint(glassllm_dir)]


@pytest.mark.parametrize(
    ("source", "model"),
    [
        ("org/Name-1.5_b", HubModel("org/Name-1.5_b")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/name@v1:sub/a.gguf", HubModel("org/name", "v1", "sub/a.gguf")),
        ("name", None),
        ("/org/name", None),
        ("./org/name", None),
        ("a/b/c", None),
        ("org/name:", None),
        ("org/name@", None),
    ],
)
def test_names(source: str, model: HubModel | None) -> None:
    assert parse(source) == model
    assert model is None or str(model) == source


def test_a_model_is_served_under_the_name_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_name("org/name") == "org/name"
    assert default_name("org/name@v1") == "org/name@v1"
    assert default_name("org/name:sub/Model-1.5.gguf") == "Model-1.5"
    with pytest.raises(ConfigError, match=r"Q4_0 is no .gguf file; allowed: ORG/NAME:FILE.gguf"):
        default_name("org/name:Q4_0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert default_name("org/name") == "name"
