"""How setup.py compiles the kernels: what a missing or old compiler does, and when it compiles again."""

from __future__ import annotations

import os
import sys
import time
import zipfile
from pathlib import Path

import pytest
from checkout import ISAS, X86, attempt, copy_sources, run

BUILD_WHEEL = (sys.executable, "-m", "build", "--wheel", "--no-isolation")
IN_PLACE = (sys.executable, "setup.py", "-q", "build_ext", "--inplace")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The source tree, with a kernels.cpp that compiles at once."""
    tree = copy_sources(tmp_path / "tree")
    (tree / "kernels" / "native" / "kernels.cpp").write_text('extern "C" int answer() { return 42; }\n')
    return tree


def libraries(tree: Path) -> dict[str, int]:
    """ISA to when it was built."""
    found = (tree / "kernels").glob("native_*")
    return {path.stem.removeprefix("native_"): path.stat().st_mtime_ns for path in found}


def test_without_a_compiler_there_is_a_wheel_without_libraries_and_a_warning(tree: Path) -> None:
    done = attempt(*BUILD_WHEEL, cwd=tree, CXX="/nonexistent/g++")
    assert done.returncode == 0
    (wheel,) = (tree / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "bifolio/kernels/ops.py" in archive.namelist()
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
    warning = done.stderr
    assert f"WARNING: the native CPU kernels {', '.join(ISAS)} were not built" in warning
    assert warning.count("/nonexistent/g++: No such file") == 1
    assert "torch computes" in warning
    assert "install a recent g++" in warning


def test_required_libraries_that_do_not_compile_are_an_error(tree: Path) -> None:
    done = attempt(*BUILD_WHEEL, cwd=tree, CXX="/nonexistent/g++", BIFOLIO_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "/nonexistent/g++: No such file" in done.stderr
    assert not list(tree.glob("dist/*.whl"))


def test_in_place_compiles_what_has_changed(tree: Path) -> None:
    run(*IN_PLACE, cwd=tree)
    first = libraries(tree)
    assert sorted(first) == sorted(ISAS)
    run(*IN_PLACE, cwd=tree)
    assert libraries(tree) == first
    header = tree / "kernels" / "native" / "lanes.h"
    os.utime(header, (time.time(), time.time()))
    run(*IN_PLACE, cwd=tree)
    assert all(second > first[isa] for isa, second in libraries(tree).items())


def test_a_source_that_does_not_compile_leaves_no_library_of_an_older_one(tree: Path) -> None:
    run(*IN_PLACE, cwd=tree)
    (tree / "kernels" / "native" / "kernels.cpp").write_text("#error the kernels are broken\n")
    assert "the kernels are broken" in attempt(*IN_PLACE, cwd=tree).stderr
    assert libraries(tree) == {}


@pytest.mark.skipif(not X86, reason="one instruction set only")
def test_an_instruction_set_that_the_compiler_does_not_know_is_skipped_alone(tree: Path) -> None:
    old = tree / "old-g++"
    old.write_text('#!/bin/sh\ncase "$*" in *avx512bf16*) echo unrecognized option; exit 1;; esac\nexec g++ "$@"\n')
    old.chmod(0o755)
    warning = attempt(*IN_PLACE, cwd=tree, CXX=str(old)).stderr
    assert sorted(libraries(tree)) == ["avx2", "generic"]
    assert "the native CPU kernels avx512 were not built" in warning
    assert "unrecognized option" in warning
    assert "the next best of avx2, generic" in warning
