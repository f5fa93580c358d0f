"""What is served, as Ollama describes models: names, sizes, families, capabilities."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.gateway.generation.model_routes import Routes
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.thoughts import style_of
from penstock.identity import Caller
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel

if TYPE_CHECKING:
    from penstock.planning.shape import ModelShape

LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
"""When a loaded model is unloaded by itself."""


class Catalogue:
    """The models, adapters, remotes, routes and encoders under Ollama's names."""

    def __init__(self, registry: ModelRegistry, permissions: Permissions, encoders: Encoders, routes: Routes) -> None:
        self._registry = registry
        self._permissions = permissions
        self._encoders = encoders
        self._routes = routes
        self._shapes: dict[str, ModelShape | None] = {}

    def resolve(self, caller: Caller, name: str) -> str:
        """A name as this server knows it: `:latest`, which clients add by themselves, may be left out."""
        short = name.removesuffix(LATEST)
        return short if short != name and not self.knows(caller, name) else name

    def knows(self, caller: Caller, name: str) -> bool:
        """Whether anything of this name exists for a caller."""
        return self._permissions.exists(caller, name) or self._encoders.allows(caller.access, name)

    async def tags(self, caller: Caller) -> list[dict[str, Any]]:
        """Everything a client can name."""
        found = []
        for model in self._registry:
            for each in (model, *model.adapted(caller.access)):
                if each.allowed(caller.access):
                    found.append(self._entry(each.name, each.created, await self._details(each), _size(model)))
        for remote in self._registry.remotes.values():
            if remote.allowed(caller.access):
                found.append(self._entry(remote.name, remote.created, _details("remote")))
        for rules in self._routes.rules.values():
            if self._permissions.exists(caller, rules.name):
                found.append(self._entry(rules.name, self._encoders.created, _details("route")))
        for embedder in self._encoders.allowed(caller.access):
            info = embedder.backend.info
            size = 0 if info is None else info.weight_bytes
            found.append(self._entry(embedder.name, self._encoders.created, _details("bert"), size))
        return found

    async def running(self, caller: Caller) -> list[dict[str, Any]]:
        """The models that are in memory."""
        found = []
        for model in self._registry:
            info = model.backend.info
            if info is None or not model.backend.ready or not model.allowed(caller.access):
                continue
            size = _size(model)
            entry = self._entry(model.name, model.created, await self._details(model), size)
            del entry["modified_at"]
            on_cpu = info.device.startswith("cpu")
            entry |= {
                "expires_at": NEVER,
                "size_vram": 0 if on_cpu else size,
                "context_length": info.max_model_len,
            }
            found.append(entry)
        return found

    async def show(self, caller: Caller, name: str) -> dict[str, Any]:
        """One model in detail."""
        name = self.resolve(caller, name)
        about: dict[str, Any]
        if not self.knows(caller, name):
            raise self._permissions.unknown(caller, name)
        if self._encoders.allows(caller.access, name):
            embedder = self._encoders.find(name)
            info = embedder.backend.info
            about = {"general.architecture": "bert"}
            if info is not None:
                about |= {"bert.context_length": info.max_model_len, "bert.embedding_length": info.dimensions}
            return _shown(_details("bert"), about, ["embedding"], self._encoders.created)
        if name in self._routes.rules:
            return _shown(_details("route"), {"general.architecture": "route"}, ["completion"], self._encoders.created)
        remote = self._registry.remote(name)
        if remote is not None:
            about = {"general.architecture": "remote"}
            if remote.context_window is not None:
                about["remote.context_length"] = remote.context_window
            able = (
                ["embedding"]
                if remote.kind != "chat"
                else ["completion", *(["tools"] if remote.supports("tools") else [])]
            )
            return _shown(_details("remote"), about, able, remote.created)
        await self._registry.prepare(name)
        model = self._registry.route(name).model
        shape = await self._shape(model)
        family = "unknown" if shape is None else shape.family
        about = {"general.architecture": family, "general.basename": model.base_name}
        if model.context_window is not None:
            about[f"{family}.context_length"] = model.context_window
        if shape is not None:
            about |= {
                "general.parameter_count": shape.parameters,
                f"{family}.block_count": shape.layers,
                f"{family}.embedding_length": shape.hidden,
                f"{family}.attention.head_count": shape.heads,
                f"{family}.attention.head_count_kv": shape.kv_heads,
                f"{family}.vocab_size": shape.vocab,
            }
        capabilities = ["completion", *(["tools"] if model.text.has_chat_template else [])]
        if model.text.infill is not None:
            capabilities.append("insert")
        if style_of(model) is not None:
            capabilities.append("thinking")
        shown = _shown(await self._details(model), about, capabilities, model.created)
        shown["template"] = model.text.template_source
        return shown

    async def model(self, caller: Caller, name: str) -> ServedModel | None:
        """A model that runs here, by its resolved name; None: it runs elsewhere, or is a route."""
        if not self._permissions.exists(caller, name):
            raise self._permissions.unknown(caller, name)
        if name in self._routes.rules or self._registry.remote(name) is not None:
            return None
        await self._registry.prepare(name)
        return self._registry.route(name).model

    def _entry(self, name: str, created: int, details: dict[str, Any], size: int = 0) -> dict[str, Any]:
        return {
            "name": name,
            "model": name,
            "modified_at": _time(created),
            "size": size,
            "digest": hashlib.sha256(f"{name}\0{created}".encode()).hexdigest(),
            "details": details,
        }

    async def _details(self, model: ServedModel) -> dict[str, Any]:
        shape, info = await self._shape(model), model.backend.info
        details = _details("unknown" if shape is None else shape.family)
        details["parent_model"] = model.base
        details["format"] = "gguf" if model.source.endswith(".gguf") else "safetensors"
        if shape is not None:
            details["parameter_size"] = _in_words(shape.parameters)
        if info is not None:
            details["quantization_level"] = info.dtype
        return details

    async def _shape(self, model: ServedModel) -> ModelShape | None:
        """The dimensions of a model, where its files are on this machine; read once."""
        if model.source and model.source not in self._shapes:
            self._shapes[model.source] = await asyncio.to_thread(_read_shape, model.source)
        return self._shapes.get(model.source)


def _read_shape(source: str) -> ModelShape | None:
    from penstock.planning.model_shape import model_shape
    from penstock.sources.resolve import cached

    try:
        here = cached(source)
        return None if here is None else model_shape(here)
    except (PenstockError, OSError, ValueError):
        return None


def _size(model: ServedModel) -> int:
    info = model.backend.info
    return 0 if info is None else info.weight_bytes * info.ranks


def _details(family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _shown(details: dict[str, Any], about: dict[str, Any], capabilities: list[str], created: int) -> dict[str, Any]:
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details,
        "model_info": about,
        "capabilities": capabilities,
        "modified_at": _time(created),
    }


def _in_words(parameters: int) -> str:
    """`135M`, `8.0B`."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def _time(seconds: int) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")
