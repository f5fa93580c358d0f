"""Token prices. Money is integer nanodollars everywhere, so that sums are exact.

One dollar per million tokens is 1,000 nanodollars per token. The most specific entry wins: first one that names the
adapter, then the model, then the tier, then one that names nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

NANOS = 1_000_000_000
HALF = 50


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached` are prompt tokens found in the cache, `reasoning` completion tokens that
    are thoughts."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Price:
    """Nanodollars per token."""

    input: int = 0
    cached: int = 0
    output: int = 0
    batch_percent: int = HALF
    """Percentage that batches pay."""

    @classmethod
    def per_million(cls, input: float, output: float, cached: float | None = None, batch_percent: int = HALF) -> Price:
        """A price from dollars per million tokens; cached prompt tokens cost half by default."""
        cached = input / 2 if cached is None else cached
        return cls(round(input * 1000), round(cached * 1000), round(output * 1000), batch_percent)

    def recalled(self) -> Price:
        """The price of an answer from the response cache: all tokens at the price of cached tokens."""
        return Price(self.cached, self.cached, self.cached)

    def cost(self, usage: Usage, *, percent: int = 100) -> int:
        """The cost in nanodollars, rounded down, at `percent` of the price."""
        whole = (usage.prompt - usage.cached) * self.input + usage.cached * self.cached + usage.completion * self.output
        return whole * percent // 100


@dataclass(frozen=True, slots=True)
class PriceEntry:
    """A price and what it applies to; an empty name means any."""

    price: Price
    model: str = ""
    adapter: str = ""
    tier: str = ""


def _specific(entry: PriceEntry) -> tuple[bool, bool, bool]:
    return entry.adapter == "", entry.model == "", entry.tier == ""


class PriceBook:
    """Finds the price of a request. `batch_tiers`: tiers that pay batch prices for all requests."""

    def __init__(self, entries: Sequence[PriceEntry], *, batch_tiers: Collection[str] = ()) -> None:
        self._batch_tiers = frozenset(batch_tiers)
        self._entries = sorted(entries, key=_specific)

    def add(self, entry: PriceEntry) -> None:
        """Adds the price of a model loaded at run time; existing entries take precedence."""
        self._entries.append(entry)
        self._entries.sort(key=_specific)

    def remove(self, entry: PriceEntry) -> None:
        self._entries.remove(entry)

    def price(self, model: str, adapter: str = "", tier: str = "") -> Price:
        for entry in self._entries:
            if entry.adapter in ("", adapter) and entry.model in ("", model) and entry.tier in ("", tier):
                return entry.price
        return Price()

    def percent(self, price: Price, tier: str, *, batch: bool) -> int:
        """The percentage of `price` that a request pays."""
        return price.batch_percent if batch or tier in self._batch_tiers else 100


def dollars(nanos: int) -> str:
    """The amount in dollars as exact text."""
    sign, nanos = ("-" if nanos < 0 else ""), abs(nanos)
    fraction = f"{nanos % NANOS:09d}".rstrip("0")
    return f"{sign}{nanos // NANOS}.{fraction:0<2}"
