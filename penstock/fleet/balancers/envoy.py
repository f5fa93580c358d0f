"""Envoy 1.28 or newer."""

from __future__ import annotations

import math
from typing import Any

import yaml

from penstock.fleet.balancers.front import LONGEST_S, READY, Front

ADMIN_PORT = 9901
_TYPES = "type.googleapis.com/envoy"


def envoy(front: Front, admin_port: int = ADMIN_PORT) -> str:
    text = yaml.safe_dump(_configuration(front, admin_port), sort_keys=False, width=110)
    return f"""\
# Envoy in front of {len(front.gateways)} Penstock gateways; written by `penstock deploy envoy`.
# Check: envoy --mode validate -c envoy.yaml      Run: envoy -c envoy.yaml
{text}"""


def _configuration(front: Front, admin_port: int) -> dict[str, Any]:
    return {
        "admin": {"address": _address("127.0.0.1", admin_port)},
        "static_resources": {"listeners": [_listener(front)], "clusters": [_cluster(front)]},
    }


def _listener(front: Front) -> dict[str, Any]:
    chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": _http(front)}]}
    if front.certificate:
        chain["transport_socket"] = {
            "name": "tls",
            "typed_config": {
                "@type": f"{_TYPES}.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {
                    "alpn_protocols": ["h2", "http/1.1"],
                    "tls_certificates": [
                        {
                            "certificate_chain": {"filename": front.certificate},
                            "private_key": {"filename": front.key},
                        }
                    ],
                },
            },
        }
    return {
        "name": "public",
        "address": _address("0.0.0.0", front.port),
        "per_connection_buffer_limit_bytes": 1 << 20,  # up to this size a request can be sent again
        "filter_chains": [chain],
    }


def _http(front: Front) -> dict[str, Any]:
    route: dict[str, Any] = {
        "cluster": "penstock",
        "timeout": f"{LONGEST_S}s",
        "idle_timeout": f"{LONGEST_S}s",
        # Nothing has been answered yet in these cases, and a refusal with 503 is free of charge.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
            "retriable_status_codes": [503],
            "num_retries": 2,
            "retry_host_predicate": [
                {
                    "name": "previous_hosts",
                    "typed_config": {
                        "@type": f"{_TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    },
                }
            ],
            "host_selection_retry_max_attempts": 5,
        },
    }
    if front.sticky_header:
        route["hash_policy"] = [{"header": {"header_name": front.sticky_header}}]
    domain = "*" if front.name == "_" else front.name
    return {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "public",
        "codec_type": "AUTO",
        "use_remote_address": True,
        "stream_idle_timeout": f"{LONGEST_S}s",
        "request_headers_timeout": "30s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "penstock",
                    "domains": [domain] if domain == "*" else [domain, f"{domain}:*"],
                    "routes": [{"match": {"prefix": "/"}, "route": route}],
                }
            ]
        },
        "http_filters": [
            {"name": "router", "typed_config": {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"}}
        ],
    }


def _cluster(front: Front) -> dict[str, Any]:
    check_s = max(1, math.ceil(front.check_s))
    return {
        "name": "penstock",
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "lb_policy": "RING_HASH" if front.sticky_header else "LEAST_REQUEST",
        # Gateways that are not ready get nothing, however few are left.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "10s",  # a busy gateway may take a moment
                "interval": f"{check_s}s",
                "no_traffic_interval": f"{check_s}s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "http_health_check": {"path": READY, "host": "localhost"},
            }
        ],
        "load_assignment": {
            "cluster_name": "penstock",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address(gateway.host.strip("[]"), gateway.port)}}
                        for gateway in front.gateways
                    ]
                }
            ],
        },
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
