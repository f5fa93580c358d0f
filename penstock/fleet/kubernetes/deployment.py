"""The decisions about a deployment, made once: what a configuration asks for, and what of it a cluster cannot give."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import penstock
from penstock.config import Config
from penstock.config.models import ModelConfig
from penstock.fleet.kubernetes import configuration
from penstock.fleet.kubernetes.configuration import PodConfiguration
from penstock.fleet.kubernetes.groups import EngineGroup, device_of, encoder_group, model_groups
from penstock.fleet.kubernetes.names import check_label, check_length, dns_label
from penstock.fleet.kubernetes.options import ClusterOptions
from penstock.fleet.kubernetes.parameters import Json, Parameters
from penstock.fleet.surroundings import is_local, servers_on_this_machine, sources
from penstock.protocol.address import is_loopback

MODELS = "/models"
"""Where the claim with models is mounted."""
HOME = "/var/lib/penstock"
"""The only folder besides /tmp that a pod writes to."""


class Deployment:
    """A server in a cluster."""

    def __init__(self, config: Config, tree: dict[str, Any], options: ClusterOptions) -> None:
        self.config = config
        self.options = options
        self.redis = _uses_redis(config, options)
        self.scaler = _scaler(config, options)
        configuration.refuse(_problems(config, tree, options, self.redis, self.scaler))
        self.pods: PodConfiguration = configuration.for_pods(config, tree, redis=self.redis)
        self.parameters = Parameters()
        self.name = self.parameters.built_in(".Release.Name", options.name)
        self.namespace = self.parameters.built_in(".Release.Namespace", options.namespace)
        self.secret = self.parameters.value("secret", "name", default=options.secret_name)
        self.groups = tuple(_groups(config, tree, options, scaled=self.scaler != "none"))
        for group in self.groups:
            check_length(f"{options.name}-{group.label}")
        labels = [group.label for group in self.groups]
        doubled = sorted({label for label in labels if labels.count(label) > 1})
        configuration.refuse([f"two StatefulSets would be called {label}; rename a model" for label in doubled])

    @classmethod
    def of(cls, file: Path | None, options: ClusterOptions) -> Deployment:
        """From a configuration file; ConfigError says everything that cannot be deployed."""
        config, tree = configuration.read(file)
        return cls(config, tree, options)

    def image(self, kind: str) -> str:
        """The image of pods: gateway, or the kind of device."""
        given = self.options.image
        whole = "@" in given or ":" in given.rpartition("/")[2]
        default = given if whole else f"{given}:{penstock.__version__}-{kind}"
        return self.parameters.value("image", kind, default=default)

    def labels(self, component: str, **more: str) -> dict[str, str]:
        """Labels that select the pods of a component."""
        return {
            "app.kubernetes.io/name": "penstock",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": component,
            **{f"penstock/{key}": value for key, value in more.items()},
        }

    def metadata(self, name: str, labels: dict[str, str], **more: Json) -> dict[str, Json]:
        managed = {"app.kubernetes.io/managed-by": self.parameters.built_in(".Release.Service", "penstock")}
        return {"name": name, "namespace": self.namespace, "labels": {**labels, **managed}, **more}

    def group_name(self, group: EngineGroup) -> str:
        """Of the StatefulSet and of its headless Service."""
        return f"{self.name}-{group.label}"

    def head_name(self, model: ModelConfig) -> str:
        """Of the StatefulSet with the heads of a grid over several machines."""
        return f"{self.name}-{dns_label(model.name)}"


def _uses_redis(config: Config, options: ClusterOptions) -> bool:
    if options.registry == "auto":
        return bool(config.fleet.url) or any(model.autoscale is not None for model in config.models)
    return options.registry == "redis"


def _scaler(config: Config, options: ClusterOptions) -> str:
    if options.scaler != "auto":
        return options.scaler
    return "keda" if any(model.autoscale is not None for model in config.models) else "none"


def _groups(config: Config, tree: dict[str, Any], options: ClusterOptions, *, scaled: bool) -> list[EngineGroup]:
    found: list[EngineGroup] = []
    for model in config.models:
        found += model_groups(model, device_of(model, options.device), scaled=scaled)
    if "encoders" in tree:
        found += [encoder_group(encoder, device_of(encoder, options.device)) for encoder in config.encoders]
    return found


def _problems(config: Config, tree: dict[str, Any], options: ClusterOptions, redis: bool, scaler: str) -> list[str]:
    check_label("--name", options.name)
    check_label("--namespace", options.namespace)
    check_label("--secret", options.secret_name)
    problems = []
    for key in ("store", "knowledge", "request_log", "fleet", "counters", "admission", "cache", "conversations"):
        url: str = getattr(config, key).url
        host = urlsplit(url).hostname or ""
        if url.startswith("sqlite"):
            problems.append(f"{key}.url: {url} is a file of one pod; gateways need postgresql://, which they share")
        elif host and is_loopback(host):
            problems.append(f"{key}.url: {host} is the pod itself there; name a server that pods reach")
    problems += [
        f"{setting}: {host} is the pod itself there; name a server that pods reach"
        for setting, host in servers_on_this_machine(config)
    ]
    problems += [
        f"tool_servers[{index}].openapi: there is no file {server.openapi_file} to write into the ConfigMap"
        for index, server in enumerate(config.tool_servers)
        if server.openapi_file and tree["tool_servers"][index]["openapi"] == server.openapi_file
    ]
    spool = PurePosixPath(config.request_log.spool or HOME)
    if not any(spool.is_relative_to(folder) for folder in (HOME, "/tmp")):
        problems.append(f"request_log.spool: pods write below {HOME} and /tmp only; name a folder there")
    for index, remote in enumerate(config.remotes):
        if remote.tokenizer:
            problems += [f"remotes[{index}].tokenizer: {why}" for why in _source_problems(remote.tokenizer, options)]
    if config.server.loaded_models:
        problems.append("server.loaded_models: a file of one pod; list the models in the configuration")
    cache = config.cache
    if options.gateways > 1 and not cache.url and (cache.exact, cache.semantic) != ("off", "off"):
        problems.append("cache.url: several gateways need a shared cache in Redis")
    labels: dict[str, str] = {}
    encoders = config.encoders if "encoders" in tree else ()
    for name in [*(model.name for model in config.models), *(encoder.name for encoder in encoders)]:
        label = dns_label(name)
        if label in (*labels, "gateway"):
            other = labels.get(label, "the gateways")
            problems.append(f"{name}: its objects would have the names of those of {other}; rename it")
        labels[label] = name
    for index, model in enumerate(config.models):
        problems += [f"models[{index}] ({model.name}): {why}" for why in _model_problems(model, options, redis, scaler)]
    for index, encoder in enumerate(encoders):
        problems += [f"encoders[{index}] ({encoder.name}): {why}" for why in _source_problems(encoder.source, options)]
    return problems


def _model_problems(model: ModelConfig, options: ClusterOptions, redis: bool, scaler: str) -> list[str]:
    problems = []
    if model.time_slice:
        problems.append("time_slice: models in turn on one GPU need one machine; pods have GPUs of their own")
    if model.memory_share is not None:
        problems.append("memory_share: a pod has its GPUs to itself; leave it out")
    if len({device.partition(":")[0] for device in model.replica_devices}) > 1:
        problems.append("replica_devices: replicas on CPU and on GPU; use one entry of `models` for each kind")
    kinds = {(pool.device or model.device).partition(":")[0] for pool in model.pools}
    if len(kinds) > 1:
        problems.append("pools: on CPU and on GPU; use one entry of `models` for each kind")
    if model.resources is not None:
        if model.resources.gpus != int(model.resources.gpus or 0) and model.resources.gpus is not None:
            problems.append("resources.gpus: a pod has whole GPUs")
        odd = [name for name in model.resources.custom if "/" not in name]
        problems += [f"resources.labels: {name}: extended resources are DOMAIN/NAME=AMOUNT" for name in odd]
    for source in sources(model):
        problems += _source_problems(source, options)
    if model.disk_memory and not PurePosixPath(model.disk_path).is_absolute():
        problems.append("disk_path: an absolute path is needed, where the pod mounts its scratch volume")
    problems += [
        f"pools[{index}].autoscale: KEDA and the HorizontalPodAutoscaler get the queue of the whole model, which does "
        "not tell which pool needs more; give the pool a number of replicas, or run the fleet's own controller"
        for index, pool in enumerate(model.pools)
        if pool.autoscale is not None
    ]
    scale = model.autoscale
    if scale is None or scaler == "none":
        return problems
    if not redis:
        problems.append("autoscale: gateways learn of new replicas through the fleet's Redis; use --registry redis")
    if model.placement is not None:
        problems.append("autoscale: a grid over several machines is several StatefulSets, which scale only together")
    if model.replica_grids:
        problems.append("autoscale: replicas with grids of their own (replica_grids) are scaled by hand")
    if scaler == "hpa" and scale.min == 0:
        problems.append("autoscale.min: a HorizontalPodAutoscaler cannot scale to zero; use --scaler keda")
    if scaler == "hpa" and scale.schedules:
        problems.append("autoscale.schedules: a HorizontalPodAutoscaler has none; use --scaler keda")
    return problems


def _source_problems(source: str, options: ClusterOptions) -> list[str]:
    if not is_local(source):
        return []
    if not options.models_claim:
        return [f"{source} is a file of this machine; copy it to a claim and give --models-claim, or use hf:"]
    if not PurePosixPath(source).is_relative_to(MODELS):
        return [f"{source}: models of a claim are in {MODELS}; write {MODELS}/..."]
    return []
