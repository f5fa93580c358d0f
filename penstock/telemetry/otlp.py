"""OTLP endpoint, headers and resource attributes, shared by traces and metrics. Needs the extra `otel`."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Literal

import penstock
from penstock.config.schema import TelemetryConfig
from penstock.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

_INSTANCE = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
"""Each process reports its own values; the backend adds them up."""


def address(config: TelemetryConfig, signal: Literal["traces", "metrics"]) -> tuple[str, dict[str, str]]:
    """The URL of a signal, and the headers to send."""
    headers = dict(entry.split("=", 1) for entry in config.otlp_headers if "=" in entry)
    if len(headers) != len(config.otlp_headers):
        raise ConfigError("telemetry.otlp_headers: write each as NAME=VALUE, each name once")
    base = config.otlp_endpoint.rstrip("/").removesuffix("/v1/traces")
    if not base.startswith(("http://", "https://")):
        raise ConfigError("telemetry.otlp_endpoint: write it as http://HOST:PORT or https://HOST:PORT")
    return f"{base}/v1/{signal}", headers


def check_library() -> None:
    try:
        import opentelemetry.exporter.otlp.proto.http
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"telemetry.otlp_endpoint {needs_extra('otel')}") from error


def resource(config: TelemetryConfig) -> Resource:
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": config.service_name,
            "service.version": penstock.__version__,
            "service.instance.id": _INSTANCE,
        }
    )


def scope() -> InstrumentationScope:
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    return InstrumentationScope("penstock", penstock.__version__)
