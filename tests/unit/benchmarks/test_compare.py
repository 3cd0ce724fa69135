"""What a comparison makes of its measurements: rates, ratios by round, where a load breaks, and the page's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compare_load import decode_rate
from compare_show import BEGIN, END, bars, broken, goodput_sheets, ratio, steady_of, steady_sheets, write_section
from load_figures import Timeline


def line(*at: float, tokens: tuple[int, ...] | None = None) -> Timeline:
    counts = tokens or (1,) * len(at)
    return Timeline(at, counts, sum(counts), "")


def steady(engine: str, turn: int, tok_s: float | None, streams: int = 8) -> dict[str, Any]:
    return {"part": "steady", "engine": engine, "round": turn, "streams": streams, "tok_s": tok_s}


def results(*points: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "a CPU", "cores": 2, "load": 0.0, "threads": 1, "kernels": "avx2", "torch": "2", "python": "3"}
    return {
        "machine": machine,
        "cores": [0, 1],
        "time": "a day",
        "engines": {},
        "memory": {"1": 10.0},
        "points": list(points),
    }


def test_a_rate_is_of_the_time_in_which_all_streams_decode() -> None:
    assert decode_rate([line(0.0, 1.0, 2.0, 3.0), line(1.0, 1.5, 2.0)]) == pytest.approx(3.0)
    assert decode_rate([line(0.0, 1.0, 2.0, tokens=(1, 4, 4))]) == pytest.approx(4.0)


def test_streams_that_never_decode_together_have_no_rate() -> None:
    assert decode_rate([line(0.0, 1.0), line(2.0, 3.0)]) is None
    assert decode_rate([line(0.0, 1.0), line()]) is None


def test_a_ratio_is_the_median_of_the_rounds_that_both_have() -> None:
    points = [steady("a", 0, 10.0), steady("b", 0, 5.0), steady("a", 1, 9.0), steady("b", 1, 3.0)]
    points += [steady("a", 2, 40.0), steady("b", 2, None), steady("a", 3, 1.0)]
    assert ratio(steady_of(points, "a", 8), steady_of(points, "b", 8)) == 2.5
    assert ratio(steady_of(points, "a", 8), {}) is None


def test_ours_is_divided_by_each_of_the_others() -> None:
    speeds, ratios = steady_sheets(results(steady("bifolio", 0, 30.0), steady("vllm", 0, 20.0)))
    assert speeds.rows == [["bifolio", "30.0"], ["vllm", "20.0"]]
    assert ratios.rows == [["bifolio / vllm", "1.50"]]


def test_a_load_breaks_where_first_too_few_requests_are_good() -> None:
    assert broken({8.0: 0.95, 4.0: 0.5, 2.0: 0.1}, {8.0: 1.0, 4.0: 2.0, 2.0: 4.0}) == "2.00 a second"
    assert broken({8.0: 0.95}, {8.0: 1.0}) == "-"


def test_a_trace_has_a_table_with_its_loads_in_ascending_order() -> None:
    def point(scale: float, share: float) -> dict[str, Any]:
        of = {"part": "goodput", "engine": "bifolio", "round": 0, "trace": "t", "scale": scale}
        return of | {"offered": 8 / scale, "share": share, "good_s": share * 8 / scale}

    (sheet,) = goodput_sheets(results(point(2.0, 0.5), point(8.0, 1.0)))
    assert sheet.numbers[:2] == ["1.00 (8 x)", "4.00 (2 x)"]
    assert sheet.rows == [["bifolio", "100%", "50%", "4.00 a second", "2.00"]]


def test_the_section_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n", encoding="utf-8")
    write_section(page, results(steady("bifolio", 0, 30.0)), Path("images"))
    page.write_text(page.read_text(encoding="utf-8") + "\n## After\n", encoding="utf-8")
    once = page.read_text(encoding="utf-8")
    write_section(page, results(steady("bifolio", 0, 60.0)), Path("images"))
    assert page.read_text(encoding="utf-8") == once.replace("30.0", "60.0")
    assert once.startswith("# Page\n")
    assert once.endswith(f"{END}\n\n## After\n")
    assert once.count(BEGIN) == 1


def test_a_bar_says_whether_it_was_met_and_nothing_of_what_was_not_measured() -> None:
    found = results(steady("bifolio", 0, 30.0), steady("vllm eager", 0, 20.0), steady("llama.cpp", 0, 40.0))
    assert bars(found) == [
        "8 streams, bifolio / vllm eager: 1.50, bar >= 1.2 met",
        "8 streams, bifolio / llama.cpp: 0.75, bar >= 1 MISSED",
    ]
    assert bars(results()) == []
