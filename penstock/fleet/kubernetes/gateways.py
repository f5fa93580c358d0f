"""Gateways: a Deployment, its Service and a disruption budget; and the Job that makes the first key."""

from __future__ import annotations

import math

from penstock.fleet.kubernetes import engines, pods
from penstock.fleet.kubernetes.configuration import DRAIN_DELAY_S, FILE, SecretSetting
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.parameters import Json
from penstock.fleet.surroundings import credentials

START_S = 600
"""For fetching tokenizers and templates of all models."""


def labels(deployment: Deployment) -> dict[str, str]:
    return deployment.labels("gateway")


def name(deployment: Deployment) -> str:
    return f"{deployment.name}-gateway"


def readiness_path(deployment: Deployment) -> str:
    """With several models a gateway is ready while any of them answers: otherwise one model's restart would take the
    others away from their clients."""
    return "/health/ready" if len(deployment.config.models) == 1 and not deployment.config.remotes else "/health"


def drain_delay_s(deployment: Deployment) -> float:
    return deployment.config.server.drain_delay_s or DRAIN_DELAY_S


def grace_s(deployment: Deployment) -> int:
    """Readiness fails, requests are taken for a while yet, those that run finish."""
    return math.ceil(drain_delay_s(deployment) + deployment.config.server.drain_s) + engines.MARGIN_S


def service(deployment: Deployment) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": deployment.metadata(name(deployment), labels(deployment)),
        "spec": {
            "selector": labels(deployment),
            "ports": [{"name": "http", "port": 80, "targetPort": "http", "appProtocol": "http"}],
        },
    }


def workload(deployment: Deployment) -> Json:
    selected = labels(deployment)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": deployment.metadata(name(deployment), selected),
        "spec": {
            "replicas": deployment.parameters.value("gateway", "replicas", default=deployment.options.gateways),
            "selector": {"matchLabels": selected},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {
                "metadata": {
                    "labels": selected,
                    "annotations": {"penstock/configuration": engines.checksum(deployment)},
                },
                "spec": _pod(deployment, selected),
            },
        },
    }


def _pod(deployment: Deployment, selected: dict[str, str]) -> Json:
    spec: Json = {
        "serviceAccountName": deployment.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "terminationGracePeriodSeconds": grace_s(deployment),
        "topologySpreadConstraints": pods.spread(selected),
        "containers": [_container(deployment)],
        "volumes": [*pods.volumes(deployment, deployment.pods.files), {"name": "home", "emptyDir": {}}],
    }
    if deployment.options.priority_classes:
        spec["priorityClassName"] = f"{deployment.name}-gateway"
    return spec


def _container(deployment: Deployment) -> Json:
    server = deployment.config.server
    arguments = ["gateway", "--config", FILE, "--host", "0.0.0.0", "--port", str(server.port)]
    for group in deployment.groups:
        if group.is_head and (not deployment.redis or group.is_encoder):
            for endpoint in engines.endpoints(deployment, group):
                arguments += ["--engine", f"{group.model.name}={endpoint}"]
    ports: list[Json] = [{"name": "http", "containerPort": server.port}]
    if server.admin_port is not None:
        ports.append({"name": "admin", "containerPort": server.admin_port})
    sources = [model.source for model in deployment.config.models]
    cores = str(server.workers)
    resources = {"requests": {"cpu": cores, "memory": f"{2 * server.workers}Gi"}}

    def http(path: str, period: int, failures: int) -> Json:
        get = {"path": path, "port": "http"}
        return {"httpGet": get, "periodSeconds": period, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "name": "gateway",
        "image": deployment.image("gateway"),
        "args": arguments,
        "env": [
            *pods.common_env(deployment),
            *pods.source_env(deployment, sources),
            *pods.settings_from_secret(deployment, deployment.pods.secrets),
            *(pods.from_secret(deployment, name, name) for name in credentials(deployment.config)),
        ],
        "ports": ports,
        "resources": deployment.parameters.value("gateway", "resources", default=resources),
        "securityContext": pods.container_security(),
        "startupProbe": http("/health/live", 5, START_S // 5),
        "readinessProbe": http(readiness_path(deployment), 5, 2),
        "livenessProbe": http("/health/live", 20, 6),
        "volumeMounts": pods.mounts(deployment),
    }


def first_key(deployment: Deployment) -> Json:
    """Gateways that others can reach do not start without a key in their store. Helm runs this before it installs."""
    selected = deployment.labels("first-key")
    env: list[Json]
    if deployment.pods.is_secret("store", "url"):
        env = pods.settings_from_secret(deployment, [SecretSetting(("store", "url"))])
    else:
        env = [pods.variable("PENSTOCK_STORE__URL", deployment.config.store.url)]
    hook = {"helm.sh/hook": "pre-install", "helm.sh/hook-delete-policy": "before-hook-creation"}
    pod: Json = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pods.pod_security(),
        "containers": [
            {
                "name": "key",
                "image": deployment.image("gateway"),
                "args": ["keys", "create", "--scope", "inference", "--scope", "admin", "--scope", "metrics"],
                "env": [*env, *pods.folder_env()],
                "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
                "securityContext": pods.container_security(),
                "volumeMounts": pods.folder_mounts(),
            }
        ],
        "volumes": [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": deployment.metadata(f"{deployment.name}-first-key", selected, annotations=hook),
        "spec": {"backoffLimit": 6, "template": {"metadata": {"labels": selected}, "spec": pod}},
    }


def objects(deployment: Deployment) -> list[Json]:
    return [
        service(deployment),
        workload(deployment),
        pods.disruption_budget(deployment, name(deployment), labels(deployment)),
    ]
