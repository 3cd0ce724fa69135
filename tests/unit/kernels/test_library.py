from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from bifolio.kernels import library


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where libraries are looked for: empty, until a test puts some there."""
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    return tmp_path


def put(folder: Path, *isas: str) -> None:
    for isa in isas:
        (folder / f"native_{isa}.so").symlink_to(Path(library.__file__).with_name(f"native_{isa}.so"))


def cpu(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """A CPU that has this ISA and those after it."""
    monkeypatch.setattr(library, "_of_this_cpu", lambda: library.ISAS[library.ISAS.index(isa) :])


def test_every_library_that_this_cpu_runs_says_the_same_of_it() -> None:
    built, best = library.built(), library.best()
    said = set()
    for isa in built[built.index(best) :]:
        question = library.load(isa).bifolio_best_isa
        question.restype = ctypes.c_char_p
        said.add(question().decode())
    assert len(said) == 1
    assert said <= set(library.ISAS)


@pytest.mark.parametrize(
    ("there", "has", "best"),
    [
        (("avx512", "avx2", "generic"), "avx512", "avx512"),
        (("avx512", "avx2", "generic"), "avx2", "avx2"),
        (("avx512", "generic"), "avx2", "generic"),
        (("generic",), "avx512", "generic"),
    ],
)
def test_the_best_is_built_and_the_cpu_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], has: str, best: str
) -> None:
    for isa in there:
        (folder / f"native_{isa}.so").touch()
    cpu(monkeypatch, has)
    assert library.built() == there
    assert library.best() == best


def test_nothing_built_is_an_error_that_says_what_to_do(folder: Path) -> None:
    assert library.built() == ()
    with pytest.raises(ValueError, match=r"none built.*install g\+\+.*torch"):
        library.best()
    with pytest.raises(ValueError, match=r"'avx2', with none built.*install g\+\+"):
        library.load("avx2")


def test_an_isa_that_is_not_built_is_refused(folder: Path) -> None:
    put(folder, "generic")
    with pytest.raises(ValueError, match=r"'avx512', with generic built"):
        library.load("avx512")


def test_an_isa_that_the_cpu_lacks_is_refused_before_it_can_end_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for isa in library.ISAS:
        (folder / f"native_{isa}.so").touch()
    cpu(monkeypatch, "avx2")
    with pytest.raises(ValueError) as refused:
        library.load("avx512")
    text = str(refused.value)
    for said in ("'avx512'", "built are avx512, avx2, generic", "this CPU has avx2, generic", "one of avx2, generic"):
        assert said in text


def test_a_name_that_is_no_isa_is_refused() -> None:
    with pytest.raises(ValueError, match="'sse9'; allowed are avx512, avx2, generic"):
        library.load("sse9")


def test_a_library_that_does_not_load_says_why(folder: Path) -> None:
    (folder / "native_generic.so").write_text("not a library")
    with pytest.raises(ValueError, match=r"'generic' does not load here \(.*native_generic.so") as refused:
        library.best()
    assert isinstance(refused.value.__cause__, OSError)


def test_torchs_own_threads_are_found_where_it_has_openmp() -> None:
    import torch

    assert bool(library.parallel()) is torch.backends.openmp.is_available()
