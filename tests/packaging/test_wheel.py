"""The built wheel, installed where the source tree is out of reach: the command works, and nothing else came along."""

from __future__ import annotations

import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from checkout import FOLDERS, ISAS, ROOT, copy_sources, run


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel made from nothing but the sdist."""
    place = copy_sources(tmp_path_factory.mktemp("wheel"))
    run(sys.executable, "-m", "build", "--no-isolation", cwd=place, BIFOLIO_REQUIRE_NATIVE="1")
    return place / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it, which borrows every dependency from this one."""
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", venv / "bin" / "python"]
    run(*pip, "install", "-q", "--no-deps", wheel, cwd=venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path from a .pth file comes last, and the .pth files in it, an editable install's among them, are not read
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_the_wheel_holds_the_five_folders_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.startswith("bifolio-")]
    assert {tuple(name.split("/")[:2]) for name in names} == {("bifolio", folder) for folder in FOLDERS}
    sources = {f"bifolio/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    assert sources <= set(names)
    assert {name.rpartition(".")[2] for name in names} == {"py", "pyi", "proto", "typed", "so"}
    libraries = {f"bifolio/kernels/native_{isa}.so" for isa in ISAS}
    assert {name for name in names if name.endswith(".so")} == libraries
    for folder in FOLDERS:
        assert f"bifolio/{folder}/py.typed" in names
    assert {name for name in names if name.endswith(".proto")} == {
        "bifolio/protos/inference.proto",
        "bifolio/protos/kv.proto",
    }


def test_the_wheel_is_for_this_platform_and_any_python(wheel: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.stem.split("-")[2:] == ["py3", "none", platform]


def test_the_sdist_holds_what_compiles_the_kernels(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {f"kernels/native/{path.name}" for path in (ROOT / "kernels" / "native").iterdir()}
    assert {"setup.py", "kernels/native/kernels.cpp", *native} <= names
    assert not [name for name in names if name.endswith(".so")]


def test_the_libraries_load_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "from bifolio.kernels import library\nprint(library.built())\nlibrary.load(library.best())"
    assert run(installed / "bin" / "python", "-W", "ignore", "-c", code, cwd=tmp_path) == f"{ISAS}\n"


def test_the_command_works_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    bifolio = installed / "bin" / "bifolio"
    assert run(bifolio, "--version", cwd=tmp_path).startswith("bifolio 0.")
    shown = yaml.safe_load(run(bifolio, "config", "show", cwd=tmp_path))
    assert shown["model"]["source"] == "smollm2-135m"
    assert "smollm2-135m" in run(bifolio, "models", "list", cwd=tmp_path)


def test_every_module_comes_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    modules = [f"bifolio.{folder}.{path.stem}" for folder in FOLDERS for path in (ROOT / folder).glob("[a-z]*.py")]
    code = f"import importlib\nfor name in {modules!r}: print(importlib.import_module(name).__file__)"
    files = run(installed / "bin" / "python", "-W", "ignore", "-c", code, cwd=tmp_path).split("\n")[:-1]
    assert len(files) == len(modules)
    assert [file for file in files if not Path(file).is_relative_to(installed)] == []


def test_the_folders_are_not_importable_by_their_bare_names(installed: Path, tmp_path: Path) -> None:
    (packages,) = installed.glob("lib/python*/site-packages")
    assert not [folder for folder in FOLDERS if (packages / folder).exists()]
    code = f"import importlib.util\nprint([n for n in {FOLDERS!r} if importlib.util.find_spec(n)])"
    assert run(installed / "bin" / "python", "-c", code, cwd=tmp_path) == "[]\n"
