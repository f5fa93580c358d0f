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
from penstock.gateway.webhooks.operator_endpoints import (
    OperatorWebhookChange,
    OperatorWebhookEndpoints,
    OperatorWebhooksQuery,
    OperatorWebhookTest,
    ResendRequest,
)

_ADMIN = "/v1/admin/webhooks"
_ADMIN_ONE = f"{_ADMIN}/{{webhook_endpoint}}"
_ONE = "/v1/webhook_endpoints/{webhook_endpoint}"
_TAG = "Webhooks"
WEBHOOK_ADMIN = (
    Endpoint(
        "GET",
        _ADMIN,
        OperatorWebhookEndpoints.list_all_webhooks,
        "The webhook endpoints of all tenants, and how deliveries to them go.",
        "Admin",
        query=OperatorWebhooksQuery,
        scope="admin",
    ),
    Endpoint(
        "GET",
        _ADMIN_ONE,
        OperatorWebhookEndpoints.show_webhook,
        "A webhook endpoint, with what it was not told of yet.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "PATCH",
        _ADMIN_ONE,
        OperatorWebhookEndpoints.change_webhook,
        "Disable or enable a webhook endpoint.",
        "Admin",
        OperatorWebhookChange,
        scope="admin",
    ),
    Endpoint(
        "DELETE",
        _ADMIN_ONE,
        OperatorWebhookEndpoints.delete_webhook,
        "Delete a webhook endpoint.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        f"{_ADMIN_ONE}/test",
        OperatorWebhookEndpoints.test_webhook,
        "Send an example to a webhook endpoint.",
        "Admin",
        OperatorWebhookTest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        f"{_ADMIN_ONE}/resend",
        OperatorWebhookEndpoints.resend_webhook,
        "Send what a webhook endpoint was not told of now.",
        "Admin",
        ResendRequest,
        scope="admin",
    ),
)
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
