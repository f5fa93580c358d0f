"""Which input a bill depends on most: one at a time lower and higher, everything else as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.errors import ConfigError
from penstock.planning.candidate import Candidate, Options, judge
from penstock.planning.capacity import Slo
from penstock.planning.catalogue import Device
from penstock.planning.workload import Workload

_LOW, _HIGH = 0.5, 1.5


@dataclass(frozen=True, slots=True)
class End:
    """One input's other value, and the month's bill it gives; None where the deployment no longer does."""

    value: str
    monthly: float | None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    name: str
    low: End
    high: End

    @property
    def swing(self) -> float:
        """Between the two bills; a missing one counts as nothing."""
        if self.low.monthly is None or self.high.monthly is None:
            return 0.0
        return abs(self.high.monthly - self.low.monthly)


def sensitivities(candidate: Candidate, workload: Workload, slo: Slo, options: Options) -> tuple[Sensitivity, ...]:
    """The widest swing first."""

    def bill(variant: _Variant) -> float | None:
        deployment = replace(candidate.deployment, device=variant.device)
        try:
            judged = judge(deployment, variant.workload, slo, variant.options)
        except ConfigError:  # longer requests than the window holds
            return None
        return judged.monthly if isinstance(judged, Candidate) else None

    found = [
        Sensitivity(name, End(low.value, bill(low)), End(high.value, bill(high)))
        for name, low, high in _variants(candidate.deployment.device, workload, options)
    ]
    return tuple(sorted(found, key=lambda row: -row.swing))


@dataclass(frozen=True, slots=True)
class _Variant:
    value: str
    device: Device
    workload: Workload
    options: Options


def _variants(device: Device, workload: Workload, options: Options) -> Iterator[tuple[str, _Variant, _Variant]]:
    def work(value: str, **change: float) -> _Variant:
        return _Variant(value, device, replace(workload, **change), options)  # type: ignore[arg-type]

    def scaled(name: str, field: str, value: float) -> tuple[str, _Variant, _Variant]:
        least = {"input_tokens": max(1.0, workload.shared_prefix + 1), "output_tokens": 1.0}.get(field, 0.0)
        ends = (max(least, value * _LOW), value * _HIGH)
        low, high = (work(_figure(end), **{field: end}) for end in ends)
        return name, low, high

    yield scaled("users a day", "users", workload.users)
    yield scaled("input tokens", "input_tokens", workload.input_tokens)
    yield scaled("output tokens", "output_tokens", workload.output_tokens)
    most = workload.peak_factor * _HIGH
    least = max(workload.curve.peak, workload.peak_factor * _LOW)
    yield "peak factor", work(f"{least:.3g}", peak_factor=least), work(f"{most:.3g}", peak_factor=most)
    hits = workload.hit_rate
    fewer, more = hits * _LOW, min(0.95, hits * _HIGH if hits else _LOW)
    yield "cache hit rate", work(f"{fewer:.0%}", cache_hit_rate=fewer), work(f"{more:.0%}", cache_hit_rate=more)

    def used(share: float) -> _Variant:
        headroom = replace(options.headroom, utilisation=share)
        return _Variant(f"{share:.0%}", device, workload, replace(options, headroom=headroom))

    share = options.headroom.utilisation
    yield "utilisation", used(share * _LOW), used(min(1.0, share * _HIGH))
    if device.prices.on_demand is not None:
        low, high = (_Variant(f"{part:.0%}", _priced(device, part), workload, options) for part in (_LOW, _HIGH))
        yield "GPU price", low, high

    def operated(hours: float) -> _Variant:
        overheads = replace(options.overheads, operations_hours=hours)
        return _Variant(f"{hours:g} h", device, workload, replace(options, overheads=overheads))

    hours = options.overheads.operations_hours
    if hours:
        yield "operations", operated(hours * _LOW), operated(hours * _HIGH)


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _priced(device: Device, factor: float) -> Device:
    def times(price: float | None) -> float | None:
        return None if price is None else price * factor

    prices = device.prices
    scaled = replace(
        prices, on_demand=times(prices.on_demand), reserved=times(prices.reserved), spot=times(prices.spot)
    )
    return replace(device, prices=scaled)
