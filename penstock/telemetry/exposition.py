"""Counters, gauges and histograms that cost a fraction of a microsecond, rendered as Prometheus text.

The event loop is the only writer, so there are no locks. Labels are rendered once per child, and the text of unchanged
children is reused, so that a scraper polling every 50 ms costs little. That, and updates from thousands of streams per
second, is why this is not prometheus_client (the tests parse our output with it).

`merge` says how the values of a family combine when several processes serve one port.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress
from operator import ne
from typing import Literal, TypeVar

import msgspec

_MOST_RENDERED = 1024
MOST_CHILDREN = 4096
"""Maximum of label combinations per family; further ones are counted under the label `other`. A last resort: labels
whose values clients choose are bounded at their source."""
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""The format that supports exemplars: a trace per histogram bucket."""

EOF = "# EOF\n"

Merge = Literal["sum", "max"]
"""How the values of several processes combine: the sum where each counts its own, the maximum where all see the same
thing (an engine)."""


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
    """One number: the child of a counter or gauge."""

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
    """The child of a histogram."""

    __slots__ = ("bounds", "count", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.count = 0
        self.sum = 0.0
        self.exemplars: dict[int, str] | None = None
        """The newest trace of each bucket, as OpenMetrics text."""

    def observe(self, value: float, count: int = 1, trace: str | None = None) -> None:
        """Records `value` `count` times (several tokens may share one measured interval)."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += count
        self.count += count
        self.sum += value * count
        if trace is not None:
            if self.exemplars is None:
                self.exemplars = {}
            self.exemplars[bucket] = f' # {{trace_id="{trace}"}} {number(value)} {time.time():.3f}'


class Readings(msgspec.Struct, frozen=True, array_like=True):
    """The values of a family in one process: its head, and its samples by the text before the number."""

    head: str
    kind: str
    merge: Merge
    samples: dict[str, float]
    exemplars: dict[str, str] = {}
    """Exemplars of histogram buckets by the same text, as OpenMetrics text."""
    added: dict[str, float] = {}
    """What this process alone adds to samples that are merged by maximum."""


class Family(ABC):
    """A metric with its help text; `samples` yields pairs of the text before a number, and the number."""

    kind = "untyped"
    merge: Merge = "sum"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.head = f"# HELP {name} {help}\n# TYPE {name} {self.kind}\n"

    @abstractmethod
    def samples(self) -> Iterable[tuple[str, float]]: ...

    def exemplars(self) -> dict[str, str]:
        return {}

    def added(self) -> dict[str, float]:
        return {}

    def lines(self, openmetrics: bool) -> Iterable[str]:
        return [f"{prefix}{number(value)}\n" for prefix, value in self.samples()]


class _Scalar(Family):
    def __init__(self, name: str, help: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self._children: dict[tuple[str, ...], Value] = {}
        self._prefixes: list[str] = []
        """In the order of the children."""
        self._written: list[float] = []
        """Last rendered value of each child; its line is reused while it stays the same, as most do between scrapes."""
        self._lines: list[str] = []
        self._text = ""
        if not self.labels:
            self.child()

    def child(self, *values: str) -> Value:
        found = self._children.get(values)
        if found is None:
            if len(self._children) >= MOST_CHILDREN and (values := (OTHER,) * len(values)) in self._children:
                return self._children[values]
            found = self._children[values] = Value()
            self._prefixes.append(f"{self.name}{render_labels(self.labels, values)} ")
            self._written.append(math.nan)  # equal to nothing
            self._lines.append("")
        return found

    def samples(self) -> Iterable[tuple[str, float]]:
        return zip(self._prefixes, (child.value for child in self._children.values()), strict=True)

    def lines(self, openmetrics: bool) -> Iterable[str]:
        values = [child.value for child in self._children.values()]
        if values != self._written:
            for index in compress(range(len(values)), map(ne, values, self._written)):
                self._lines[index] = f"{self._prefixes[index]}{number(values[index])}\n"
            self._written = values
            self._text = "".join(self._lines)
        return (self._text,)


class Counter(_Scalar):
    kind = "counter"


class Gauge(_Scalar):
    kind = "gauge"

    def __init__(self, name: str, help: str, labels: Sequence[str] = (), *, merge: Merge = "sum") -> None:
        self.merge = merge
        super().__init__(name, help, labels)


class _HistogramText:
    """Renders one child; the text is reused while its count stays the same. Labels are rendered with the first scrape,
    not by the first request that has them: each bucket has all of them."""

    __slots__ = ("_child", "_labels", "_name", "_prefixes", "_text", "_values", "_written")

    def __init__(self, name: str, labels: Sequence[str], values: Sequence[str], child: Buckets) -> None:
        self._name, self._labels, self._values = name, labels, values
        self._prefixes: list[str] = []
        self._child = child
        self._written = -1
        self._text = ""

    def prefixes(self) -> list[str]:
        """Of the buckets, the sum and the count."""
        if not self._prefixes:
            name, own = self._name, render_labels(self._labels, self._values)
            others = f"{own[1:-1]}," if own else ""
            edges = [*(repr(float(bound)) for bound in self._child.bounds), "+Inf"]
            self._prefixes = [f'{name}_bucket{{{others}le="{edge}"}} ' for edge in edges]
            self._prefixes += (f"{name}_sum{own} ", f"{name}_count{own} ")
        return self._prefixes

    def samples(self) -> Iterator[tuple[str, float]]:
        child, total = self._child, 0
        *buckets, of_sum, of_count = self.prefixes()
        for prefix, count in zip(buckets, child.counts, strict=True):
            total += count
            yield prefix, total
        yield of_sum, child.sum
        yield of_count, total

    def exemplars(self) -> Iterator[tuple[str, str]]:
        return ((self.prefixes()[bucket], text) for bucket, text in (self._child.exemplars or {}).items())

    def text(self, openmetrics: bool) -> str:
        child = self._child
        if child.count != self._written:
            self._text = "".join([f"{prefix}{number(value)}\n" for prefix, value in self.samples()])
            self._written = child.count
        if not openmetrics or child.exemplars is None:
            return self._text
        lines = self._text.splitlines()
        for bucket, exemplar in child.exemplars.items():
            lines[bucket] += exemplar
        return "\n".join(lines) + "\n"


class Histogram(Family):
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(name, help, labels)
        self.bounds = tuple(bounds)
        self._children: dict[tuple[str, ...], Buckets] = {}
        self._texts: list[_HistogramText] = []
        if not self.labels:
            self.child()

    def child(self, *values: str) -> Buckets:
        found = self._children.get(values)
        if found is None:
            if len(self._children) >= MOST_CHILDREN and (values := (OTHER,) * len(values)) in self._children:
                return self._children[values]
            found = self._children[values] = Buckets(self.bounds)
            self._texts.append(_HistogramText(self.name, self.labels, values, found))
        return found

    def samples(self) -> Iterable[tuple[str, float]]:
        return (sample for text in self._texts for sample in text.samples())

    def exemplars(self) -> dict[str, str]:
        return {prefix: exemplar for text in self._texts for prefix, exemplar in text.exemplars()}

    def lines(self, openmetrics: bool) -> Iterable[str]:
        return [text.text(openmetrics) for text in self._texts]


class Sampled(Family):
    """Values read at scrape time: `read` yields (label values, number)."""

    def __init__(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
        merge: Merge = "max",
        own: Callable[[], Iterable[tuple[tuple[str, ...], float]]] | None = None,
    ) -> None:
        """`own`: what this process alone adds to samples that are merged by maximum."""
        self.kind = kind
        self.merge = merge
        super().__init__(name, help, labels)
        self._read = read
        self._own = own
        self._rendered: dict[tuple[str, ...], str] = {}

    def samples(self) -> Iterable[tuple[str, float]]:
        return self._prefixed(self._read())

    def added(self) -> dict[str, float]:
        return {} if self._own is None else dict(self._prefixed(self._own()))

    def lines(self, openmetrics: bool) -> Iterable[str]:
        if self._own is None:
            return super().lines(openmetrics)
        found = with_added(dict(self.samples()), self.added())
        return [f"{prefix}{number(value)}\n" for prefix, value in found.items()]

    def _prefixed(self, read: Iterable[tuple[tuple[str, ...], float]]) -> Iterator[tuple[str, float]]:
        for values, value in read:
            prefix = self._rendered.get(values)
            if prefix is None:
                if len(self._rendered) >= _MOST_RENDERED:
                    self._rendered.clear()  # labels that keep changing must not accumulate
                prefix = self._rendered[values] = f"{self.name}{render_labels(self.labels, values)} "
            yield prefix, value


class SampledBuckets(Family):
    """Histograms that others keep: `read` yields (label values, buckets). All processes see the same ones."""

    kind = "histogram"
    merge: Merge = "max"

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], Buckets]]],
    ) -> None:
        super().__init__(name, help, labels)
        self._read = read
        self._rendered: dict[tuple[str, ...], tuple[Buckets, _HistogramText]] = {}

    def samples(self) -> Iterable[tuple[str, float]]:
        return (sample for text in self._texts() for sample in text.samples())

    def lines(self, openmetrics: bool) -> Iterable[str]:
        return [text.text(openmetrics) for text in self._texts()]

    def _texts(self) -> Iterator[_HistogramText]:
        for values, buckets in self._read():
            known = self._rendered.get(values)
            if known is None or known[0] is not buckets:
                if len(self._rendered) >= _MOST_RENDERED:
                    self._rendered.clear()
                known = self._rendered[values] = (buckets, _HistogramText(self.name, self.labels, values, buckets))
            yield known[1]


def with_added(samples: dict[str, float], added: dict[str, float]) -> dict[str, float]:
    """Samples with what processes add to them."""
    for prefix, value in added.items():
        samples[prefix] = samples.get(prefix, 0) + value
    return samples


def openmetrics_head(head: str, kind: str) -> str:
    """The head of a family in OpenMetrics, where a counter's family name has no `_total` (its samples do)."""
    return head.replace("_total ", " ") if kind == "counter" else head


def render(readings: Iterable[Readings], openmetrics: bool = False) -> bytes:
    """Renders families of any process as text."""
    parts: list[str] = []
    for family in readings:
        parts.append(openmetrics_head(family.head, family.kind) if openmetrics else family.head)
        exemplars = family.exemplars if openmetrics else {}
        parts.extend(
            [f"{prefix}{number(value)}{exemplars.get(prefix, '')}\n" for prefix, value in family.samples.items()]
        )
    if openmetrics:
        parts.append(EOF)
    return "".join(parts).encode()


FamilyT = TypeVar("FamilyT", bound=Family)
T = TypeVar("T")


class MetricRegistry:
    """The metric families of one process, in the order of registration."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._round = 0

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return self._add(Counter(name, help, labels))

    def gauge(self, name: str, help: str, labels: Sequence[str] = (), *, merge: Merge = "sum") -> Gauge:
        return self._add(Gauge(name, help, labels, merge=merge))

    def histogram(self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return self._add(Histogram(name, help, bounds, labels))

    def sampled(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], float]]],
        *,
        merge: Merge = "max",
        own: Callable[[], Iterable[tuple[tuple[str, ...], float]]] | None = None,
    ) -> None:
        self._add(Sampled(kind, name, help, labels, read, merge, own))

    def sampled_buckets(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Callable[[], Iterable[tuple[tuple[str, ...], Buckets]]],
    ) -> None:
        self._add(SampledBuckets(name, help, labels, read))

    def once(self, read: Callable[[], Iterable[T]]) -> Callable[[], Sequence[T]]:
        """Wraps `read` so that it is called at most once per scrape, however many families use it."""
        kept: list[T] = []
        seen = -1

        def cached() -> Sequence[T]:
            nonlocal seen
            if seen != self._round:
                seen, kept[:] = self._round, read()
            return kept

        return cached

    def names(self) -> dict[str, str]:
        """Every family's kind, by name."""
        return {family.name: family.kind for family in self._families.values()}

    def render(self, openmetrics: bool = False) -> bytes:
        self._round += 1
        parts: list[str] = []
        for family in self._families.values():
            parts.append(openmetrics_head(family.head, family.kind) if openmetrics else family.head)
            parts.extend(family.lines(openmetrics))
        if openmetrics:
            parts.append(EOF)
        return "".join(parts).encode()

    def readings(self, only: Collection[str] | None = None) -> list[Readings]:
        """The values of this process, to be merged with those of others: of all families, or of those in `only`."""
        self._round += 1
        return [
            Readings(family.head, family.kind, family.merge, dict(family.samples()), family.exemplars(), family.added())
            for name, family in self._families.items()
            if only is None or name in only
        ]

    def _add(self, family: FamilyT) -> FamilyT:
        if family.name in self._families:
            raise ValueError(f"metric {family.name} is registered twice")
        self._families[family.name] = family
        return family
