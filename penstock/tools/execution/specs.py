"""Descriptions of tool servers, from the configuration or stored through the admin API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from penstock.config.context import VARIABLE, ToolServerConfig
from penstock.config.labels import MOST_LABELS, label_problem
from penstock.errors import ConfigError
from penstock.identity.labels import OF_OWN, OF_REMOTES, Labels
from penstock.storage import Database
from penstock.tools.execution.addresses import Addresses
from penstock.tools.execution.base import ToolError, ToolServer
from penstock.tools.execution.http import HttpTools
from penstock.tools.execution.mcp import McpTools, stdio, streamable_http

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_VERSIONS = (
    (
        "CREATE TABLE IF NOT EXISTS tool_servers (name TEXT PRIMARY KEY, spec TEXT NOT NULL, "
        "created_at DOUBLE PRECISION NOT NULL)",
    ),
)
NAME = "[a-zA-Z0-9_-]{1,64}"


class ToolSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The body of POST /v1/admin/tools, as it is stored."""

    name: Annotated[str, Meta(pattern=f"^{NAME}$")]
    tenants: Annotated[list[str], Meta(max_length=1024)] = []
    """Tenants that may use it; empty: all."""
    labels: Annotated[dict[str, str | bool], Meta(max_length=MOST_LABELS)] = {}
    """For data rules; `external` is true unless given here."""
    openapi: dict[str, Any] | None = None
    """An HTTP API: an OpenAPI document, or the relevant part of one."""
    url: Annotated[str, Meta(max_length=2048)] = ""
    """Base URL of the API; empty: the document's first server."""
    mcp_url: Annotated[str, Meta(max_length=2048)] = ""
    """URL of an MCP server over HTTP."""
    headers: Annotated[dict[str, Annotated[str, Meta(max_length=4096)]], Meta(max_length=32)] = {}
    """Headers sent with every call, such as credentials. Never shown."""
    allow: Annotated[list[str], Meta(max_length=1024)] = []
    """Functions that may be called; empty: all."""
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 15.0
    max_bytes: Annotated[int, Meta(ge=256, le=2**24)] = 32 * 1024

    def described(self) -> dict[str, Any]:
        """The description without secrets."""
        kind = "mcp" if self.mcp_url else "http"
        shown = {"name": self.name, "object": "tool_server", "kind": kind, "tenants": list(self.tenants)}
        return {
            **shown,
            "url": self.mcp_url or self.url or None,
            "headers": sorted(self.headers),
            "allow": self.allow,
            "labels": dict(self.tool_labels),
        }

    @property
    def tool_labels(self) -> Labels:
        """What data rules ask for."""
        own = {name: _label(value) for name, value in self.labels.items()}
        return Labels(own).over(OF_REMOTES)

    def server(self, addresses: Addresses) -> ToolServer:
        """The tool server; `ToolError` when the description is invalid."""
        for name, given in self.labels.items():
            if problem := label_problem(name, _label(given)):
                raise ToolError(problem)
        if (self.openapi is None) == (not self.mcp_url):
            raise ToolError("a tool server needs either `openapi` or `mcp_url`")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                raise ToolError(f"the header {name[:64]!r} or its value has characters that HTTP headers cannot carry")
        if self.openapi is not None:
            return HttpTools(
                self.openapi,
                url=self.url,
                headers=self.headers,
                addresses=addresses,
                timeout_s=self.timeout_s,
                most_bytes=self.max_bytes,
            )
        timeout_s, most_bytes = self.timeout_s, self.max_bytes
        connect = streamable_http(self.mcp_url, self.headers, addresses, timeout_s=timeout_s, most_bytes=most_bytes)
        return McpTools(self.name, connect, timeout_s=timeout_s, most_bytes=most_bytes)


def _label(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"


def of_config(config: ToolServerConfig, environ: Mapping[str, str] = os.environ) -> ToolSpec:
    """A description from the configuration. Headers may name environment variables, so that files hold no secrets."""
    headers: dict[str, str] = {}
    for line in config.headers:
        name, colon, value = line.partition(":")
        if not colon:
            raise ConfigError(f"tool_servers: {config.name}: a header must be written as `Name: value`")
        headers[name.strip()] = _expanded(value.strip(), environ, config.name)
    try:
        return ToolSpec(
            name=config.name,
            tenants=list(config.tenants),
            labels=dict(Labels(config.labels).over(OF_OWN if config.command else OF_REMOTES)),
            openapi=_document(config) if config.openapi else None,
            url=config.url,
            mcp_url=config.mcp_url,
            headers=headers,
            allow=list(config.allow),
            timeout_s=config.timeout_s,
            max_bytes=config.max_bytes,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"tool_servers: {config.name}: {error}") from error


def server_of(config: ToolServerConfig, spec: ToolSpec, addresses: Addresses) -> ToolServer:
    """The tool server of a configuration entry, which, unlike the admin API, may also start a process."""
    if not re.fullmatch(NAME, config.name):
        raise ConfigError(
            f"tool_servers: {config.name!r} is not a valid name: use letters, digits, `_` and `-`, at most 64"
        )
    if sum(map(bool, (config.openapi, config.mcp_url, config.command))) != 1:
        raise ConfigError(f"tool_servers: {config.name}: give one of openapi, mcp_url, command")
    try:
        if not config.command:
            return spec.server(addresses)
        env = {name: _expanded(f"${{{name}}}", os.environ, config.name) for name in config.env}
        return McpTools(
            config.name, stdio(config.command, env), timeout_s=config.timeout_s, most_bytes=config.max_bytes
        )
    except ToolError as error:
        raise ConfigError(f"tool_servers: {config.name}: {error}") from error


def _document(config: ToolServerConfig) -> dict[str, Any]:
    text = config.openapi
    if file := config.openapi_file:
        try:
            text = Path(file).read_text()
        except OSError as error:
            raise ConfigError(f"tool_servers: {config.name}: {error}") from error
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"tool_servers: {config.name}: the OpenAPI document is not YAML or JSON") from error
    if not isinstance(document, dict):
        raise ConfigError(f"tool_servers: {config.name}: the OpenAPI document is not a mapping")
    return document


def _expanded(text: str, environ: Mapping[str, str], name: str) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in environ:
            raise ConfigError(f"tool_servers: {name}: the environment variable {match[1]} is not set")
        return environ[match[1]]

    return VARIABLE.sub(value, text)


_decoder = msgspec.json.Decoder(ToolSpec)


class ToolSpecStore:
    """Tool servers registered through the admin API."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def prepare(self) -> None:
        await self._database.migrate("tool_servers", _VERSIONS)

    async def all(self) -> list[ToolSpec]:
        rows = await self._database.fetch("SELECT spec FROM tool_servers ORDER BY name")
        return [_decoder.decode(str(spec)) for (spec,) in rows]

    async def put(self, spec: ToolSpec, now: float) -> None:
        await self._database.execute(
            "INSERT INTO tool_servers (name, spec, created_at) VALUES (?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET spec = excluded.spec, created_at = excluded.created_at",
            spec.name, msgspec.json.encode(spec).decode(), now,
        )  # fmt: skip

    async def delete(self, name: str) -> bool:
        return await self._database.execute("DELETE FROM tool_servers WHERE name = ?", name) > 0
