"""Rows as one table: a line for each case, its first way with all that was measured, then the others by their times;
of engines a line for each row.

Short on purpose, for whoever reads only a console's last page: what is right in `parity` is counted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from gpu_rows import AGAIN, Row

SAID = 70  # letters of a reason


def report(rows: Sequence[Row], minutes: float, dry: bool) -> str:
    lines = [f"{len(rows)} rows in {minutes:.1f} minutes"]
    if dry:
        lines.append("ON A CPU, WITH TINY SIZES: the code was tried; no time or rate below is a measurement")
    for section, of_section in groupby(sorted(rows, key=lambda row: _order(rows, row)), key=lambda row: row.section):
        held = list(of_section)
        counts = {status: sum(row.status == status for row in held) for status in sorted({row.status for row in held})}
        title = f"{section}, not measured" if dry and section not in ("device", "parity") else section
        lines.append(f"\n{title}: " + ", ".join(f"{count} {status}" for status, count in counts.items()))
        lines += {"device": _facts, "parity": _parity, "engine": _figures, "split": _figures}.get(section, _times)(held)
    return "\n".join(lines)


def _order(rows: Sequence[Row], row: Row) -> int:
    """Sections in the order in which they began."""
    return next(i for i, first in enumerate(rows) if first.section == row.section)


def _facts(rows: Sequence[Row]) -> list[str]:
    return [f"  {k} {v}" for row in rows for k, v in row.numbers.items()] + _reasons(rows)


def _parity(rows: Sequence[Row]) -> list[str]:
    lines = []
    errors = [row.numbers for row in rows if row.status == "ok" and "tolerance" in row.numbers]
    for tolerance in sorted({numbers["tolerance"] for numbers in errors}):
        alike = [numbers for numbers in errors if numbers["tolerance"] == tolerance]
        error, norm = (max(numbers[name] for numbers in alike) for name in ("error", "norm"))
        lines.append(f"  tolerance {tolerance:g}: {len(alike)} rows, worst error {error:.2g}, worst norm {norm:.2g}")
    return lines + _reasons(rows)


def _times(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case, of_case in groupby(rows, key=lambda row: row.case):
        first, *others = of_case
        cells = [_cell(first, None), *(_cell(other, first) for other in others)]
        lines.append(f"  {case}: " + "; ".join(cells))
    return lines


def _figures(rows: Sequence[Row]) -> list[str]:
    lines = []
    for case, of_case in groupby(rows, key=lambda row: row.case):
        lines.append(f"  {case}")
        for row in of_case:
            if row.said.startswith(AGAIN):
                continue
            cells = [] if row.status == "ok" else [f"{row.status}: {row.said[:SAID]}"]
            cells += [f"{name} {_shown(value)}" for name, value in row.numbers.items() if not isinstance(value, list)]
            lines.append(f"    {row.way}: " + ", ".join(cells))
            lines += [f"      | {line}" for value in row.numbers.values() if isinstance(value, list) for line in value]
    return lines


def _cell(row: Row, first: Row | None) -> str:
    n = row.numbers
    if row.status != "ok" or "us" not in n:
        return f"{row.way} {row.status}: {row.said[:SAID]}"
    text = f"{row.way} {_short(n['us'])} us"
    if "wall_us" in n:
        text += f" (wall {_short(n['wall_us'])})"
    if first is not None and first.numbers.get("us"):
        return f"{text} x{n['us'] / first.numbers['us']:.2f}"
    rates = [f"{_short(n[unit])} {unit}" for unit in ("GB/s", "TFLOP/s") if unit in n]
    shares = [f"{n['share']:.0%}"] if "share" in n else []
    return " ".join([text, *rates, *shares])


def _reasons(rows: Sequence[Row]) -> list[str]:
    return [f"  {row.case} | {row.way} {row.status}: {row.said[:SAID]}" for row in rows if row.status != "ok"]


def _shown(value: object) -> str:
    return _short(value) if isinstance(value, float) else str(value)


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"
