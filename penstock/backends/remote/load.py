"""How busy a server says it is, from its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's own figures; None: it does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of its KV cache that is in use, 0 to 1."""
    loaded: bool | None = None
    """Whether the model is in its memory, for servers that load models when they are asked."""

    @property
    def requests(self) -> int | None:
        """Requests that it has, of all clients."""
        if self.running is None and self.waiting is None:
            return None
        return (self.running or 0) + (self.waiting or 0)


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Names of a server's metrics; several where versions differ, the first that is there counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...] = ()

    def read(self, exposition: str, model: str) -> ServerLoad | None:
        """The load of `model`; None where none of the metrics are there."""
        found = samples(exposition, (*self.running, *self.waiting, *self.kv_usage))
        running, waiting, kv = (
            self._values(found, names, model) for names in (self.running, self.waiting, self.kv_usage)
        )
        if running is None and waiting is None and kv is None:
            return None
        return ServerLoad(
            None if running is None else max(round(sum(running)), 0),
            None if waiting is None else max(round(sum(waiting)), 0),
            None if kv is None else min(max(sum(kv) / len(kv), 0.0), 1.0),
        )

    @staticmethod
    def _values(found: Mapping[str, list[tuple[str, float]]], names: tuple[str, ...], model: str) -> list[float] | None:
        for name in names:
            if name in found:
                mine = [value for labels, value in found[name] if f'model_name="{model}"' in labels]
                return mine or [value for _, value in found[name]]
        return None


def samples(exposition: str, names: tuple[str, ...]) -> dict[str, list[tuple[str, float]]]:
    """The samples of some metrics by name, each with the text of its labels. All other lines, which are many, are not
    looked at."""
    text = f"\n{exposition}\n"
    found: dict[str, list[tuple[str, float]]] = {}
    for name in names:
        at = text.find(f"\n{name}")
        while at >= 0:
            end = text.find("\n", at + 1)
            line = text[at + 1 + len(name) : end]
            labels = line[: line.rfind("}") + 1]
            if line.startswith(("{", " ")):
                with suppress(ValueError, IndexError):
                    value = float(line[len(labels) :].split()[0])
                    if abs(value) < float("inf"):
                        found.setdefault(name, []).append((labels, value))
            at = text.find(f"\n{name}", end)
    return found
