"""The endpoints of webhooks, as a part of the table."""

from __future__ import annotations

from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.webhooks.endpoints import (
    RotateSecretRequest,
    WebhookEndpointChange,
    WebhookEndpointRequest,
    WebhookEndpoints,
    WebhookEndpointsQuery,
    WebhookTestRequest,
)

_ONE = "/v1/webhook_endpoints/{webhook_endpoint}"
_TAG = "Webhooks"
WEBHOOKS = (
    Endpoint(
        "POST",
        "/v1/webhook_endpoints",
        WebhookEndpoints.create_webhook_endpoint,
        "Register a URL that is told of events.",
        _TAG,
        WebhookEndpointRequest,
    ),
    Endpoint(
        "GET",
        "/v1/webhook_endpoints",
        WebhookEndpoints.list_webhook_endpoints,
        "List webhook endpoints.",
        _TAG,
        query=WebhookEndpointsQuery,
    ),
    Endpoint("GET", _ONE, WebhookEndpoints.get_webhook_endpoint, "A webhook endpoint.", _TAG),
    Endpoint(
        "POST", _ONE, WebhookEndpoints.update_webhook_endpoint, "Change an endpoint.", _TAG, WebhookEndpointChange
    ),
    Endpoint("DELETE", _ONE, WebhookEndpoints.delete_webhook_endpoint, "Delete a webhook endpoint.", _TAG),
    Endpoint(
        "POST",
        f"{_ONE}/rotate_secret",
        WebhookEndpoints.rotate_webhook_secret,
        "A new secret for an endpoint.",
        _TAG,
        RotateSecretRequest,
    ),
    Endpoint(
        "POST", f"{_ONE}/test", WebhookEndpoints.test_webhook_endpoint, "Send an example.", _TAG, WebhookTestRequest
    ),
    Endpoint(
        "GET",
        "/v1/webhook_event_types",
        WebhookEndpoints.list_webhook_event_types,
        "The events that endpoints can be told of.",
        _TAG,
    ),
)
