"""What `bifolio status` prints of a real ledger, into a pipe."""

from __future__ import annotations

from typing import Any

import pytest
from status_kit import RECEIVED, SENT, status

from bifolio.cluster.display import print_status
from bifolio.protos.measures import Traffic
from bifolio.protos.messages import Role


@pytest.fixture
def print_of(capsys: pytest.CaptureFixture[str]) -> Printed:
    return Printed(capsys)


class Printed:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, traffic: dict[tuple[str, Role], Traffic]) -> list[str]:
        """The lines."""
        print_status(status(traffic))
        return self._capsys.readouterr().out.splitlines()

    def transfers(self, traffic: dict[tuple[str, Role], Traffic]) -> list[list[str]]:
        """The cells of the second table, without its head."""
        lines = self(traffic)
        if "transfers" not in [line.strip() for line in lines]:
            return []
        below = lines[[line.strip() for line in lines].index("transfers") :]
        return [[cell.strip() for cell in line.strip("│").split("│")] for line in below if line.startswith("│")]


def test_both_sides_of_the_transfers_are_told_in_a_line_each(print_of: Printed) -> None:
    assert print_of.transfers({("p", "prefill"): SENT, ("d", "decode"): RECEIVED}) == [
        [
            "p",
            "sent 51.1 GB",
            "48,720",
            "3",
            "2.55",
            "1",
            "1,214",
            "2 cancelled, 1 StalePlacement",
            "copied 1,100, sent 118",
            "acks 12.5, start 0.2",
        ],
        [
            "d",
            "received 613 MB",
            "615",
            "0",
            "2.45",
            "0",
            "15",
            "0",
            "copied 12, sent 3: the other process is hidden",
            "frames 31.5",
        ],
    ]


def test_in_a_pipe_a_line_has_at_most_200_columns(print_of: Printed) -> None:
    assert max(map(len, print_of({("k3v9x2ab", "prefill"): SENT, ("q7m1z0cd", "decode"): RECEIVED}))) <= 200


def test_a_replica_that_has_moved_nothing_is_left_out(print_of: Printed) -> None:
    assert [line[0] for line in print_of.transfers({("d", "decode"): RECEIVED, ("e", "decode"): Traffic()})] == ["d"]


def test_without_transfers_there_is_no_second_table(print_of: Printed) -> None:
    assert print_of.transfers({("d", "decode"): Traffic()}) == []


@pytest.mark.parametrize("traffic", [Traffic(streams=1), Traffic(failed={"Unavailable": 1})])
def test_a_replica_that_has_only_tried_is_told_of(print_of: Printed, traffic: Traffic) -> None:
    assert len(print_of.transfers({("p", "prefill"): traffic})) == 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (1_049_600, "1.05 MB"),
        (999_600_000, "1 GB"),
        (12_345_000_000_000, "12.35 TB"),
    ],
)
def test_bytes_are_told_in_units(print_of: Printed, size: int, words: str) -> None:
    ((_, moved, *_),) = print_of.transfers({("p", "prefill"): Traffic(frames=1, bytes=size)})
    assert moved == f"sent {words}"


def test_a_reason_without_words_is_told_as_it_is(print_of: Printed) -> None:
    ((*_, ways, _),) = print_of.transfers({("d", "decode"): Traffic(streams=1, ways={"sent: of old age": 2})})
    assert ways == "sent 2: of old age"


def test_replicas_and_what_waits_come_first(print_of: Printed) -> None:
    lines = print_of({("d", "decode"): RECEIVED})
    assert lines[0].strip() == "served: 2 waiting"
    assert lines[4].split("│")[1:4] == [" d  ", " decode ", " alive "]


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"state": "stalled", "stalled": {"engine": 6.4}}, "stalled: engine 6 s"),
        ({"state": "draining", "silent_s": 2.9}, "draining"),
        ({"silent_s": 4.2}, "alive, silent for 4 s"),
    ],
)
def test_a_replica_that_stands_still_is_told_with_its_seconds(
    fields: dict[str, Any], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = status({("d", "decode"): RECEIVED})
    told["replicas"][0] |= fields
    print_status(told)
    assert capsys.readouterr().out.splitlines()[4].split("│")[3].strip() == shown


def test_what_was_lost_and_placed_again_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = status({("d", "decode"): RECEIVED})
    told["lost"] = [{"id": "k3", "role": "decode", "why": "it has not reported for 10 s", "ago_s": 4.4}]
    told["resumes"] = {"decode lost": 1, "drained": 2}
    print_status(told)
    lines = capsys.readouterr().out.splitlines()
    assert "lost 4 s ago: decode replica k3: it has not reported for 10 s" in lines
    assert "placed again, decode lost: 1 time, their decode replica was lost" in lines
    assert "placed again, drained: 2 times, their replica was leaving" in lines
