"""Which pools and regions a request may run in: the first pool rule that matches, and the labels that it demands.

Pure. Invariant: a request never runs in a pool that its rule does not name, or in a pool or region without the labels
that it demands, whatever fails; it waits, and is refused in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from penstock.config.pools import PoolConfig, PoolRuleConfig
from penstock.identity.labels import NO_DEMAND, NO_LABELS, OF_OWN, REGION, Demand, Labels, Requirement, closest
from penstock.protocol.errors import DataRuleForbids, InvalidRequest


class PlacementFacts(msgspec.Struct, frozen=True):
    """What decides about a request's place."""

    tenant: str = ""
    tier: str = ""
    priority: str = "standard"
    """Its class."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Prompt and requested answer: what the window of its pool must hold."""
    batch_line: bool = False
    asked: str = ""
    """The pool that the request names (`x-penstock-pool`)."""
    demand: Demand = NO_DEMAND
    """The labels that it needs."""


class Placement(msgspec.Struct, frozen=True):
    """Where a request may run."""

    pools: tuple[str, ...] = ()
    """The pool of its rule, then those that it may spill over to; empty: the model has no pools."""
    regions: tuple[str, ...] = ()
    """Empty: any."""
    why: str = ""
    """For traces: the rule that decided."""
    window: int | None = None
    """Tokens that the first pool holds at most, as far as known."""


ANYWHERE = Placement()


class Placer:
    """The rules of one model."""

    def __init__(
        self,
        pools: Sequence[PoolConfig] = (),
        rules: Sequence[PoolRuleConfig] = (),
        labels: Labels = NO_LABELS,
    ) -> None:
        """`labels`: of the model, for data rules; not external unless they say otherwise."""
        self.pools = tuple(pool.name for pool in pools)
        self.labels = labels.over(OF_OWN)
        self._labels = {pool.name: Labels(pool.labels).over(self.labels) for pool in pools}
        self.reserves = {pool.name: pool.reserve for pool in pools if pool.reserve}
        self._rules = tuple(rules)

    @property
    def trivial(self) -> bool:
        """Whether every request that demands nothing may run anywhere."""
        return not self.pools

    def labels_of(self, pool: str, region: str = "") -> Labels:
        """The labels of a replica in a pool; its own region, where it has one, replaces that of pool and model."""
        labels = self._labels.get(pool, self.labels)
        return Labels({REGION: region}).over(labels) if region else labels

    def unmet(self, demand: Demand, places: Iterable[tuple[str, str]]) -> list[Requirement]:
        """What of a demand is met nowhere. `places`: the pool and region of replicas, as far as known."""
        known = {pool: self.labels_of(pool) for pool in self.pools or ("",)}
        return closest(demand, [*known.values(), *(self.labels_of(pool, region) for pool, region in places)])

    def place(self, facts: PlacementFacts, windows: Mapping[str, int] | None = None) -> Placement:
        """`windows`: the context window of each pool, as far as known. A rule whose pool cannot hold the request is
        passed over, and so are pools to spill over to; `window` is then that of the largest one that was, too small
        for the request."""
        regions = self._regions(facts.demand)
        permitted = self._permitted(facts.demand)
        if facts.asked and not any(rule.asked and rule.pool == facts.asked for rule in self._rules):
            askable = sorted({rule.pool for rule in self._rules if rule.asked})
            raise InvalidRequest(
                f"The pool {facts.asked!r} cannot be asked for; "
                + (f"those that can be: {', '.join(askable)}." if askable else "none can."),
                param="x-penstock-pool",
            )
        if not self.pools:
            return Placement((), regions, self._why_regions(regions))
        windows = windows or {}
        too_small: tuple[str, int] | None = None
        for number, rule in enumerate(self._rules):
            why = _matches(rule, facts)
            if why is None or rule.pool not in permitted:
                continue
            window = windows.get(rule.pool)
            if window is not None and not _holds(window, facts):
                if too_small is None or window > too_small[1]:
                    too_small = (rule.pool, window)
                continue
            spill = tuple(name for name in rule.spill if name in permitted and _holds(windows.get(name), facts))
            why = f"pool_rules[{number}]: {why}"
            return Placement((rule.pool, *spill), regions, self._join(why, regions), window)
        if too_small is not None:
            return Placement((too_small[0],), regions, "too long for every pool of its rules", too_small[1])
        first = permitted[0]
        which = "the first pool" if first == self.pools[0] else "the first permitted pool"
        return Placement((first,), regions, self._join(f"no rule matches: {which}", regions), windows.get(first))

    def reserve_of(self, pool: str, facts: PlacementFacts) -> str | None:
        """The reservation of a pool whose slots the request may use; None: none."""
        for reserve in self.reserves.get(pool, ()):
            if reserve.holds_for(facts.tenant, facts.tier, facts.priority):
                return reserve.name
        return None

    def _regions(self, demand: Demand) -> tuple[str, ...]:
        """The regions that a demand permits; empty: any."""
        found = demand.permitted(REGION)
        if found == ():
            raise DataRuleForbids(f"No region is permitted to this request: {demand}.")
        return found or ()

    def _permitted(self, demand: Demand) -> Sequence[str]:
        """The pools whose labels meet a demand. Regions are left to the replicas, which may have their own."""
        if not demand or not self.pools:
            return self.pools
        others = demand.without(REGION)
        found = [pool for pool in self.pools if not others.unmet(self._labels[pool])]
        if not found:
            missing = closest(others, (self._labels[pool] for pool in self.pools))
            raise DataRuleForbids(f"No pool of this model may get this request: {demand.why(missing)}.")
        return found

    @staticmethod
    def _why_regions(regions: tuple[str, ...]) -> str:
        return f"only in {', '.join(regions)}" if regions else ""

    def _join(self, why: str, regions: tuple[str, ...]) -> str:
        return "; ".join(filter(None, (why, self._why_regions(regions))))


def _listed(names: Sequence[str], name: str) -> bool:
    return not names or name in names


def _holds(window: int | None, facts: PlacementFacts) -> bool:
    return window is None or (facts.tokens <= window and facts.prompt_tokens < window)


def _matches(rule: PoolRuleConfig, facts: PlacementFacts) -> str | None:
    """Why the rule is for this request; None: it is not."""
    if rule.asked and facts.asked != rule.pool:
        return None
    if rule.min_prompt_tokens is not None and facts.prompt_tokens < rule.min_prompt_tokens:
        return None
    if rule.batches is not None and rule.batches != facts.batch_line:
        return None
    named = _listed(rule.tenants, facts.tenant) and _listed(rule.tiers, facts.tier)
    if not named or not _listed(rule.classes, facts.priority):
        return None
    reasons = [
        "asked for" if rule.asked else "",
        f"{facts.prompt_tokens} prompt tokens" if rule.min_prompt_tokens is not None else "",
        "line of a batch" if rule.batches else "",
        f"tenant {facts.tenant}" if rule.tenants else "",
        f"tier {facts.tier}" if rule.tiers else "",
        f"class {facts.priority}" if rule.classes else "",
    ]
    return ", ".join(filter(None, reasons)) or "all requests"
