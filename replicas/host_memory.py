"""The memory of this host, or of the container that we are in. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# limit, usage, and what of the usage is files that can be dropped; of version 2 and of version 1
_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def host_memory(cgroups: Path = CGROUPS, meminfo: Path = Path("/proc/meminfo")) -> tuple[int, int]:
    """Bytes in all, and those that can be had without swapping."""
    total, free = _of_the_host(meminfo)
    for limit_file, usage_file, stat_file, dropped in _FILES:
        try:
            limit, usage = (int((cgroups / name).read_text(encoding="ascii")) for name in (limit_file, usage_file))
            stat = _fields((cgroups / stat_file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # not this version; or no limit, which is the word "max"
            continue
        total, free = min(total, limit), min(free, max(0, limit - usage + stat.get(dropped, 0)))
    return total, free


def _of_the_host(meminfo: Path) -> tuple[int, int]:
    try:
        fields = _fields(meminfo.read_text(encoding="ascii"))
        return fields["MemTotal"] * 1024, fields["MemAvailable"] * 1024
    except (OSError, ValueError, KeyError):
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")


def _fields(text: str) -> dict[str, int]:
    """Lines of a name and a number; what follows is a unit."""
    lines = (line.replace(":", " ").split() for line in text.splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}
