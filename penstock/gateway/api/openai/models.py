"""GET /v1/models and /v1/models/{model}"""

from __future__ import annotations

from typing import Any

from penstock.backends.embedder import Embedder
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.process.service import Service
from penstock.identity import Caller
from penstock.routing.registry import ServedModel
from penstock.routing.remotes import RemoteModel
from penstock.routing.selection.selector import RouteRules


async def list_models(service: Service, exchange: Exchange) -> None:
    adapted = (model.with_adapter(name) for model in service.registry for name in model.adapter_names)
    data = [describe(service, exchange.caller, model) for model in (*service.registry, *adapted)]
    data += [describe_remote(service, exchange.caller, remote) for remote in service.registry.remotes.values()]
    data += [describe_encoder(service, exchange.caller, embedder) for embedder in service.encoders]
    data += [describe_route(service, rules) for rules in service.routes.rules.values()]
    await exchange.reply_json({"object": "list", "data": data})


async def get_model(service: Service, exchange: Exchange) -> None:
    name = exchange.path.removeprefix("/v1/models/")
    if name in service.encoders:
        await exchange.reply_json(describe_encoder(service, exchange.caller, service.encoders.find(name)))
        return
    remote = service.registry.remote(name)
    if remote is not None:
        await exchange.reply_json(describe_remote(service, exchange.caller, remote))
        return
    if name in service.routes.rules:
        await exchange.reply_json(describe_route(service, service.routes.rules[name]))
        return
    await exchange.reply_json(describe(service, exchange.caller, service.registry.route(name).model))


def describe(service: Service, caller: Caller, model: ServedModel) -> dict[str, Any]:
    """`context_window` is the model's; what of it the caller may use is in `limits` and in `max_output_tokens`."""
    window = model.context_window
    caps = [cap for cap in (window, service.settings.max_tokens, service.quotas.context_tokens(caller)) if cap]
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.base_name,
        "parent": model.base or None,
        "aliases": list(model.aliases),
        "context_window": window,
        "max_model_len": window,
        "vocab_size": model.text.vocab_size,
        "max_output_tokens": min(caps, default=None),
        "limits": service.quotas.told(caller),
        "ready": model.backend.ready,
        "state": model.backend.state if model.backend.ready else "starting",
        "capabilities": {
            "chat": model.text.has_chat_template,
            "completions": True,
            "streaming": True,
            "logprobs": True,
            "tools": model.text.has_chat_template,
            "structured_output": True,
        },
        "pricing": {"input_per_million": model.input_price, "output_per_million": model.output_price},
    }


def describe_remote(service: Service, caller: Caller, model: RemoteModel) -> dict[str, Any]:
    """What another server runs; where that is, is not for clients."""
    window = model.context_window
    caps = [cap for cap in (window, service.settings.max_tokens) if cap]
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "remote",
        "root": model.name,
        "parent": None,
        "aliases": list(model.aliases),
        "context_window": window,
        "max_model_len": window,
        "max_output_tokens": min(caps, default=None),
        "limits": service.quotas.told(caller),
        "ready": model.ready,
        "state": "awake" if model.ready else "away",
        "capabilities": {
            "chat": True,
            "completions": False,
            "streaming": True,
            "logprobs": False,
            "tools": True,
            "structured_output": True,
        },
        "pricing": {"input_per_million": model.input_price, "output_per_million": model.output_price},
    }


def describe_encoder(service: Service, caller: Caller, embedder: Embedder) -> dict[str, Any]:
    """What is known of it; more once it has been started."""
    config, info = service.encoders.configs[embedder.name], embedder.backend.info
    scores = None if info is None else info.scores
    return {
        "id": embedder.name,
        "object": "model",
        "created": service.encoders.created,
        "owned_by": "penstock",
        "aliases": list(config.aliases),
        "context_window": None if info is None else info.max_model_len,
        "limits": service.quotas.told(caller),
        "dimensions": None if info is None or info.scores else info.dimensions,
        "ready": embedder.up,
        "state": "awake" if embedder.up else "started when asked for",
        "capabilities": {"embeddings": scores is not True, "rerank": True},
        "pricing": {"input_per_million": config.input_price},
    }


def describe_route(service: Service, rules: RouteRules) -> dict[str, Any]:
    """A name that stands for one of two models."""
    here = [
        service.registry.route(name).model
        for name in (rules.small, rules.large)
        if service.registry.remote(name) is None
    ]
    windows = [model.context_window for model in here if model.context_window is not None]
    return {
        "id": rules.name,
        "object": "model",
        "created": here[0].created if here else 0,
        "owned_by": "penstock",
        "routes_to": [rules.small, rules.large],
        "context_window": min(windows, default=None),
        "ready": all(model.backend.ready for model in here),
        "state": "on" if rules.enabled else "off",
        "capabilities": {"chat": all(model.text.has_chat_template for model in here), "completions": bool(here)},
    }
