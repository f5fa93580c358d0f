"""Counters, gauges and histograms that cost a fraction of a microsecond, rendered as Prometheus text.

The event loop is the only writer, so there are no locks; labels are rendered once, when a child is made, so
that a scraper polling every 50 ms costs little. That, and sums over thousands of streams per second, is why
this is not the client library (the tests parse our output with it).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_MOST_RENDERED = 1024
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render_labels(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def number(value: float) -> str:
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return str(int(value))
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class Value:
    """One number: a counter's or a gauge's child."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0

    def inc(self, amount: float = 1) -> None:
        self.value += amount

    def dec(self, amount: float = 1) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


class Buckets:
    """A histogram's child."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Record `value`, `count` times (several tokens may share one measured interval)."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count


class Family(ABC):
    """A metric name with its help text; `lines` writes it."""

    kind = "untyped"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.head = f"# HELP {name} {help}\n# TYPE {name} {self.kind}\n"

    @abstractmethod
    def lines(self) -> Iterable[str]: ...


class _Scalar(Family):
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._children: dict[tuple[str, ...], Value] = {}
        self._prefixes: list[tuple[str, Value]] = []
        if not self.labels:
            self.child()

    def child(self, *values: str) -> Value:
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Value()
            self._prefixes.append((f"{self.name}{render_labels(self.labels, values)} ", found))
        return found

    def lines(self) -> Iterable[str]:
        return (f"{prefix}{number(child.value)}\n" for prefix, child in self._prefixes)


class Counter(_Scalar):
    kind = "counter"


class Gauge(_Scalar):
    kind = "gauge"


class Histogram(Family):
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self._children: dict[tuple[str, ...], Buckets] = {}
        self._prefixes: list[tuple[list[str], str, str, Buckets]] = []
        if not self.labels:
            self.child()

    def child(self, *values: str) -> Buckets:
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Buckets(self.bounds)
            names = (*self.labels, "le")
            edges = [*(number(float(bound)) for bound in self.bounds), "+Inf"]
            buckets = [f"{self.name}_bucket{render_labels(names, (*values, edge))} " for edge in edges]
            own = render_labels(self.labels, values)
            self._prefixes.append((buckets, f"{self.name}_sum{own} ", f"{self.name}_count{own} ", found))
        return found

    def lines(self) -> Iterable[str]:
        for buckets, sum_prefix, count_prefix, child in self._prefixes:
            total = 0
            for prefix, count in zip(buckets, child.counts, strict=True):
                total += count
                yield f"{prefix}{total}\n"
            yield f"{sum_prefix}{number(child.sum)}\n"
            yield f"{count_prefix}{total}\n"


class Sampled(Family):
    """Values read from elsewhere at scrape time: `read` yields (label values, number)."""

    def __init__(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        self.kind = kind
        super().__init__(name, help, labels)
        self._read = read
        self._rendered: dict[tuple[str, ...], str] = {}

    def lines(self) -> Iterable[str]:
        for values, value in self._read():
            prefix = self._rendered.get(values)
            if prefix is None:
                if len(self._rendered) >= _MOST_RENDERED:
                    self._rendered.clear()  # labels that keep changing must not pile up
                prefix = self._rendered[values] = f"{self.name}{render_labels(self.labels, values)} "
            yield f"{prefix}{number(value)}\n"


FamilyT = TypeVar("FamilyT", bound=Family)


class Registry:
    """The families of one process, in the order they were made."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, labels))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        return self._add(Gauge(name, help, labels))

    def histogram(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return self._add(Histogram(name, help, bounds, labels))

    def sampled(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
    ) -> None:
        self._add(Sampled(kind, name, help, labels, read))

    def render(self) -> bytes:
        parts: list[str] = []
        for family in self._families.values():
            parts.append(family.head)
            parts.extend(family.lines())
        return "".join(parts).encode()

    def _add(self, family: FamilyT) -> FamilyT:
        if family.name in self._families:
            raise ValueError(f"metric {family.name} is registered twice")
        self._families[family.name] = family
        return family
