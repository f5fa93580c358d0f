"""Settings of pools: replicas of one model that differ in their requests, and perhaps in the settings of their engines.

Only settings that leave the tokens as they are may differ: a request that moves to another pool goes on with the same
text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from penstock.config.autoscale import AutoscaleConfig
from penstock.config.fields import setting
from penstock.engine.config import Role

ClassName = Literal["premium", "standard", "batch"]
SETTINGS = (
    *("device", "max_model_len", "max_running", "max_waiting", "token_budget", "kv_memory", "num_blocks"),
    *("memory_share", "host_memory", "threads", "cost_per_hour", "target_gap_ms"),
)
"""The settings of a model that a pool may have of its own."""


@dataclass(frozen=True, slots=True)
class ReserveConfig:
    """Slots of a pool that only some callers may use. All conditions that are given must hold."""

    tenant: str = setting("", doc="Only for this tenant.")
    tier: str = setting("", doc="Only for callers of this tier.")
    priority: ClassName | None = setting(None, doc="Only for this class.", example="premium")  # noqa: RUF009
    slots: int | None = setting(None, doc="Slots of the pool that are theirs.", least=1, example="8")
    share: float | None = setting(
        None, doc="In place of slots: their share of the pool's slots.", least=0.01, most=0.99, example="0.25"
    )
    lend: bool = setting(False, doc="Others may use these slots while none of the owners waits.")

    @property
    def name(self) -> str:
        """Identifies it among those of its pool."""
        return "/".join((self.tenant, self.tier, self.priority or ""))

    def holds_for(self, tenant: str, tier: str, priority: str) -> bool:
        """Whether a request may use these slots."""
        return (
            self.tenant in ("", tenant)
            and self.tier in ("", tier)
            and (self.priority is None or self.priority == priority)
        )

    def problems(self) -> list[str]:
        found = []
        if not (self.tenant or self.tier or self.priority):
            found.append("say whose slots they are: tenant, tier or priority")
        if (self.slots is None) == (self.share is None):
            found.append("give either slots or share")
        return found


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Replicas of a model that get a part of its requests; settings not given are those of the model."""

    name: str = setting("", doc="Name of the pool, used by pool_rules and shown with its replicas.", example="batch")
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels for data rules, in addition to the model's.", example="{region: eu}"
    )
    replicas: int = setting(
        1, doc="Engine processes in this pool; 0: none here, other machines bring them.", least=0, most=256
    )
    autoscale: AutoscaleConfig | None = setting(  # noqa: RUF009
        None, doc="Change the number of replicas of this pool with its own load; see models[N].autoscale.",
        example="{min: 1, max: 4}",
    )  # fmt: skip
    device: str | None = setting(None, doc="Like models[N].device.", example="cuda:1")
    max_model_len: int | None = setting(None, doc="Like models[N].max_model_len.", least=1, example="131072")
    max_running: int | None = setting(None, doc="Like models[N].max_running.", least=1, example="64")
    max_waiting: int | None = setting(None, doc="Like models[N].max_waiting.", least=1, example="4096")
    token_budget: int | None = setting(None, doc="Like models[N].token_budget.", least=1, example="512")
    target_gap_ms: float | None = setting(None, doc="Like models[N].target_gap_ms.", least=1, example="30")
    kv_memory: int | None = setting(None, doc="Like models[N].kv_memory.", least=1, size=True, example="2GiB")
    num_blocks: int | None = setting(None, doc="Like models[N].num_blocks.", least=1, example="4096")
    memory_share: float | None = setting(None, doc="Like models[N].memory_share.", least=0.01, most=1, example="0.5")
    host_memory: int | None = setting(None, doc="Like models[N].host_memory.", least=0, size=True, example="8GiB")
    threads: int | None = setting(None, doc="Like models[N].threads.", least=1, example="8")
    cost_per_hour: float | None = setting(None, doc="Like models[N].cost_per_hour.", least=0, example="1.2")
    replica_devices: tuple[str, ...] = setting((), doc="Like models[N].replica_devices.", example="[cuda:0, cuda:1]")
    replica_roles: tuple[Role, ...] = setting((), doc="Like models[N].replica_roles.", example="[prefill, decode]")
    replica_grids: tuple[str, ...] = setting((), doc="Like models[N].replica_grids.", example="[4x1, 1x2]")
    reserve: tuple[ReserveConfig, ...] = setting(
        (), doc="Slots that only some callers may use.", example="[{tenant: acme, slots: 8, lend: true}]"
    )

    @property
    def first_replicas(self) -> int:
        """How many replicas are started with the server."""
        return (
            self.replicas if self.autoscale is None else min(max(self.replicas, self.autoscale.min), self.autoscale.max)
        )

    @property
    def own(self) -> dict[str, object]:
        """The settings that differ from the model's."""
        return {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class PoolRuleConfig:
    """Which requests go to a pool: those for which every condition that is given holds. The first such rule counts."""

    pool: str = setting("", doc="The pool.", example="batch")
    spill: tuple[str, ...] = setting(
        (),
        doc="Pools to use, in order, while that one is full or down; empty: the request waits.",
        example="[interactive]",
    )
    tenants: tuple[str, ...] = setting((), doc="Requests of these tenants.", example="[acme]")
    tiers: tuple[str, ...] = setting((), doc="Requests of these tiers.", example="[enterprise]")
    classes: tuple[ClassName, ...] = setting((), doc="Requests of these classes.", example="[batch]")
    min_prompt_tokens: int | None = setting(
        None, doc="Requests with at least this many prompt tokens.", least=1, example="8192"
    )
    batches: bool | None = setting(None, doc="true: lines of batches only; false: anything else.", example="true")
    asked: bool = setting(False, doc="Requests that name the pool in the header x-penstock-pool.")


def pool_problems(
    pools: Collection[PoolConfig], rules: Collection[PoolRuleConfig], tiers: Collection[str], *, admission: bool
) -> list[str]:
    """Mistakes in the pools of one model, each with the key that it is about."""
    found = []
    names = [pool.name for pool in pools]
    if rules and not pools:
        return ["pool_rules: there are no pools"]
    for index, pool in enumerate(pools):
        where = f"pools[{index}]"
        if not pool.name or names.index(pool.name) < index:
            found.append(f"{where}: a unique name is needed")
        found += [f"{where}.reserve[{n}]: {why}" for n, one in enumerate(pool.reserve) for why in one.problems()]
        twice = [name for name, count in Counter(one.name for one in pool.reserve).items() if count > 1]
        if twice:
            found.append(f"{where}.reserve: two entries have the same owners")
        if sum(one.share or 0.0 for one in pool.reserve) >= 1.0:
            found.append(f"{where}.reserve: the shares leave nothing to others")
        found += [
            f'{where}.reserve[{n}].tier: there is no tier "{one.tier}"'
            for n, one in enumerate(pool.reserve)
            if one.tier and one.tier not in tiers
        ]
        if pool.autoscale is not None:
            found += [f"{where}.autoscale: {why}" for why in pool.autoscale.problems()]
            if pool.autoscale.min == 0:
                found.append(f"{where}.autoscale: a pool keeps at least one replica; min must be 1 or more")
            if any(role != "both" for role in pool.replica_roles):
                found.append(f"{where}.autoscale: replicas with roles (replica_roles) are scaled by hand")
        if pool.reserve and not admission:
            found.append(f"{where}.reserve: needs admission.enabled, which grants the slots")
    for index, rule in enumerate(rules):
        where = f"pool_rules[{index}]"
        for name in (rule.pool, *rule.spill):
            if name not in names:
                found.append(f'{where}: there is no pool "{name}"; there are {", ".join(names)}')
        if len({rule.pool, *rule.spill}) < 1 + len(rule.spill):
            found.append(f"{where}: a pool is named twice")
        found += [f'{where}.tiers: there is no tier "{name}"' for name in rule.tiers if name not in tiers]
    if len(names) > 1 and not found:
        used = {name for rule in rules for name in (rule.pool, *rule.spill)} | {names[0]}
        found += [
            f'pools[{index}]: no rule of pool_rules sends requests to "{name}"'
            for index, name in enumerate(names)
            if name not in used
        ]
    return found
