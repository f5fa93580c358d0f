"""Who may reach whom: the ingress reaches gateways, gateways reach engines, and nobody else anything."""

from __future__ import annotations

from urllib.parse import urlsplit

from penstock.config.models import ModelConfig
from penstock.fleet.kubernetes import engines, gateways
from penstock.fleet.kubernetes.configuration import RANK_PORT
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.names import dns_label
from penstock.fleet.kubernetes.parameters import Json

_DEFAULT_PORTS = {
    "postgresql": 5432, "redis": 6379, "rediss": 6379, "https": 443, "http": 80, "kafka": 9092, "clickhouse": 8123
}  # fmt: skip
REDIS, POSTGRESQL, HTTPS = 6379, 5432, 443


def objects(deployment: Deployment) -> list[Json]:
    found = [_gateways(deployment)]
    for model in (*deployment.config.models, *(group.model for group in deployment.groups if group.is_encoder)):
        found.append(_engines(deployment, model.name, spread=isinstance(model, ModelConfig) and bool(model.placement)))
    return found


def _policy(deployment: Deployment, name: str, selected: dict[str, str], ingress: Json, egress: Json) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": deployment.metadata(name, selected),
        "spec": {
            "podSelector": {"matchLabels": selected},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": egress,
        },
    }


def _tcp(*ports: int | str) -> list[Json]:
    return [{"protocol": "TCP", "port": port} for port in ports]


def _namespace(name: str) -> Json:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def _dns() -> Json:
    return {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def _gateways(deployment: Deployment) -> Json:
    parameters, options = deployment.parameters, deployment.options
    sources = parameters.value(
        "networkPolicy", "gatewayFrom",
        default=[_namespace(options.ingress_namespace), _namespace(options.monitoring_namespace)],
    )  # fmt: skip
    to_engines = {"podSelector": {"matchLabels": deployment.labels("engine")}}
    return _policy(
        deployment,
        gateways.name(deployment),
        gateways.labels(deployment),
        [{"from": sources, "ports": _tcp("http")}],
        [
            _dns(),
            {"to": [to_engines], "ports": _tcp(engines.PORT)},
            # Where these servers are is in the Secret, so only their ports are known here.
            {"ports": _tcp(*server_ports(deployment))},
        ],
    )


def server_ports(deployment: Deployment) -> list[int]:
    """Ports of all servers that gateways talk to, with those that models come from. Of webhooks only the usual ones:
    tenants choose their URLs."""
    config = deployment.config
    urls = [
        config.store.url,
        config.fleet.url,
        config.counters.url,
        config.admission.url,
        config.cache.url,
        config.conversations.url,
        config.knowledge.url,
        config.request_log.url,
        config.telemetry.otlp_endpoint,
        *(url for remote in config.remotes for url in remote.urls),
        *(rule.url for rule in config.guardrails),
        *(url for server in config.tool_servers for url in (server.url, server.mcp_url)),
    ]
    found = {POSTGRESQL, HTTPS}
    if deployment.redis:
        found.add(REDIS)
    for url in urls:
        if "://" in url:
            parts = urlsplit(url)
            found.add(parts.port or _DEFAULT_PORTS.get(parts.scheme, HTTPS))
    files = config.input_files
    found |= {int(port) for _, _, port in (host.partition(":") for host in files.url_hosts) if port}
    if (files.url_hosts and files.url_plain_http) or (config.webhooks.enabled and config.webhooks.plain_http):
        found.add(_DEFAULT_PORTS["http"])
    return sorted(found)


def _engines(deployment: Deployment, name: str, *, spread: bool) -> Json:
    """For all engines and ranks of a model: engines exchange KV blocks, ranks join their head."""
    label = dns_label(name)
    own = {"matchLabels": {"app.kubernetes.io/instance": deployment.name, "penstock/model": label}}
    selected = {"app.kubernetes.io/instance": deployment.name, "penstock/model": label}
    gateway = {"podSelector": {"matchLabels": gateways.labels(deployment)}}
    inside = _tcp(engines.PORT, *([RANK_PORT] if spread else []))
    outside = [HTTPS]
    if deployment.redis:
        url = deployment.config.fleet.url
        outside.append((urlsplit(url).port if url else None) or REDIS)
    return _policy(
        deployment,
        f"{deployment.name}-{label}",
        selected,
        [
            {"from": [gateway], "ports": _tcp(engines.PORT)},
            {"from": [{"podSelector": own}], "ports": inside},
        ],
        [
            _dns(),
            {"to": [{"podSelector": own}], "ports": inside},
            {"ports": _tcp(*outside)},
        ],
    )
