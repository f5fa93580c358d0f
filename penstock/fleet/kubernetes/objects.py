"""All objects of a deployment, in the order in which they are written."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.fleet.kubernetes import engines, extras, gateways, network, pods, scaler
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.names import dns_label
from penstock.fleet.kubernetes.parameters import Json


@dataclass(frozen=True, slots=True)
class Document:
    """A file of objects. `switch`: the chart's value that leaves them out; `wanted`: its default."""

    name: str
    objects: list[Json]
    switch: str = ""
    wanted: bool = True
    once: bool = False
    """Run once, by hand or by Helm; not among what `kubectl apply` keeps in step."""


def documents(deployment: Deployment) -> list[Document]:
    options = deployment.options
    found = [Document("server", [pods.service_account(deployment), config_map(deployment)])]
    found.append(Document("gateway", gateways.objects(deployment)))
    for name in dict.fromkeys(dns_label(group.model.name) for group in deployment.groups):
        groups = [group for group in deployment.groups if dns_label(group.model.name) == name]
        of_model: list[Json] = []
        for group in groups:
            of_model += engines.objects(deployment, group) + scaler.objects(deployment, group)
        found.append(Document(f"engine-{name}", of_model))
    found += [
        Document("network-policies", network.objects(deployment), "networkPolicy", options.network_policies),
        Document("service-monitor", [extras.service_monitor(deployment)], "serviceMonitor", options.service_monitor),
        Document("inference-pool", [extras.inference_pool(deployment)], "inferencePool", options.inference_pool),
        Document("inference-objectives", extras.objectives(deployment), "inferenceObjectives", options.objectives),
        Document("first-key", [gateways.first_key(deployment)], once=True),
    ]
    if options.route:
        found.append(Document("http-route", [extras.http_route(deployment)]))
    if options.priority_classes:
        found.append(Document("priority-classes", extras.priority_classes(deployment)))
    return found


def config_map(deployment: Deployment) -> Json:
    text = deployment.parameters.built_in('.Files.Get "files/penstock.yaml"', default=deployment.pods.text)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": deployment.metadata(deployment.name, deployment.labels("server")),
        "data": {"penstock.yaml": text},
    }
