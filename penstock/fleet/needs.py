"""What a fleet should run, for placement: the replicas of every variant of every model, and what each of them takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.config import ModelConfig
from penstock.config.autoscale import AutoscaleConfig
from penstock.config.resources import ResourcesConfig
from penstock.config.variants import PLAIN, Variant, slot, variants
from penstock.fleet.devices import claim
from penstock.fleet.placement import Need
from penstock.fleet.records import ModelRecord, PoolWish
from penstock.fleet.registry import Fleet
from penstock.protocol.control import scaled_name


@dataclass(frozen=True, slots=True)
class Ask:
    """How many replicas a model, or one of its pools, should have."""

    model: str
    pool: str
    replicas: int
    """With `autoscale`, where it begins."""
    autoscale: AutoscaleConfig | None = None

    @property
    def name(self) -> str:
        """What automatic scaling calls it."""
        return scaled_name(self.model, self.pool)


def asks(record: ModelRecord, config: ModelConfig) -> list[Ask]:
    """Of a model: one, or one for each of its pools."""
    if not config.pools:
        wish = PoolWish(record.replicas, record.min, record.max)
        return [Ask(record.name, "", record.replicas, limited(config.autoscale, wish))]
    found = []
    for pool in config.pools:
        wish = record.pools.get(pool.name, PoolWish())
        count = pool.first_replicas if wish.replicas is None else wish.replicas
        found.append(Ask(record.name, pool.name, count if record.replicas else 0, limited(pool.autoscale, wish)))
    return found


def limited(config: AutoscaleConfig | None, wish: PoolWish) -> AutoscaleConfig | None:
    """With the limits that were set since, if they are possible."""
    if config is None:
        return None
    changed = dataclasses.replace(
        config,
        min=config.min if wish.min is None else wish.min,
        max=config.max if wish.max is None else wish.max,
    )
    return config if changed.problems() else changed


@dataclass(frozen=True, slots=True)
class SlotNeed:
    """A need, and what it is of."""

    model: str
    variant: Variant
    need: Need


def slot_needs(fleet: Fleet, config: ModelConfig, ask: Ask, replicas: int, spot: int) -> list[SlotNeed]:
    """Of `replicas` replicas of a model or pool, `spot` of them on spot machines."""
    most = max((len(machine.devices) for machine in fleet.machines.values()), default=0)
    found = []
    for variant, count in sorted(variants(config, ask.pool, replicas).items()):
        own = variant.of(config)
        wanted = claim(own, most)
        reserved = own.resources or ResourcesConfig()
        name = slot(ask.model, variant)
        used = [
            engine.memory
            for engine in fleet.engines.values()
            if (engine.model, engine.variant) == (ask.model, variant) and engine.state == "ready"
        ]
        measured = 0 if wanted.devices else max(used, default=0)
        there = min(count, spot)
        spot -= there
        need = Need(
            name,
            count,
            devices=wanted.devices,
            cpus=reserved.cpus or 0,
            memory=reserved.memory or measured,
            labels=frozenset((*config.machine_labels, *reserved.custom)),
            spot=there,
            certain=wanted.certain,
            share=wanted.share,
            group=wanted.group,
            model="" if variant == PLAIN else ask.model,
        )
        found.append(SlotNeed(ask.model, variant, need))
    return found
