"""Engines: a StatefulSet, a headless Service and a disruption budget for each group."""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.config.encoders import EncoderConfig
from penstock.config.models import ModelConfig
from penstock.engine.config import LOCAL
from penstock.fleet.kubernetes import pods, sizes
from penstock.fleet.kubernetes.configuration import FILE, RANK_KEYS, RANK_PORT, SecretSetting
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.groups import EngineGroup
from penstock.fleet.kubernetes.names import dns_label
from penstock.fleet.kubernetes.parameters import Json
from penstock.machine import CORES
from penstock.routing.place import ReplicaPlace, labelled_endpoint

PORT = 5555
SPOT_NOTICE_S = 120
"""From a spot machine's notice until it is gone."""
MARGIN_S = 15
"""What a process may take to end after its drain, and the kubelet to notice."""
_OVERHEAD = 1.1
"""What a file system takes of a volume, and the index of blocks that outlive their engine."""
_PROBE_S = 10


def labels(deployment: Deployment, group: EngineGroup) -> dict[str, str]:
    """Of all engines and ranks of the group."""
    component = "engine" if group.is_head else "rank"
    return deployment.labels(component, model=dns_label(group.model.name), group=group.label)


def endpoints(deployment: Deployment, group: EngineGroup) -> Iterator[str]:
    """The stable names of its pods, for gateways without a registry."""
    name = deployment.group_name(group)
    for index in range(group.replicas):
        endpoint = f"tcp://{name}-{index}.{name}.{deployment.namespace}.svc:{PORT}"
        yield labelled_endpoint(endpoint, ReplicaPlace(pool=group.pool))


def grace_s(deployment: Deployment, group: EngineGroup) -> int:
    """How long a pod may take to stop. SIGTERM begins the drain; a spot machine waits for nobody."""
    save_s = group.model.save_s if isinstance(group.model, ModelConfig) else 0.0
    wanted = math.ceil(deployment.config.server.drain_s + save_s) + MARGIN_S
    return min(wanted, SPOT_NOTICE_S) if group.spot else wanted


def service(deployment: Deployment, group: EngineGroup) -> Json:
    """Gives every pod a name. It is published before the pod is ready: ranks join while the head loads."""
    selected = labels(deployment, group)
    ports: list[Json] = [{"name": "engine", "port": PORT, "targetPort": "engine"}]
    if not group.is_head:
        ports = []
    elif isinstance(group.model, ModelConfig) and group.model.placement is not None:
        ports.append({"name": "ranks", "port": RANK_PORT, "targetPort": "ranks"})
    spec: Json = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selected}
    if ports:
        spec["ports"] = ports
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(deployment.group_name(group), selected),
        "spec": spec,
    }


def stateful_set(deployment: Deployment, group: EngineGroup) -> Json:
    selected = labels(deployment, group)
    name = deployment.group_name(group)
    spec: Json = {"serviceName": name, "selector": {"matchLabels": selected}}
    if group.limits is None:
        spec["replicas"] = group.replicas
        if deployment.redis and not _spread(group):
            # Gateways learn of every engine, so that its number may change.
            spec["replicas"] = deployment.parameters.value("engines", group.label, "replicas", default=group.replicas)
    spec |= {
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "RollingUpdate"},
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        "template": {
            "metadata": {"labels": selected, "annotations": {"penstock/configuration": checksum(deployment)}},
            "spec": _pod(deployment, group, selected),
        },
        "volumeClaimTemplates": [_claim(deployment, group), *_scratch_claim(deployment, group)],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": deployment.metadata(name, selected),
        "spec": spec,
    }


def checksum(deployment: Deployment) -> str:
    """Changes with the configuration, so that pods are replaced then."""
    return deployment.parameters.built_in(
        '.Files.Get "files/penstock.yaml" | sha256sum', default=deployment.pods.checksum
    )


def _spread(group: EngineGroup) -> bool:
    return isinstance(group.model, ModelConfig) and group.model.placement is not None


def _pod(deployment: Deployment, group: EngineGroup, selected: dict[str, str]) -> Json:
    spec: Json = {
        "serviceAccountName": deployment.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "terminationGracePeriodSeconds": grace_s(deployment, group),
        "topologySpreadConstraints": pods.spread(selected),
    }
    if deployment.options.priority_classes:
        spec["priorityClassName"] = f"{deployment.name}-engine"
    settings = deployment.parameters.value(
        "engines", group.label, "nodeSelector", default=_node_selector(deployment, group)
    )
    spec["nodeSelector"] = settings
    spec["tolerations"] = deployment.parameters.value(
        "engines", group.label, "tolerations", default=_tolerations(deployment, group)
    )
    spec["initContainers"] = [
        _pull(deployment, group, f"pull-{index}" if index else "pull", source)
        for index, source in enumerate(_pulled(group))
    ]
    if not spec["initContainers"]:
        del spec["initContainers"]
    spec["containers"] = [_engine(deployment, group) if group.is_head else _rank(deployment, group)]
    spec["volumes"] = [*pods.volumes(deployment), {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if isinstance(group.model, ModelConfig) and group.model.placement is not None:
        secret = {"secretName": f"{deployment.head_name(group.model)}-ranks", "defaultMode": 0o440}
        spec["volumes"].append({"name": "ranks", "secret": secret})
    if _scratch(group) and not _scratch_claim(deployment, group):
        spec["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": str(_scratch(group))}})
    return spec


def _node_selector(deployment: Deployment, group: EngineGroup) -> dict[str, str]:
    if not group.spot:
        return {}
    key, _, value = deployment.options.spot_label.partition("=")
    return {key: value}


def _tolerations(deployment: Deployment, group: EngineGroup) -> list[Json]:
    found: list[Json] = []
    if group.gpus:
        found.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    if group.spot:
        key, _, value = deployment.options.spot_label.partition("=")
        found.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    return found


def _pulled(group: EngineGroup) -> list[str]:
    """Fetched before the engine starts, so that its start has a time limit and the download none."""
    sources = [group.model.source]
    if isinstance(group.model, ModelConfig) and group.model.draft_model:
        sources.append(group.model.draft_model)
    return [source for source in dict.fromkeys(sources) if not source.startswith("/")]


def _sources(group: EngineGroup) -> list[str]:
    adapters = [spec.source for spec in group.model.adapters] if isinstance(group.model, ModelConfig) else []
    return [*_pulled(group), *adapters]


def _scratch(group: EngineGroup) -> int:
    """Bytes of the volume for KV blocks on disk."""
    return 0 if isinstance(group.model, EncoderConfig) else group.model.disk_memory * group.ranks


def _container(deployment: Deployment, group: EngineGroup, name: str, arguments: list[str]) -> Json:
    # Without a limit a pod sees all cores of its node: threads for all would stand in the way of its neighbours, and of
    # each other whenever those have work. On GPUs few threads compute, and all cores may compile kernels at the start.
    cores = [pods.from_request(CORES, "cpu")] if group.device == "cpu" else []
    return {
        "name": name,
        "image": deployment.image(group.device),
        "args": arguments,
        "env": [*pods.common_env(deployment), *pods.source_env(deployment, _sources(group)), *cores],
        "securityContext": pods.container_security(),
        "volumeMounts": pods.mounts(deployment),
    }


def _pull(deployment: Deployment, group: EngineGroup, name: str, source: str) -> Json:
    return {
        "name": name,
        "image": deployment.image(group.device),
        "args": ["pull", source],
        "env": [*pods.folder_env(), *pods.source_env(deployment, [source])],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": pods.container_security(),
        "volumeMounts": pods.folder_mounts(),
    }


def _engine(deployment: Deployment, group: EngineGroup) -> Json:
    model = group.model
    arguments = [
        "engine",
        model.name,
        "--config",
        FILE,
        "--endpoint",
        f"tcp://0.0.0.0:{PORT}",
        "--device",
        group.device,
    ]
    if isinstance(model, ModelConfig) and model.replica_grids:
        arguments += ["--tensor-parallel", str(group.tensor), "--pipeline-parallel", str(group.pipeline)]
    if group.pool:
        arguments += ["--pool", group.pool]
    if group.role != "both":
        arguments += ["--role", group.role]
    if _spread(group):
        arguments += ["--join-endpoint", f"tcp://0.0.0.0:{RANK_PORT}"]
    found = _container(deployment, group, "engine", arguments)
    found["env"] += pods.settings_from_secret(deployment, _fleet_settings(deployment))
    if group.spot and deployment.config.server.drain_s + MARGIN_S > SPOT_NOTICE_S:
        found["env"].append(pods.variable("PENSTOCK_SERVER__DRAIN_S", str(SPOT_NOTICE_S - MARGIN_S)))
    found["ports"] = [{"name": "engine", "containerPort": PORT}]
    if _spread(group):
        found["ports"].append({"name": "ranks", "containerPort": RANK_PORT})
    _add_devices(deployment, group, found)
    command = ["penstock", "engine", "--check", "--config", FILE, "--endpoint", f"tcp://127.0.0.1:{PORT}"]
    check = {"exec": {"command": command}, "timeoutSeconds": 20}
    budget = sizes.start_s(model) if isinstance(model, ModelConfig) else sizes.LEAST_START_S
    # The engine's own watchdog acts first; this one is for a process that is frozen as a whole.
    patience = math.ceil((model.watchdog_s + 60) / 30)
    found |= {
        "startupProbe": {**check, "periodSeconds": _PROBE_S, "failureThreshold": math.ceil(budget / _PROBE_S)},
        "readinessProbe": {**check, "periodSeconds": 2 * _PROBE_S, "failureThreshold": 3},
        "livenessProbe": {**check, "periodSeconds": 3 * _PROBE_S, "failureThreshold": patience},
    }
    return found


def _rank(deployment: Deployment, group: EngineGroup) -> Json:
    """Ranks of the head with the same number."""
    model = group.model
    assert isinstance(model, ModelConfig) and group.machine != LOCAL
    head = deployment.head_name(model)
    address = f"tcp://{head}-$(POD_INDEX).{head}.{deployment.namespace}.svc:{RANK_PORT}"
    arguments = ["join", address, "--as", group.machine, "--model", model.source, "--device", group.device]
    if model.draft_model:
        arguments += ["--draft-model", model.draft_model]
    if model.threads is not None:
        arguments += ["--threads", str(model.threads)]
    arguments += ["--curve-key", f"{RANK_KEYS}/rank.key", "--curve-engine", f"{RANK_KEYS}/head.pub"]
    found = _container(deployment, group, "rank", arguments)
    found["env"].insert(0, pods.from_field("POD_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']"))
    _add_devices(deployment, group, found)
    return found


def _fleet_settings(deployment: Deployment) -> list[SecretSetting]:
    return [setting for setting in deployment.pods.secrets if setting.path[0] == "fleet"]


def _add_devices(deployment: Deployment, group: EngineGroup, container: Json) -> None:
    model = group.model
    resources = _resources(group)
    container["resources"] = deployment.parameters.value("engines", group.label, "resources", default=resources)
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    if _spread(group):
        container["volumeMounts"].append({"name": "ranks", "mountPath": RANK_KEYS, "readOnly": True})
    if isinstance(model, ModelConfig) and _scratch(group):
        container["volumeMounts"].append({"name": "scratch", "mountPath": model.disk_path})


def _resources(group: EngineGroup) -> Json:
    """As the configuration says (`models[N].resources`), or from the model's size."""
    model = group.model
    asked = model.resources if isinstance(model, ModelConfig) else None
    cores = float((model.threads or 4) * group.ranks)
    memory = f"{sizes.host_gib(model, group.ranks, group.device) if isinstance(model, ModelConfig) else 4}Gi"
    if asked is not None:
        cores = asked.cpus or cores
        memory = str(asked.memory) if asked.memory else memory
    resources: Json = {"requests": {"cpu": f"{cores:g}", "memory": memory}, "limits": {"memory": memory}}
    devices = {name: f"{amount:g}" for name, amount in (asked.custom if asked is not None else {}).items()}
    if group.gpus:
        devices["nvidia.com/gpu"] = str(group.gpus)
    for kind in resources.values():
        kind |= devices
    return resources


def _claim(deployment: Deployment, group: EngineGroup) -> Json:
    size = f"{sizes.cache_gib(group.model)}Gi" if isinstance(group.model, ModelConfig) else "4Gi"
    spec: Json = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {
            "requests": {
                "storage": deployment.parameters.value(
                    "engines", group.label, "cacheSize", default=deployment.options.cache_size or size
                )
            }
        },
    }
    if deployment.options.storage_class:
        spec["storageClassName"] = deployment.options.storage_class
    return {"metadata": {"name": "home"}, "spec": spec}


def _scratch_claim(deployment: Deployment, group: EngineGroup) -> list[Json]:
    """The volume for KV blocks on disk where they outlive the engine: it stays when its pod is replaced."""
    if not (isinstance(group.model, ModelConfig) and group.model.disk_persistent and _scratch(group)):
        return []
    size = f"{math.ceil(_OVERHEAD * _scratch(group) / 2**30)}Gi"
    spec: Json = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if deployment.options.storage_class:
        spec["storageClassName"] = deployment.options.storage_class
    return [{"metadata": {"name": "scratch"}, "spec": spec}]


def objects(deployment: Deployment, group: EngineGroup) -> list[Json]:
    selected = labels(deployment, group)
    return [
        service(deployment, group),
        stateful_set(deployment, group),
        pods.disruption_budget(deployment, deployment.group_name(group), selected),
    ]
