"""The table of the endpoints that need the scope `admin`; `endpoints.py` has the others."""

from __future__ import annotations

from penstock.gateway.api.admin.adapters import AdapterEndpoints, AdapterLoadRequest, AdapterPinRequest
from penstock.gateway.api.admin.identity import IdentityEndpoints, KeyChange, KeyRequest, TenantChange, TenantRequest
from penstock.gateway.api.admin.models import ModelAdminEndpoints, ModelLoadRequest
from penstock.gateway.api.admin.plan import PlanEndpoints, PlanQuery
from penstock.gateway.api.admin.replicas import DrainRequest, ReplicaEndpoints, RestartRequest, ScaleRequest
from penstock.gateway.api.admin.request_log import RequestLogEndpoints, RequestsQuery
from penstock.gateway.api.admin.routes import RouteEndpoints, RouteSwitch
from penstock.gateway.api.admin.sleep import SleepEndpoints
from penstock.gateway.api.admin.what_if import WhatIfEndpoints, WhatIfRequest
from penstock.gateway.app.endpoint import Endpoint
from penstock.gateway.quality.endpoints import FeedbackEndpoints, FeedbackQuery
from penstock.gateway.response_cache.endpoints import AdminCacheQuery, CacheEndpoints
from penstock.gateway.server_tools.endpoints import ToolEndpoints
from penstock.tools.execution.specs import ToolSpec

ADMIN = (
    Endpoint(
        "GET",
        "/v1/admin/plan",
        PlanEndpoints.show_plan,
        "Headroom, when a model is full, and what the next replica costs.",
        "Admin",
        query=PlanQuery,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/plan",
        WhatIfEndpoints.what_if,
        "Hardware, latency and cost for another load.",
        "Admin",
        WhatIfRequest,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/tools", ToolEndpoints.list_tool_servers, "Every tool server.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/tools",
        ToolEndpoints.register_tool_server,
        "Register a tool server.",
        "Admin",
        ToolSpec,
        scope="admin",
    ),
    Endpoint(
        "DELETE",
        "/v1/admin/tools/{name}",
        ToolEndpoints.remove_tool_server,
        "Remove a tool server.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/cache",
        CacheEndpoints.show_all_caches,
        "Cached answers.",
        "Admin",
        scope="admin",
        query=AdminCacheQuery,
    ),
    Endpoint(
        "DELETE",
        "/v1/admin/cache",
        CacheEndpoints.evict_all_caches,
        "Delete cached answers.",
        "Admin",
        scope="admin",
        query=AdminCacheQuery,
    ),
    Endpoint(
        "GET",
        "/v1/admin/adapters",
        AdapterEndpoints.list_adapters,
        "Every LoRA adapter and its state.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/adapters",
        AdapterEndpoints.load_adapter,
        "Load an adapter, or load it again.",
        "Admin",
        AdapterLoadRequest,
        scope="admin",
    ),
    Endpoint(
        "PATCH",
        "/v1/admin/adapters/{name:path}",
        AdapterEndpoints.pin_adapter,
        "Pin or unpin an adapter.",
        "Admin",
        AdapterPinRequest,
        scope="admin",
    ),
    Endpoint(
        "DELETE",
        "/v1/admin/adapters/{name:path}",
        AdapterEndpoints.unload_adapter,
        "Unload an adapter.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/models",
        ModelAdminEndpoints.admin_models,
        "Models, and those being loaded.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models",
        ModelAdminEndpoints.load_model,
        "Load a model.",
        "Admin",
        ModelLoadRequest,
        scope="admin",
    ),
    Endpoint(
        "DELETE",
        "/v1/admin/models/{model:path}",
        ModelAdminEndpoints.unload_model,
        "Unload a model.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/sleep",
        SleepEndpoints.sleep_model,
        "Put a model to sleep.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/wake",
        SleepEndpoints.wake_model,
        "Wake a model.",
        "Admin",
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/routes", RouteEndpoints.list_routes, "List routes.", "Admin", scope="admin"),
    Endpoint(
        "PATCH",
        "/v1/admin/routes/{route}",
        RouteEndpoints.switch_route,
        "Turn a route off or on, or change its share.",
        "Admin",
        RouteSwitch,
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/replicas",
        ReplicaEndpoints.list_replicas,
        "The engines behind every model.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/scale",
        ReplicaEndpoints.scale_model,
        "Run more or fewer replicas of a model.",
        "Admin",
        ScaleRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/restart",
        ReplicaEndpoints.restart_model,
        "Restart replicas one after the other, draining each.",
        "Admin",
        RestartRequest,
        scope="admin",
    ),
    Endpoint(
        "POST",
        "/v1/admin/models/{model:path}/drain",
        ReplicaEndpoints.drain_replica,
        "Drain and stop a replica.",
        "Admin",
        DrainRequest,
        scope="admin",
    ),
    Endpoint(
        "POST", "/v1/admin/drain", ReplicaEndpoints.drain_server, "Drain and stop the server.", "Admin", scope="admin"
    ),
    Endpoint(
        "GET",
        "/v1/admin/feedback",
        FeedbackEndpoints.list_feedback,
        "Ratings of answers.",
        "Admin",
        query=FeedbackQuery,
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/requests",
        RequestLogEndpoints.list_requests,
        "The newest requests.",
        "Admin",
        query=RequestsQuery,
        scope="admin",
    ),
    Endpoint("GET", "/v1/admin/tenants", IdentityEndpoints.list_tenants, "List tenants.", "Admin", scope="admin"),
    Endpoint(
        "POST",
        "/v1/admin/tenants",
        IdentityEndpoints.create_tenant,
        "Create a tenant.",
        "Admin",
        TenantRequest,
        scope="admin",
    ),
    Endpoint(
        "PATCH",
        "/v1/admin/tenants/{tenant}",
        IdentityEndpoints.change_tenant,
        "Change a tenant.",
        "Admin",
        TenantChange,
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/tenants/{tenant}",
        IdentityEndpoints.get_tenant,
        "A tenant with its limits and spending.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "GET",
        "/v1/admin/keys",
        IdentityEndpoints.list_keys,
        "List keys, without their secrets.",
        "Admin",
        scope="admin",
    ),
    Endpoint(
        "POST", "/v1/admin/keys", IdentityEndpoints.create_key, "Create a key.", "Admin", KeyRequest, scope="admin"
    ),
    Endpoint(
        "PATCH",
        "/v1/admin/keys/{key}",
        IdentityEndpoints.change_key,
        "Change a key.",
        "Admin",
        KeyChange,
        scope="admin",
    ),
    Endpoint("DELETE", "/v1/admin/keys/{key}", IdentityEndpoints.revoke_key, "Revoke a key.", "Admin", scope="admin"),
)
