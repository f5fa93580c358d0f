"""How busy a server says it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's own figures; None: it does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of its KV cache that is in use, 0 to 1."""
    slots: int | None = None
    """Most requests it runs at once."""


def samples(exposition: str, names: Iterable[str]) -> dict[str, float]:
    """Sums of Prometheus samples by metric name, over all labels; only of `names`."""
    wanted = frozenset(names)
    found: dict[str, float] = {}
    for line in exposition.splitlines():
        if not line or line[0] == "#":
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name not in wanted:
            continue
        rest = line[line.rfind("}") + 1 :] if "{" in line else line[len(name) :]
        try:
            value = float(rest.split()[0])
        except (ValueError, IndexError):
            continue
        if value == value and abs(value) != float("inf"):
            found[name] = found.get(name, 0.0) + value
    return found
