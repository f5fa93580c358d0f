"""A gateway where everything a client can name is there twice, once open to all and once for one tenant only.

Names that only `acme` may use begin with `hidden-`, so that a leak is easy to find in any reply. `rival` is another
tenant, `narrow` a key of acme itself that may use less than its tenant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.upstream import Upstream
from penstock.config.access import AllowConfig
from penstock.config.cache import CacheConfig
from penstock.config.context import ToolsConfig
from penstock.config.encoders import EncoderConfig
from penstock.config.guardrails import GuardrailConfig
from penstock.config.routing import RouteConfig
from penstock.config.schema import DEFAULT_TIERS, RequestLogConfig
from penstock.config.watermark import WatermarkConfig
from penstock.config.webhooks import WebhooksConfig
from penstock.engine.request import Request
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving
from tests.scripted import ScriptedEngine
from tests.tools.execution.parts import LOOPBACK, WeatherServer

OPEN = ["tiny", "open-route", "minilm"]
"""What every tenant may use."""
NOTHING_HIDDEN = {"models": OPEN, "adapters": [], "remotes": [], "collections": ["open-*"], "tools": ["open-tool"]}
EVERYTHING = AllowConfig(models=("*", "hidden-model"), tools=("*", "hidden-tool"))
"""What the tiers may use: a list that names what is hidden from some of their tenants."""
HELLO = [{"role": "user", "content": "hi"}]


@dataclass
class World:
    running: Running
    secret: ScriptedEngine
    """The engine of `hidden-model`."""
    keys: dict[str, str] = field(default_factory=dict)
    """By caller: admin, acme, narrow, rival."""

    @property
    def asked(self) -> list[Request]:
        """What the hidden model was asked, other than for its health."""
        return [request for request in self.secret.seen if not request.request_id.startswith("ready:")]

    async def ask(self, who: str, method: str, path: str, **request: Any) -> httpx.Response:
        """A request with an id that is always the same, because errors may quote it."""
        headers = {"x-request-id": "fixed", **request.pop("headers", {})}
        if self.keys.get(who):
            headers["authorization"] = f"Bearer {self.keys[who]}"
        return await self.running.client.request(method, path, headers=headers, **request)

    async def ok(self, who: str, method: str, path: str, **request: Any) -> dict[str, Any]:
        reply = await self.ask(who, method, path, **request)
        assert reply.status_code == 200, (method, path, reply.text)
        return dict(reply.json())

    async def chat(self, who: str, model: str, **body: Any) -> httpx.Response:
        return await self.ask(who, "POST", "/v1/chat/completions", json={"model": model, "messages": HELLO, **body})


def _secret(text: TextModel) -> Callable[[Request], list[int]]:
    """Answers; as a moderator it says no, as a judge yes."""

    def reply(request: Request) -> list[int]:
        asked = text.decode(request.prompt)
        said = "no" if "You moderate texts" in asked else "yes" if "You check answers" in asked else "A secret."
        return [*text.encode(said), text.eos_token_ids[0]]

    return reply


def _watermark_secret(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watermark.secret").write_text("ab" * 32)
    return str(folder / "watermark.secret")


def remote(name: str, port: int) -> RemoteModel:
    upstream = Upstream(f"http://127.0.0.1:{port}/v1", "tiny", timeout_s=60.0)
    return RemoteModel(name, [RemoteServer(name, upstream)], aliases=(f"{name}-alias",))


def encoders(endpoint: str) -> Encoders:
    names = ("hidden-encoder", "minilm")
    embedders = [Embedder(name, "minilm", EncoderBackend(endpoint), wait_s=10) for name in names]
    return Encoders(embedders, [EncoderConfig(name=name) for name in names])


@asynccontextmanager
async def world(
    serving: Serving, text: TextModel, folder: Path, endpoint: str = "", api: WeatherServer | None = None, **more: Any
) -> AsyncIterator[World]:
    """`endpoint`: of an encoder, where one is needed; `api`: of tools."""
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serving(time_limit_s=None))
        secret = ScriptedEngine(text, _secret(text), max_model_len=4096)
        hidden = ServedModel(
            "hidden-model",
            text,
            InProcessBackend(secret),
            aliases=("hidden-alias",),
            adapters=("hidden-adapter",),
            adapter_owners={"hidden-adapter": "acme"},
        )
        if endpoint:
            more["encoders"] = encoders(endpoint)
        if api is not None:
            servers = (api.config(name="hidden-tool"), api.config(name="open-tool", allow=("get_weather",)))
            more |= {"tools": ToolsConfig(networks=LOOPBACK), "tool_servers": servers}
        settings: dict[str, Any] = {
            "webhooks": WebhooksConfig(enabled=True),
            "store_url": f"sqlite:///{folder / 'state.db'}",
            "default_tier": "standard",
            "tiers": tuple(dataclasses.replace(tier, allow=EVERYTHING) for tier in DEFAULT_TIERS),
            "key_fresh_s": 0.05,
            "routes": (
                RouteConfig(name="hidden-route", small="tiny", large="hidden-model"),
                RouteConfig(name="open-route", small="tiny", large="hidden-model", default="large"),
            ),
            "cache": CacheConfig(exact="on"),
            "request_log": RequestLogConfig(flush_s=0.01),
            "watermark": WatermarkConfig(secret_file=_watermark_secret(folder)),
            "guardrails": (
                GuardrailConfig(
                    name="hidden-rule", kind="model", model="hidden-model", tenants=("acme",), on_error="allow"
                ),
                GuardrailConfig(name="open-rule", words=("hunter2",)),
            ),
            **more,
        }
        engine = settings.pop("engine", None) or ScriptedEngine(text, max_model_len=4096)
        others = [remote("hidden-remote", behind.port)]
        running = await stack.enter_async_context(serving(engine, others=others, more=[hidden], **settings))
        it = World(running, secret)
        await _people(it)
        yield it


async def _people(it: World) -> None:
    await it.ok("", "POST", "/v1/admin/tenants", json={"id": "acme"})
    await it.ok("", "POST", "/v1/admin/tenants", json={"id": "rival", "allow": NOTHING_HIDDEN})
    wanted: dict[str, dict[str, Any]] = {
        "admin": {"tenant": "acme", "scopes": ["admin"]},
        "acme": {"tenant": "acme"},
        "narrow": {"tenant": "acme", "allow": NOTHING_HIDDEN},
        "rival": {"tenant": "rival"},
    }
    for name, body in wanted.items():
        it.keys[name] = (await it.ok("admin", "POST", "/v1/admin/keys", json=body))["key"]
