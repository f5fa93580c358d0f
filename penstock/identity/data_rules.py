"""Data rules: what a caller's requests demand of whatever gets their data.

The demands of the tier, of the first rule in `routing.regions` that matches, of the tenant and of the key, together.
The request itself and guardrails narrow it further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.config.routing import RegionRuleConfig
from penstock.identity.entities import Caller
from penstock.identity.labels import NO_DEMAND, REGION, Demand, Requirement, demand_of


class DataRules:
    """The rules of the configuration."""

    def __init__(
        self,
        tiers: Mapping[str, Sequence[tuple[str, str]]] | None = None,
        regions: Sequence[RegionRuleConfig] = (),
    ) -> None:
        """`tiers`: what each tier requires, by name."""
        self._tiers = {name: demand_of(pairs, f"tier {name}") for name, pairs in (tiers or {}).items() if pairs}
        self._regions = tuple(regions)

    def demand(self, caller: Caller) -> Demand:
        """What every request of a caller demands."""
        found = self._tiers.get(caller.tier, NO_DEMAND).narrowed(caller.demand)
        for number, rule in enumerate(self._regions):
            if _listed(rule.tenants, caller.tenant) and _listed(rule.tiers, caller.tier):
                return found.narrowed(Demand((Requirement(REGION, rule.regions, f"routing.regions[{number}]"),)))
        return found


def _listed(names: Sequence[str], name: str) -> bool:
    return not names or name in names


NO_RULES = DataRules()
