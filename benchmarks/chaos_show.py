"""A verdict as a table: for people, and as Markdown between two marks of a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import measure
from chaos_check import Result, Row, Verdict
from rich.table import Table

COLUMNS = ("count", "open", "resumed", "broken", "refused", "hung", "wrong", "p50 s", "max s")
MOST_SHOWN = 12  # complaints of a kind


def shown(result: Result, verdict: Verdict) -> list[Table | str]:
    table = measure.table(_heading(result), ["fault"], COLUMNS)
    for row in verdict.rows:
        table.add_row(row.kind, *_numbers(row))
    lines: list[str] = []
    for each in (verdict.wrong, verdict.hung, verdict.torn, verdict.failed, verdict.never, verdict.leaks):
        lines += each[:MOST_SHOWN]
        lines += [f"and {len(each) - MOST_SHOWN} more like these"] if len(each) > MOST_SHOWN else []
    return [table, *lines, *totals(result, verdict)]


def totals(result: Result, verdict: Verdict) -> list[str]:
    def bar(what: str, count: int) -> str:
        return f"{what} {count}: " + measure.verdict(not count, "bar 0")

    return [
        f"{len(result.strikes)} faults in {result.seconds / 60:.1f} minutes; {len(result.outcomes)} requests: "
        f"{verdict.ok} answered, {verdict.resumed} of them after a resume, {verdict.left} left by their clients, "
        f"{verdict.refused} refused for then, {verdict.broken} broken with their ingress",
        bar("wrong answers", len(verdict.wrong)),
        bar("hung", len(verdict.hung)),
        bar("broken where no ingress died", len(verdict.torn)),
        bar("other failures", len(verdict.failed)),
        bar("faults that the cluster did not get over", len(verdict.never)),
        bar("blocks leaked", verdict.leaked),
        bar("other things left at the end", len(verdict.leaks)),
    ]


def write_markdown(path: Path, mark: str, command: str, result: Result, verdict: Verdict) -> None:
    """Between the marks of this name; raises ValueError on a page without them."""
    begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{path} needs one line {begin} and one {end}, between which the table is written")
    before, rest = page.split(begin)
    lines = [f"`{command}`", "", *markdown(verdict.rows), "", *(f"- {line}" for line in totals(result, verdict))]
    path.write_text(before + "\n".join([begin, *lines, end]) + rest.partition(end)[2], encoding="utf-8")


def markdown(rows: Sequence[Row]) -> list[str]:
    lines = [["fault", *COLUMNS], ["---", *("---:" for _ in COLUMNS)], *([row.kind, *_numbers(row)] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _heading(result: Result) -> str:
    return f"{len(result.strikes)} faults under load; open: streams when they struck; s: until the cluster was whole"


def _numbers(row: Row) -> list[str]:
    counts = (row.count, row.open, row.resumed, row.broken, row.refused, row.hung, row.wrong)
    return [*map(str, counts), *("-" if each is None else f"{each:.1f}" for each in (row.median, row.longest))]
