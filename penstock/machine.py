"""What this process may use of its machine: cores and memory.

A container sees all that its host has, but its control group may allow it less. With a thread for each core of the host
it would mostly be held back by the scheduler, and with a share of the host's memory it would be killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CORES = "PENSTOCK_CORES"
"""A variable with the most cores to use, where no group limits them: a pod that has asked for some may use all."""

_ROOT = Path("/")
_CACHE_V2 = ("inactive_file", "active_file", "slab_reclaimable")
_CACHE_V1 = ("total_inactive_file", "total_active_file")
"""Parts of a group's memory that the system takes back when others need it."""


class Memory(NamedTuple):
    total: int
    available: int
    """What can be taken before something else must give way; caches of files count as free."""


def usable_cores(root: Path = _ROOT) -> int:
    """The cores that this process may be run on, at most as many as its groups and `CORES` allow. A part of a core is
    none: threads that wait for each other are as slow as the one that is held back. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if (allowed := os.environ.get(CORES, "")).isdecimal() and int(allowed):
        cores = min(cores, int(allowed))
    for group in _groups("cpu", root):
        match [*_words(group / "cpu.max"), *_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]:
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):  # else max, or -1
                cores = min(cores, max(int(quota) // int(period), 1))
    return cores


def usable_memory(root: Path = _ROOT) -> Memory:
    """Of this machine, and no more than the groups of this process may take."""
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = total // 2
    for group in _groups("memory", root):
        if (limits := _memory_of(group)) is not None:
            total, available = min(total, limits.total), min(available, limits.available)
    return Memory(total, available)


def _memory_of(group: Path) -> Memory | None:
    """None: it has no limit."""
    match [*_words(group / "memory.max"), *_words(group / "memory.limit_in_bytes")]:
        case [word] if word.isdecimal():
            limit = int(word)
        case _:
            return None
    used = sum(int(word) for name in ("memory.current", "memory.usage_in_bytes") for word in _words(group / name))
    words = _words(group / "memory.stat")
    stat = dict(zip(words[::2], words[1::2], strict=False))
    counted = _CACHE_V1 if _CACHE_V1[0] in stat else _CACHE_V2
    cached = sum(int(stat.get(name, 0)) for name in counted)
    return Memory(limit, max(limit - max(used - cached, 0), 0))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of the control groups that this process is in, of either version, innermost first."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        mounts = [line.split(" - ", 1) for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return
    for place, kind in (mount for mount in mounts if len(mount) == 2):
        system, *_, options = kind.split()
        wanted = {"cgroup": controller, "cgroup2": ""}.get(system)
        if wanted is None or (wanted and wanted not in options.split(",")):
            continue
        top, at = place.split()[3:5]
        for path in (one[2] for one in groups if len(one) == 3 and wanted in one[1].split(",")):
            # What is mounted may begin below the top; a group outside of it shows as the mount point itself.
            inside = Path(path).is_relative_to(top) and ".." not in path
            mounted = root / at.lstrip("/")
            folder = mounted / Path(path).relative_to(top) if inside else mounted
            yield from (one for one in (folder, *folder.parents) if one.is_relative_to(mounted))


def _words(file: Path) -> list[str]:
    """Of a file that need not be there."""
    try:
        return file.read_text().split()
    except OSError:
        return []
