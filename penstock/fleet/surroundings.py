"""What a configuration needs beside itself, for whoever runs it in containers: variables, files and servers of this
machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from penstock.config import Config
from penstock.config.models import ModelConfig
from penstock.protocol.address import is_loopback

_OBJECT_STORE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def credentials(config: Config) -> tuple[str, ...]:
    """Environment variables that the configuration names for keys of other servers."""
    named = [remote.key_env for remote in config.remotes]
    if any(remote.dialect == "bedrock" and not remote.key_env and not remote.key_file for remote in config.remotes):
        named += ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"]
    named += [rule.key_env for rule in config.guardrails]
    named += [variable for server in config.tool_servers for variable in server.env]
    return tuple(dict.fromkeys(filter(None, named)))


def source_variables(sources: Iterable[str]) -> tuple[str, ...]:
    """Environment variables with credentials for where models come from; public ones need none of them."""
    kinds = {source.partition(":")[0] for source in sources}
    return (*(["HF_TOKEN"] if "hf" in kinds else []), *(_OBJECT_STORE if "s3" in kinds else ()))


def files(config: Config) -> Iterator[tuple[str, str]]:
    """Settings of gateways that name a file, and its path."""
    yield "watermark.secret_file", config.watermark.secret_file
    for index, remote in enumerate(config.remotes):
        yield f"remotes[{index}].key_file", remote.key_file
        if remote.tokenizer and is_local(remote.tokenizer):
            yield f"remotes[{index}].tokenizer", remote.tokenizer
    for index, server in enumerate(config.tool_servers):
        yield f"tool_servers[{index}].openapi", server.openapi_file


def sources(model: ModelConfig) -> list[str]:
    """Of the model, its draft model and its adapters."""
    return [model.source, *filter(None, [model.draft_model]), *(adapter.source for adapter in model.adapters)]


def is_local(source: str) -> bool:
    """Whether a model is a file or folder of this machine."""
    from penstock.sources.resolve import ALIASES

    return source not in ALIASES and not source.startswith(("hf:", "pypi:", "s3://"))


def servers_on_this_machine(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that name a server on the loopback interface, which is another one in every container, and its host."""
    for index, remote in enumerate(config.remotes):
        yield from _loopback(f"remotes[{index}].urls", *remote.urls)
    for index, rule in enumerate(config.guardrails):
        yield from _loopback(f"guardrails[{index}].url", rule.url)
    for index, server in enumerate(config.tool_servers):
        yield from _loopback(f"tool_servers[{index}].url", server.url)
        yield from _loopback(f"tool_servers[{index}].mcp_url", server.mcp_url)


def _loopback(setting: str, *urls: str) -> Iterator[tuple[str, str]]:
    for url in urls:
        host = urlsplit(url).hostname or ""
        if host and is_loopback(host):
            yield setting, host
