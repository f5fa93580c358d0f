"""Memory, file descriptors and children of processes over time, and whether they grow. Sampling reads /proc; judging is
pure."""

from __future__ import annotations

import os
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

WARM = 0.35
"""Share of the time after which nothing may grow any more: caches are filled, pools are open."""
GROWTH_MIB, GROWTH_SHARE = 32.0, 0.08
"""Growth that is allowed after that, per process: the larger of the two."""
MORE_DESCRIPTORS = 12


@dataclass(frozen=True, slots=True)
class Sample:
    """`at`: seconds after the beginning."""

    at: float
    memory_mib: float
    descriptors: int
    threads: int


@dataclass(slots=True)
class Followed:
    """One process."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)
    gone: bool = False
    zombies: int = 0
    """Most children that had ended and were waited for by nobody, two samples in a row."""


class Processes:
    """The processes below some roots, sampled now and then."""

    def __init__(self) -> None:
        self.followed: dict[int, Followed] = {}
        self._dead_before: set[int] = set()

    def sample(self, at: float, roots: Sequence[tuple[str, int]]) -> None:
        parents, states = _table()
        family = {pid: name for name, pid in roots}
        grown = True
        while grown:
            more = {pid: family[parent] for pid, parent in parents.items() if parent in family and pid not in family}
            family |= more
            grown = bool(more)
        dead = {pid for pid in family if states.get(pid) == "Z"}
        for pid, root in family.items():
            if states.get(pid, "Z") == "Z":
                continue
            known = self.followed.setdefault(pid, Followed(f"{root}: {_role(pid)}", pid))
            known.zombies = max(known.zombies, sum(parents.get(child) == pid for child in dead & self._dead_before))
            if (sample := _look(at, pid)) is not None:
                known.samples.append(sample)
        for pid, known in self.followed.items():
            known.gone = pid not in family
        self._dead_before = dead


def _table() -> tuple[dict[int, int], dict[int, str]]:
    """Parent and state of every process."""
    parents, states = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        states[pid], parents[pid] = words[0], int(words[1])
    return parents, states


def _role(pid: int) -> str:
    """`gateway`, `engine tiny` and so on, from its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return str(pid)
    for word in ("serve", "gateway", "engine"):
        if word in words:
            at = words.index("--endpoint") if word == "engine" and "--endpoint" in words else 0
            return f"{'supervisor' if word == 'serve' else word} {words[at - 1] if at else ''}".strip()
    return Path(words[0]).name


def _look(at: float, pid: int) -> Sample | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    return Sample(at, pages * resource.getpagesize() / 2**20, descriptors, threads)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a process did after the warm-up."""

    name: str
    memory_mib: float
    growth_mib: float
    """By the slope over the time after the warm-up: one peak does not make it."""
    allowed_mib: float
    descriptors: int
    more_descriptors: int
    problems: tuple[str, ...]


def judge(process: Followed, seconds: float) -> Verdict | None:
    """None: it did not live long enough to tell."""
    after = [sample for sample in process.samples if sample.at >= WARM * seconds]
    if len(after) < 6:
        return None
    span = after[-1].at - after[0].at
    growth = slope([(sample.at, sample.memory_mib) for sample in after]) * span
    quarter = max(2, len(after) // 4)
    early = statistics.median(sample.descriptors for sample in after[:quarter])
    late = statistics.median(sample.descriptors for sample in after[-quarter:])
    allowed = max(GROWTH_MIB, GROWTH_SHARE * after[0].memory_mib)
    problems = []
    if growth > allowed:
        problems.append(f"grew by {growth:.1f} MiB after the warm-up; {allowed:.0f} are allowed")
    if late - early > MORE_DESCRIPTORS:
        problems.append(f"{late - early:.0f} more file descriptors than after the warm-up")
    if process.zombies:
        problems.append(f"{process.zombies} ended children that nobody waits for")
    if process.gone:
        problems.append("it ended")
    return Verdict(
        process.name, after[-1].memory_mib, growth, allowed, round(late), round(late - early), tuple(problems)
    )


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil-Sen: the median of the slopes between points of the first and the second half."""
    half = len(points) // 2
    pairs = zip(points[:half], points[len(points) - half :], strict=True)
    return statistics.median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs)
