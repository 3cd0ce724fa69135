"""How much memory this host, or the container that we are in, has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from bifolio.replicas.host_memory import host_memory

MEMINFO = "MemTotal:       16000 kB\nMemFree: 10 kB\nMemAvailable:   12000 kB\n"


def host(folder: Path, **files: str) -> tuple[int, int]:
    (folder / "memory").mkdir(parents=True)
    (folder / "meminfo").write_text(MEMINFO)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("DOT", ".")
        path.write_text(text)
    return host_memory(folder, folder / "meminfo")


def test_of_a_host(tmp_path: Path) -> None:
    assert host(tmp_path / "plain") == (16000 * 1024, 12000 * 1024)
    assert host(tmp_path / "unlimited", memoryDOTmax="max\n", memoryDOTcurrent="5\n") == (16000 * 1024, 12000 * 1024)


@pytest.mark.parametrize(
    "files",
    [
        {"memoryDOTmax": "5000000", "memoryDOTcurrent": "3000000", "memoryDOTstat": "anon 7\ninactive_file 400000\n"},
        {
            "memory__memoryDOTlimit_in_bytes": "5000000",
            "memory__memoryDOTusage_in_bytes": "3000000",
            "memory__memoryDOTstat": "total_inactive_file 400000\n",
        },
    ],
)
def test_of_a_container_with_less(tmp_path: Path, files: dict[str, str]) -> None:
    """What the usage counts of files that can be dropped is free."""
    assert host(tmp_path / "container", **files) == (5_000_000, 2_400_000)


def test_this_machine_has_some() -> None:
    total, free = host_memory()
    assert 0 < free <= total
