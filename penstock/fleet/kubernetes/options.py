"""What the cluster decides rather than the configuration: names, images, which optional objects are wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Registry = Literal["auto", "redis", "dns"]
Scaler = Literal["auto", "keda", "hpa", "none"]
DeviceKind = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The options of `penstock deploy kubernetes`."""

    name: str = "penstock"
    """Of the deployment: all objects are named after it."""
    namespace: str = "penstock"
    image: str = "penstock"
    """A repository, to which the tags VERSION-gateway, VERSION-cpu and VERSION-cuda are added, or a whole reference for
    all pods."""
    gateways: int = 2
    registry: Registry = "auto"
    """How gateways find engines: by the fleet's Redis, or by the stable DNS names of their pods."""
    device: DeviceKind = "auto"
    """For models whose configuration says `auto`."""
    secret: str = ""
    """Name of the Secret; by default that of the deployment."""
    storage_class: str = ""
    cache_size: str = ""
    """Of the volume for a model; by default from its size."""
    models_claim: str = ""
    """A claim with models, mounted at MODELS."""
    scaler: Scaler = "auto"
    queue_target: int = 10
    """Waiting requests per replica, in gateways and engines together."""
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"
    network_policies: bool = True
    ingress_namespace: str = "ingress-nginx"
    monitoring_namespace: str = "monitoring"
    service_monitor: bool = False
    priority_classes: bool = False
    spot_label: str = "karpenter.sh/capacity-type=spot"
    inference_pool: bool = False
    endpoint_picker: str = "penstock-epp:9002"
    """Service and port of the endpoint picker that the InferencePool names."""
    objectives: bool = False
    """InferenceObjectives, which releases of the inference extension have up to 1.5."""
    route: str = ""
    """Gateway (GATEWAY or NAMESPACE/GATEWAY) of an HTTPRoute."""
    host: str = ""
    """Host name of the HTTPRoute."""

    @property
    def secret_name(self) -> str:
        return self.secret or self.name
