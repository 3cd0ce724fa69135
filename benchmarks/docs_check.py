#!/usr/bin/env python3
"""Does docs/attention.md say what is true? Runs its Python blocks in order and compares what each prints with the text
block after it.

    python benchmarks/docs_check.py [PAGE ...]

The blocks of a page are one program. Words and whole numbers must be printed as they stand there, numbers with a point
or an exponent within 2 %, so that another CPU's rounding is no difference. A Python block without a text block is an
error, and so is a file of this repository that the page names and that does not exist. A line for each section says
what was printed; the exit status is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs" / "attention.md",)
TOLERANCE = 0.02

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_NAMED = re.compile(
    r"(?:benchmarks|cluster|docs|images|kernels|kv_manager|protos|replicas|tests)/[\w/-]+\.(?:py|md|h|cpp|svg)"
)


@dataclass(frozen=True)
class Block:
    """A Python block. `line` is that of its first line in the page; `expected` is None where no text block follows."""

    section: str
    line: int
    code: str
    expected: str | None


@dataclass(frozen=True)
class Result:
    """`difference` is empty where the block printed what the page says."""

    block: Block
    printed: str
    difference: str


def blocks_of(text: str) -> Iterator[Block]:
    """The Python blocks of a page, each with the text block that is the next fence after it."""
    section, waiting, inside = "", None, None
    lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if inside is not None:
            if line != "```":
                lines.append(line)
                continue
            body, language, inside = "".join(f"{each}\n" for each in lines), inside, None
            if waiting is not None:
                yield Block(waiting.section, waiting.line, waiting.code, body if language == "text" else None)
                waiting = None
            if language == "python":
                waiting = Block(section, number - len(lines), body, None)
        elif line.startswith("```"):
            inside, lines = line[3:], []
        elif line.startswith("#"):
            section = line.lstrip("# ")
    if inside is not None:
        raise ValueError(f"a {inside or 'nameless'} block is not closed")
    if waiting is not None:
        yield waiting


def check(page: Path) -> Iterator[Result]:
    """Run a page's blocks in one namespace, in this process, with one thread of torch. Ends after a block that fails:
    those after it build on it."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            for block in blocks_of(page.read_text(encoding="utf-8")):
                printed, failed = _run(block, page, namespace)
                yield Result(block, printed, failed or _difference(block.expected, printed))
                if failed:
                    return
    finally:
        torch.set_num_threads(threads)


def missing_files(page: Path) -> list[str]:
    """Files of this repository, and images beside the page, that the page names and that are not there."""
    named = sorted(set(_NAMED.findall(page.read_text(encoding="utf-8"))))
    return [name for name in named if not (ROOT / name).exists() and not (page.parent / name).exists()]


def same(expected: str, printed: str) -> bool:
    """Equal words and whole numbers, and other numbers within the tolerance."""
    if _NUMBER.sub("#", expected) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(printed), strict=True)
    return all(a == b or (_rounded(a) and _rounded(b) and _close(float(a), float(b))) for a, b in pairs)


def _rounded(number: str) -> bool:
    return "." in number or "e" in number


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * max(abs(a), abs(b))


def _run(block: Block, page: Path, namespace: dict[str, object]) -> tuple[str, str]:
    """What it printed, and the traceback if it raised. Line numbers are those of the page."""
    out = io.StringIO()
    try:
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
    except Exception:
        return out.getvalue(), traceback.format_exc()
    return out.getvalue(), ""


def _difference(expected: str | None, printed: str) -> str:
    if expected is None:
        return f"no text block follows; it printed\n{printed}"
    if same(expected, printed):
        return ""
    return "\n".join(difflib.unified_diff(expected.splitlines(), printed.splitlines(), "page", "printed", lineterm=""))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", type=Path, nargs="*", default=PAGES, metavar="PAGE", help="default: docs/attention.md")
    failures = 0
    for page in parser.parse_args().pages:
        sections: dict[str, list[str]] = {}
        for result in check(page):
            lines = sections.setdefault(result.block.section, [])
            lines.extend(result.printed.splitlines())
            if result.difference:
                failures += 1
                print(f"{page}:{result.block.line}: {result.block.section}\n{result.difference}\n", file=sys.stderr)
        width = max(map(len, sections), default=0)
        for section, lines in sections.items():
            print(f"{section:{width}}  {'; '.join(lines)}")
        for name in missing_files(page):
            failures += 1
            print(f"{page}: names {name}, which does not exist", file=sys.stderr)
        if not sections:
            failures += 1
            print(f"{page}: no Python block", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
