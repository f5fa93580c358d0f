"""Objects that not every cluster knows or wants: monitors, priority classes, and those of the Gateway API."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.fleet.kubernetes import gateways
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.parameters import Json

METRICS_SECRET = "metrics-key"
"""Key of the Secret: an API key with the scope `metrics`."""


def service_monitor(deployment: Deployment) -> Json:
    """Every gateway exports the metrics of all engines; engines have no HTTP port."""
    credentials = {"name": deployment.secret, "key": METRICS_SECRET}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": deployment.metadata(deployment.name, deployment.labels("server")),
        "spec": {
            "selector": {"matchLabels": gateways.labels(deployment)},
            "jobLabel": "app.kubernetes.io/name",
            "endpoints": [
                {
                    "port": "http",
                    "path": "/metrics",
                    "interval": "15s",
                    "authorization": {"type": "Bearer", "credentials": credentials},
                }
            ],
        },
    }


def priority_classes(deployment: Deployment) -> list[Json]:
    """Gateways before engines: without them nobody is answered."""
    return [
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": f"{deployment.name}-{name}", "labels": deployment.labels("server")},
            "value": value,
            "globalDefault": False,
            "description": f"Penstock: {name}s",
        }
        for name, value in (("gateway", 1_000_000), ("engine", 900_000))
    ]


def inference_pool(deployment: Deployment) -> Json:
    """The endpoints of a pool are gateways: they speak HTTP, engines do not."""
    service, _, port = deployment.options.endpoint_picker.partition(":")
    if not service or not port.isdecimal():
        raise ConfigError(f"--endpoint-picker {deployment.options.endpoint_picker}: write it as SERVICE:PORT")
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": deployment.metadata(deployment.name, deployment.labels("server")),
        "spec": {
            "selector": {"matchLabels": gateways.labels(deployment)},
            "targetPorts": [{"number": deployment.config.server.port}],
            "endpointPickerRef": {"name": service, "port": {"number": int(port)}, "failureMode": "FailOpen"},
        },
    }


def objectives(deployment: Deployment) -> list[Json]:
    """One for each class of the tiers. Higher is more important here, the other way round than in `tiers`."""
    classes = sorted({tier.priority for tier in deployment.config.tiers})
    names = {0: "premium", 1: "standard", 2: "batch"}
    return [
        {
            "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
            "kind": "InferenceObjective",
            "metadata": deployment.metadata(f"{deployment.name}-{names[number]}", deployment.labels("server")),
            "spec": {
                "priority": 1 - number,
                "poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": deployment.name},
            },
        }
        for number in classes
    ]


def http_route(deployment: Deployment) -> Json:
    """From a Gateway of the Gateway API to the pool, or to the gateways' Service."""
    options = deployment.options
    namespace, _, gateway = options.route.rpartition("/")
    parent: Json = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": gateway}
    if namespace:
        parent["namespace"] = namespace
    backend: Json = {"group": "", "kind": "Service", "name": gateways.name(deployment), "port": 80}
    if options.inference_pool:
        backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": deployment.name}
    spec: Json = {
        "parentRefs": [parent],
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [backend],
                # Answers stream for as long as they take; the server has time limits of its own.
                "timeouts": {"request": "0s"},
            }
        ],
    }
    if options.host:
        spec["hostnames"] = [options.host]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": deployment.metadata(deployment.name, deployment.labels("server")),
        "spec": spec,
    }
