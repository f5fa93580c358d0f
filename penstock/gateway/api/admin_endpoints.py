"""The endpoints that need an admin's key: the table of the public ones is `endpoints.py`."""

from __future__ import annotations

from penstock.gateway.api.admin.adapters import (
    AdapterLoadRequest,
    AdapterPinRequest,
    list_adapters,
    load_adapter,
    pin_adapter,
    unload_adapter,
)
from penstock.gateway.api.admin.identity import (
    KeyChange,
    KeyRequest,
    TenantChange,
    TenantRequest,
    change_key,
    change_tenant,
    create_key,
    create_tenant,
    get_tenant,
    list_keys,
    list_tenants,
    revoke_key,
)
from penstock.gateway.api.admin.models import ModelLoadRequest, admin_models, load_model, unload_model
from penstock.gateway.api.admin.replicas import (
    DrainRequest,
    RestartRequest,
    ScaleRequest,
    drain_replica,
    drain_server,
    list_replicas,
    restart_model,
    scale_model,
)
from penstock.gateway.api.admin.request_log import RequestsQuery, list_requests
from penstock.gateway.api.admin.routes import RouteSwitch, list_routes, switch_route
from penstock.gateway.api.admin.sleep import sleep_model, wake_model
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.quality.endpoints import FeedbackQuery, list_feedback
from penstock.gateway.response_cache.endpoints import AdminCacheQuery, evict_all_caches, show_all_caches
from penstock.gateway.server_tools.endpoints import list_tool_servers, register_tool_server, remove_tool_server
from penstock.tools.execution.specs import ToolSpec

ADMIN = (
    Endpoint("GET", "/v1/admin/tools", list_tool_servers, "Every tool server.", "Admin", scope="admin"),
    Endpoint(
        "POST", "/v1/admin/tools", register_tool_server, "Register a tool server.", "Admin", ToolSpec, scope="admin"
    ),
    Endpoint("DELETE", "/v1/admin/tools/{name}", remove_tool_server, "Remove one.", "Admin", scope="admin"),
    Endpoint(
        "GET", "/v1/admin/cache", show_all_caches, "Cached answers.", "Admin", scope="admin", query=AdminCacheQuery
    ),
    Endpoint(
        "DELETE", "/v1/admin/cache", evict_all_caches, "Forget them.", "Admin", scope="admin", query=AdminCacheQuery
    ),
    Endpoint("GET", "/v1/admin/adapters", list_adapters, "Every LoRA adapter and its state.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/adapters",
        load_adapter,
        "Load an adapter, or load it again.",
        "Admin",
        AdapterLoadRequest,
        scope="admin",
    ),
    Endpoint(
        "PATCH",
        "/v1/admin/adapters/{name:path}",
        pin_adapter,
        "Pin or unpin an adapter.",
        "Admin",
        AdapterPinRequest,
        scope="admin",
    ),
    Endpoint("DELETE", "/v1/admin/adapters/{name:path}", unload_adapter, "Unload an adapter.", "Admin", scope="admin"),
    Endpoint("GET", "/v1/admin/models", admin_models, "Models, and those being loaded.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/models", load_model, "Serve one more model.", "Admin", ModelLoadRequest, scope="admin"),
    Endpoint("DELETE", "/v1/admin/models/{model:path}", unload_model, "Serve it no more.", "Admin", scope="admin"),
    Endpoint(
        "POST", "/v1/admin/models/{model:path}/sleep", sleep_model, "Free a model's memory.", "Admin", scope="admin"
    ),
    Endpoint("POST", "/v1/admin/models/{model:path}/wake", wake_model, "Load it again.", "Admin", scope="admin"),
    Endpoint("GET", "/v1/admin/routes", list_routes, "What each route does.", "Admin", scope="admin"),
    Endpoint(
        "PATCH",
        "/v1/admin/routes/{route}",
        switch_route,
        "Turn a route off or on, or change its share.",
        "Admin",
        RouteSwitch,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/replicas", list_replicas, "The engines behind every model.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/scale",
        scale_model,
        "Run more or fewer replicas of a model.",
        "Admin",
        ScaleRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/restart",
        restart_model,
        "Drain and start again, one replica after the other.",
        "Admin",
        RestartRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/drain",
        drain_replica,
        "Let a replica finish what it runs and stop.",
        "Admin",
        DrainRequest,
        scope="admin",
    ),
    Endpoint("POST", "/v1/admin/drain", drain_server, "Finish what runs and stop.", "Admin", scope="admin"),
    Endpoint(
        "GET",
        "/v1/admin/feedback",
        list_feedback,
        "What users think of answers.",
        "Admin",
        query=FeedbackQuery,
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/requests",
        list_requests,
        "The newest requests.",
        "Admin",
        query=RequestsQuery,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/tenants", list_tenants, "The tenants there are.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/tenants", create_tenant, "Make a tenant.", "Admin", TenantRequest, scope="admin"),
    Endpoint(
        "PATCH", "/v1/admin/tenants/{tenant}", change_tenant, "Change a tenant.", "Admin", TenantChange, scope="admin"
    ),
    Endpoint(
        "GET", "/v1/admin/tenants/{tenant}", get_tenant, "A tenant, its limits, what it spent.", "Admin", scope="admin"
    ),
    Endpoint("GET", "/v1/admin/keys", list_keys, "The keys there are, without their secrets.", "Admin", scope="admin"),
    Endpoint("POST", "/v1/admin/keys", create_key, "Make a key.", "Admin", KeyRequest, scope="admin"),
    Endpoint("PATCH", "/v1/admin/keys/{key}", change_key, "Change a key.", "Admin", KeyChange, scope="admin"),
    Endpoint("DELETE", "/v1/admin/keys/{key}", revoke_key, "Revoke a key.", "Admin", scope="admin"),
)
