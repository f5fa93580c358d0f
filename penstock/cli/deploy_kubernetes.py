"""`penstock deploy kubernetes`: manifests or a Helm chart from penstock.yaml."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.deploy_options import Force, Output, emit
from penstock.cli.options import ConfigFile

if TYPE_CHECKING:
    from penstock.fleet.kubernetes import Deployment


class Registry(StrEnum):
    auto = "auto"
    redis = "redis"
    dns = "dns"


class Scaler(StrEnum):
    auto = "auto"
    keda = "keda"
    hpa = "hpa"
    none = "none"


class DeviceKind(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def kubernetes(
    config_file: ConfigFile = None,
    output: Output = None,
    helm: Annotated[bool, typer.Option("--helm", help="Write a Helm chart instead of manifests.")] = False,
    name: Annotated[str, typer.Option(help="Name of the deployment; all objects are named after it.")] = "penstock",
    namespace: Annotated[str, typer.Option("--namespace", "-n", help="Namespace of all objects.")] = "penstock",
    image: Annotated[
        str,
        typer.Option(help="Image repository (tags VERSION-gateway, -cpu, -cuda are added), or a whole reference."),
    ] = "penstock",
    gateways: Annotated[int, typer.Option(min=1, help="Gateway pods.")] = 2,
    registry: Annotated[
        Registry,
        typer.Option(help="How gateways find engines: in the fleet's Redis, or by DNS names, then in fixed numbers."),
    ] = Registry.auto,
    device: Annotated[DeviceKind, typer.Option(help="For models whose device is auto.")] = DeviceKind.auto,
    secret: Annotated[str, typer.Option(help="Name of the Secret with URLs and keys; by default --name.")] = "",
    models_claim: Annotated[
        str, typer.Option(metavar="CLAIM", help="Claim with models, mounted at /models; read by all pods.")
    ] = "",
    storage_class: Annotated[str, typer.Option(help="Storage class of the engines' volumes.")] = "",
    cache_size: Annotated[str, typer.Option(help="Size of each, like 200Gi; by default from the model's size.")] = "",
    scaler: Annotated[
        Scaler, typer.Option(help="What scales models with `autoscale`; auto: KEDA, if there are any.")
    ] = Scaler.auto,
    queue_target: Annotated[
        int, typer.Option(min=1, help="Waiting requests per replica, in gateways and engines together.")
    ] = 10,
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Prometheus that KEDA asks.")
    ] = "http://prometheus-operated.monitoring.svc:9090",
    spot_label: Annotated[
        str, typer.Option(metavar="KEY=VALUE", help="Label, and taint, of spot machines (autoscale.spot).")
    ] = "karpenter.sh/capacity-type=spot",
    network_policies: Annotated[bool, typer.Option(help="Write NetworkPolicies.")] = True,
    ingress_namespace: Annotated[
        str, typer.Option(help="Namespace whose pods may reach the gateways.")
    ] = "ingress-nginx",
    monitoring_namespace: Annotated[str, typer.Option(help="Namespace of Prometheus.")] = "monitoring",
    service_monitor: Annotated[
        bool, typer.Option("--service-monitor", help="Write a ServiceMonitor for the Prometheus operator.")
    ] = False,
    priority_classes: Annotated[
        bool, typer.Option("--priority-classes", help="Write PriorityClasses and use them.")
    ] = False,
    inference_pool: Annotated[
        bool, typer.Option("--inference-pool", help="Write an InferencePool (Gateway API inference extension).")
    ] = False,
    endpoint_picker: Annotated[
        str, typer.Option(metavar="SERVICE:PORT", help="The endpoint picker that the InferencePool names.")
    ] = "penstock-epp:9002",
    objectives: Annotated[
        bool,
        typer.Option("--objectives", help="Write an InferenceObjective per class of tiers (extension 1.5 or older)."),
    ] = False,
    route: Annotated[
        str, typer.Option(metavar="[NAMESPACE/]GATEWAY", help="Write an HTTPRoute from this Gateway.")
    ] = "",
    host: Annotated[str, typer.Option(help="Host name of the HTTPRoute.")] = "",
    force: Force = False,
) -> None:
    """
    Write Kubernetes manifests, or a Helm chart, for the server of a configuration.

    Gateways are a Deployment, the engines of each model a StatefulSet. Passwords and keys of the configuration are
    not written: the command says which keys the Secret needs.

    Examples:

        penstock deploy kubernetes -c penstock.yaml --output k8s && kubectl apply -f k8s

        penstock deploy kubernetes -c penstock.yaml --helm --output chart --image registry.example.com/penstock

        penstock deploy kubernetes -c penstock.yaml --scaler hpa --service-monitor | less
    """
    from penstock.errors import ConfigError
    from penstock.fleet.kubernetes import ClusterOptions, Deployment, chart, manifests, stream

    if helm and output is None:
        raise ConfigError("--helm writes a folder: give --output FOLDER")
    if host and not route:
        raise ConfigError("--host is the host name of an HTTPRoute: give --route GATEWAY too")
    options = ClusterOptions(
        name=name,
        namespace=namespace,
        image=image,
        gateways=gateways,
        registry=registry.value,
        device=device.value,
        secret=secret,
        storage_class=storage_class,
        cache_size=cache_size,
        models_claim=models_claim,
        scaler=scaler.value,
        queue_target=queue_target,
        prometheus=prometheus,
        network_policies=network_policies,
        ingress_namespace=ingress_namespace,
        monitoring_namespace=monitoring_namespace,
        service_monitor=service_monitor,
        priority_classes=priority_classes,
        spot_label=spot_label,
        inference_pool=inference_pool,
        endpoint_picker=endpoint_picker,
        objectives=objectives,
        route=route,
        host=host,
    )
    deployment = Deployment.of(config_file, options)
    if output is None:
        emit({"penstock.yaml": stream(deployment)}, None, force)
    else:
        emit(chart(deployment) if helm else manifests(deployment), output, force)
    _say_what_is_needed(deployment, output, helm)


def _say_what_is_needed(deployment: Deployment, output: Path | None, helm: bool) -> None:
    """The commands to run next, on standard error."""
    from penstock.fleet.kubernetes.instructions import instructions

    for line in instructions(deployment, output, helm=helm):
        typer.echo(line, err=True)
