"""What a single request may ask for: context, output tokens, time, choices, tools, and rounds of tool calls.

A tenant's own limit replaces that of its tier; a key's applies in addition, and so do entries under `limits`. The
lowest one that applies is the cap, and knows whose it is, so that an error can say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config.schema import LimitConfig, TierConfig
from penstock.gateway.app.exchange import Exchange
from penstock.identity import Caller
from penstock.protocol.errors import RequestLimitExceeded

CapName = Literal["context_tokens", "output_tokens", "time_limit_s", "choices", "tools", "tool_rounds"]
Scope = Literal["server", "model", "tier", "tenant", "key", "limits"]


@dataclass(frozen=True, slots=True)
class Cap:
    """The lowest limit of one kind."""

    name: CapName
    value: float
    scope: Scope
    whose: str
    """The subject of a sentence: "The tier `free`"."""

    @property
    def most(self) -> int:
        return int(self.value)

    def refusal(self, problem: str, what: str, param: str) -> RequestLimitExceeded:
        """`problem`: what the request asks for; `what`: the limited thing, in the plural."""
        return RequestLimitExceeded(
            f"{problem}; {self.whose[0].lower()}{self.whose[1:]} may use at most {self.most} {what} in a request "
            f"(`{self.name}`).",
            limit=self.name,
            scope=self.scope,
            param=param,
        )


class RequestLimits:
    """Finds caps. Callers without a key have no tier of their own, and no limits of one."""

    def __init__(self, tiers: Sequence[TierConfig], limits: Sequence[LimitConfig]) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._limits = limits

    def cap(self, caller: Caller, name: CapName, model: str = "") -> Cap | None:
        """`model`: the base name of the model that answers, as far as it is known."""
        found: Cap | None = None
        if caller.key:
            tier = self._tiers.get(caller.tier)
            if (own := getattr(caller.limits, name)) is not None:
                found = Cap(name, own, "tenant", f"The tenant `{caller.tenant}`")
            elif tier is not None and (value := getattr(tier, name)) is not None:
                found = Cap(name, value, "tier", f"The tier `{tier.name}`")
            if (of_key := getattr(caller.key_limits, name)) is not None and (found is None or of_key < found.value):
                found = Cap(name, of_key, "key", "This key")
        for entry in self._limits:
            value = getattr(entry, name)
            if value is None or (found is not None and found.value <= value):
                continue
            if entry.tier not in ("", caller.tier) or entry.tenant not in ("", caller.tenant):
                continue
            if entry.model in ("", model):
                found = Cap(name, value, "limits", f"A request to `{model}`" if entry.model else "This caller")
        return found

    def noted(self, exchange: Exchange, name: CapName, model: str) -> Cap | None:
        """The cap of a request, which its answer names if it ends it."""
        cap = self.cap(exchange.caller, name, model)
        note_cap(exchange, cap)
        return cap


def note_cap(exchange: Exchange, cap: Cap | None, name: str | None = None) -> None:
    """Remember whose limit it is that may end the answer. `name`: as answers call it, if it is another one."""
    if cap is not None:
        exchange.limit_scopes[name or cap.name] = cap.scope
