"""Settings of access: what a tier may use."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class AllowConfig:
    """What the tenants of a tier may use: names and patterns with `*`. A list that is not set allows everything that no
    other tenant owns; an empty one allows nothing."""

    models: tuple[str, ...] | None = setting(
        None, doc="Models, encoders and routes, by name or alias. Adapters and remotes follow it where they have no "
        "list of their own.", example="[small, auto]",
    )  # fmt: skip
    adapters: tuple[str, ...] | None = setting(
        None, doc="Adapters; the model that an adapter adapts must be allowed too.", example="['support-*']"
    )
    remotes: tuple[str, ...] | None = setting(None, doc="Models of other servers.", example="[large]")
    collections: tuple[str, ...] | None = setting(
        None, doc="Collections of the tenant's own, by name.", example="['public-*']"
    )
    tools: tuple[str, ...] | None = setting(
        None, doc="Tool servers, or single functions as SERVER.FUNCTION.", example="[weather, calendar.read]"
    )
