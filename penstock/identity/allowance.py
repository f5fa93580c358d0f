"""Limits of a single tenant or key, stored with it.

A tenant's limits replace those of its tier one by one; a key's limits apply in addition, to that key alone. A limit
that is not set has no effect. `priority` and `watermark` are not limits, but are decided in the same places.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.identity.options import Change, Options

Count = Annotated[int, Meta(ge=1, le=2**53)]
Money = Annotated[float, Meta(ge=0, le=1e12)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
"""A limit that may be 0: nothing of the kind."""
Seconds = Annotated[float, Meta(ge=0.1, le=1e9)]
PriorityClass = Annotated[int, Meta(ge=0, le=2)]
Watermarking = Literal["never", "asked", "default", "always"]
"""Whether answers are watermarked: never; where a request asks for it; unless a request declines; always."""


class Allowance(Options, frozen=True):
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


class AllowanceChange(Change, frozen=True):
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
