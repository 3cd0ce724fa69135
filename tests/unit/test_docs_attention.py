"""docs/attention.md: every figure in it is computed again, and the check itself sees what it should."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_check", ROOT / "benchmarks" / "docs_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


docs_check = _load()


@pytest.mark.parametrize("page", docs_check.PAGES, ids=lambda page: page.name)
def test_every_block_prints_what_the_page_says(page: Path) -> None:
    results = list(docs_check.check(page))
    assert results
    assert [f"line {r.block.line}: {r.difference}" for r in results if r.difference] == []


@pytest.mark.parametrize("page", docs_check.PAGES, ids=lambda page: page.name)
def test_every_file_the_page_names_exists(page: Path) -> None:
    assert docs_check.missing_files(page) == []


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("error 1.00, 3 blocks\n", "error 1.01, 3 blocks\n", True),
        ("error 1.00\n", "error 1.05\n", False),
        ("3 blocks\n", "4 blocks\n", False),
        ("3 blocks\n", "3.0 blocks\n", False),
        ("True\n", "False\n", False),
        ("below 1e-6\n", "below 1e-6\n", True),
        ("1\n", "1\n2\n", False),
    ],
)
def test_numbers_may_differ_by_rounding_and_nothing_else(expected: str, printed: str, same: bool) -> None:
    assert docs_check.same(expected, printed) is same


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("## A\n```python\nprint(1)\n```\n", "no text block follows"),
        ("## A\n```python\nprint(1)\n```\n```python\nprint(1)\n```\n```text\n1\n```\n", "no text block follows"),
        ("## A\n```python\nprint(1)\n```\n```text\n2\n```\n", "-2\n+1"),
        ("## A\n```python\n1 / 0\n```\n```text\n1\n```\n", 'page.md", line 3, in <module>'),
    ],
)
def test_a_page_that_is_wrong_is_told_where(tmp_path: Path, page: str, said: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(page, encoding="utf-8")
    assert said in next(docs_check.check(file)).difference
