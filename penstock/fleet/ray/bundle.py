"""What a replica and a gateway reserve on a Ray cluster, and which settings cannot be had there (pure).

A replica is one bundle, so all its ranks are on one node. On CPU it gets as many threads as it reserves cores: two
replicas on one node must not fight for the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config import Config, ModelConfig
from penstock.config.resources import ResourcesConfig
from penstock.config.variants import variant_at

MOST_CPUS = 8
"""Cores that a rank on CPU reserves when nothing is configured and nodes are large."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, as Ray describes it."""

    id: str
    name: str
    address: str
    resources: Mapping[str, float] = field(default_factory=dict)
    """In total, also what is in use."""

    @property
    def cpus(self) -> float:
        return self.resources.get("CPU", 0.0)

    @property
    def gpus(self) -> float:
        return self.resources.get("GPU", 0.0)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources on one node."""

    cpus: float
    gpus: float = 0.0
    memory: int = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    @property
    def resources(self) -> dict[str, float]:
        """As a placement group wants it."""
        found = {"CPU": self.cpus, "GPU": self.gpus, "memory": float(self.memory), **self.custom}
        return {name: amount for name, amount in found.items() if amount}

    def fits(self, node: Node) -> bool:
        """Whether an idle node has room for it."""
        return all(node.resources.get(name, 0.0) >= amount for name, amount in self.resources.items())

    def __str__(self) -> str:
        named = {"CPU": "CPUs", "GPU": "GPUs", "memory": "bytes of memory"}
        return ", ".join(f"{amount:g} {named.get(name, name)}" for name, amount in self.resources.items())


def engine_bundle(config: Config, model: ModelConfig, nodes: Sequence[Node]) -> Bundle:
    """For a replica with these settings."""
    ranks = model.tensor_parallel * model.pipeline_parallel
    asked = model.resources or ResourcesConfig()
    gpus = asked.gpus
    if gpus is None:
        # A share of one GPU is a fraction of it; ranks of a grid have whole ones.
        each = model.memory_share if ranks == 1 and model.memory_share is not None else 1.0
        gpus = ranks * each if on_gpus(model, nodes) else 0.0
    cpus = asked.cpus
    if cpus is None:
        cpus = float(ranks if gpus else ranks * (model.threads or _cpu_share(config, ranks, nodes)))
    return Bundle(cpus, gpus, asked.memory or 0, asked.custom)


def on_gpus(model: ModelConfig, nodes: Iterable[Node]) -> bool:
    """Whether the replicas of a model run on GPUs."""
    if model.resources is not None and model.resources.gpus is not None:
        return model.resources.gpus > 0
    return model.device.startswith("cuda") or (model.device == "auto" and any(node.gpus for node in nodes))


def placed(model: ModelConfig, bundle: Bundle) -> ModelConfig:
    """The settings of a replica in its bundle: a model of one replica with a device, and on CPU with threads."""
    alone = dataclasses.replace(model, replicas=1, autoscale=None, pools=(), pool_rules=(), replica_roles=())
    if bundle.gpus:
        return dataclasses.replace(alone, device="cuda")
    ranks = model.tensor_parallel * model.pipeline_parallel
    return dataclasses.replace(alone, device="cpu", threads=model.threads or max(int(bundle.cpus) // ranks, 1))


def engine_config(config: Config, model: ModelConfig) -> Config:
    """What an engine with these settings is started with. The other models stay, because settings refer to them."""
    others = [dataclasses.replace(other, memory_share=None) for other in config.models if other.name != model.name]
    return dataclasses.replace(config, models=(model, *others))


def _cpu_share(config: Config, ranks: int, nodes: Sequence[Node]) -> int:
    """Cores of one rank on CPU: of the largest node what a gateway leaves, in equal parts."""
    largest = max((node.cpus for node in nodes), default=1.0)
    return max(min(int((largest - gateway_bundle(config).cpus) // ranks), MOST_CPUS), 1)


def gateway_bundle(config: Config) -> Bundle:
    return Bundle(config.cluster.gateway_cpus or float(config.server.workers))


def without_room(config: Config, nodes: Sequence[Node]) -> list[str]:
    """What no node of the cluster could hold, even if it were idle; each as a sentence."""
    found = []
    for model in config.models:
        for replica in range(model.first_replicas):
            bundle = engine_bundle(config, variant_at(model, replica).of(model), nodes)
            if not any(bundle.fits(node) for node in nodes):
                found.append(f"no node has room for a replica of {model.name} ({bundle})")
                break
    if not any(gateway_bundle(config).fits(node) for node in nodes):
        found.append(f"no node has room for a gateway ({gateway_bundle(config)})")
    return found


def problems(config: Config, nodes: Sequence[Node]) -> list[str]:
    """Settings that cannot be had on a Ray cluster, each with the reason."""
    found = []
    for index, model in enumerate(config.models):
        where = f"models[{index}]"
        if model.placement is not None:
            found.append(f"{where}.placement: on Ray the ranks of a replica share a node; remove it")
        variants = [model, *(model.in_pool(pool.name) for pool in model.pools)]
        if any(each.devices or each.replica_devices for each in variants):
            found.append(f"{where}.devices, replica_devices: Ray chooses the GPUs; remove them and use resources.gpus")
        if any(each.device.startswith("cuda:") for each in variants):
            found.append(f"{where}.device: Ray chooses the GPU; write cuda")
        if model.time_slice:
            found.append(f"{where}.time_slice: its models share one machine; use one server for them")
    if config.server.loaded_models:
        found.append("server.loaded_models: the file would be on one node only; remove it")
    if config.fleet.url:
        found.append("fleet.url: on Ray gateways find engines through the controller, not through Redis; remove it")
    if len(nodes) > 1 and not config.store.url.startswith("postgres"):
        # A file is on one node; a gateway that returns on another would find no keys and an empty ledger.
        found.append("store.url: on several nodes keys, ledger and conversations need PostgreSQL (postgresql://...)")
    if config.cluster.gateways > len(nodes):
        found.append(f"cluster.gateways: {config.cluster.gateways} gateways need as many nodes; there are {len(nodes)}")
    if config.cluster.gateways > 1:
        if not config.counters.url:
            found.append("counters.url: several gateways need one Redis for limits")
        if (config.cache.exact, config.cache.semantic) != ("off", "off") and not config.cache.url:
            found.append("cache.url: several gateways need one Redis for answers")
    return found
