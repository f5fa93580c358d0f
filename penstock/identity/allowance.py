"""Limits of a single tenant or key, stored with it.

A tenant's limits replace those of its tier one by one; a key's limits apply in addition, to that key alone. A limit
that is not set has no effect. `priority` and `watermark` are not limits, but are decided in the same places.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=1, le=2**53)]
Money = Annotated[float, Meta(ge=0, le=1e12)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
"""A limit that may be 0: nothing of the kind."""
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]
PriorityClass = Annotated[int, Meta(ge=0, le=2)]
Watermarking = Literal["never", "asked", "default", "always"]
"""Whether answers are watermarked: never; where a request asks for it; unless a request declines; always."""


class Allowance(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrent_requests: Count | None = None
    daily_budget: Money | None = None
    monthly_budget: Money | None = None
    context_tokens: Count | None = None
    output_tokens: Count | None = None
    time_limit_s: Seconds | None = None
    choices: Count | None = None
    tools: Number | None = None
    tool_rounds: Number | None = None
    priority: PriorityClass | None = None
    watermark: Watermarking | None = None

    def changed(self, change: AllowanceChange | None) -> Allowance:
        """These limits with `change` applied."""
        named = {} if change is None else msgspec.structs.asdict(change)
        return msgspec.structs.replace(self, **{name: value for name, value in named.items() if value is not UNSET})


class AllowanceChange(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A field that is left out stays as it is; null removes the limit."""

    requests_per_minute: Count | UnsetType | None = UNSET
    tokens_per_minute: Count | UnsetType | None = UNSET
    concurrent_requests: Count | UnsetType | None = UNSET
    daily_budget: Money | UnsetType | None = UNSET
    monthly_budget: Money | UnsetType | None = UNSET
    context_tokens: Count | UnsetType | None = UNSET
    output_tokens: Count | UnsetType | None = UNSET
    time_limit_s: Seconds | UnsetType | None = UNSET
    choices: Count | UnsetType | None = UNSET
    tools: Number | UnsetType | None = UNSET
    tool_rounds: Number | UnsetType | None = UNSET
    priority: PriorityClass | UnsetType | None = UNSET
    watermark: Watermarking | UnsetType | None = UNSET


NO_ALLOWANCE = Allowance()
_decoder = msgspec.json.Decoder(Allowance)


def stored(allowance: Allowance) -> str:
    """The stored text; empty when nothing is set."""
    return "" if allowance == NO_ALLOWANCE else msgspec.json.encode(allowance).decode()


def read(text: str) -> Allowance:
    return _decoder.decode(text) if text else NO_ALLOWANCE
