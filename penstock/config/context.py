"""Settings of conversations, server-side tools and the quality judge."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""An environment variable in a header."""


@dataclass(frozen=True, slots=True)
class ConversationsConfig:
    """Conversation histories stored by session id, for clients that send only new messages."""

    url: str = setting(
        "", doc="redis://HOST:PORT; empty: the store; off: disabled, `conversation` is refused.", off=True
    )
    ttl_s: float = setting(3600.0, doc="Seconds after its last turn after which a conversation is deleted.", least=1)
    overflow: Literal["truncate", "summarise"] = setting(
        "truncate", doc="What happens to the oldest turns that do not fit: omitted, or summarised by the model."
    )
    keep_turns: int = setting(2, doc="Newest turns that are never omitted or summarised, if they fit.", least=1)
    reply_tokens: int = setting(
        512, doc="Tokens reserved for an answer without `max_tokens`; at most a quarter of the window.", least=1
    )
    note_tokens: int = setting(
        160, doc="Maximum tokens of one note in a summary; all notes take at most a quarter of the window.", least=16
    )
    max_bytes: int = setting(
        2**20, doc="Maximum size of a history; beyond it the oldest turns are deleted.", least=1024, size=True
    )
    per_user: int = setting(
        1000, doc="Maximum of conversations per user; the least recently used are deleted first.", least=1
    )
    wait_s: float = setting(
        10.0, doc="Seconds a turn waits for the previous turn of its conversation before it gets 409.", least=0
    )


@dataclass(frozen=True, slots=True)
class ToolServerConfig:
    """A server of tools that the gateway runs: an HTTP API (openapi) or an MCP server (mcp_url or command)."""

    name: str = setting("", doc="Name that requests use in `server_tools`.")
    tenants: tuple[str, ...] = setting((), doc="Tenants that may use it; empty: all.", example="[acme]")
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels for data rules; external is true unless given here (false for command).",
        example="{external: false}",
    )  # fmt: skip
    openapi: str = setting("", doc="An HTTP API: an OpenAPI document (YAML or JSON), or the path of a file with one.")
    url: str = setting("", doc="Base URL of that API; empty: the document's first server.")
    mcp_url: str = setting("", doc="URL of an MCP server over HTTP.", example="https://tools.example.com/mcp")
    command: tuple[str, ...] = setting(
        (), doc="An MCP server over stdio: the program to start, with arguments.",
        example="[python, server.py]",
    )  # fmt: skip
    env: tuple[str, ...] = setting((), doc="Environment variables passed to the command.", example="[TOKEN]")
    headers: tuple[str, ...] = setting(
        (), doc="Headers sent with every call; ${NAME} is an environment variable.",
        example="['Authorization: Bearer ${TOKEN}']",
    )  # fmt: skip
    allow: tuple[str, ...] = setting((), doc="Functions that may be called; empty: all.", example="[search]")
    timeout_s: float = setting(15.0, doc="Time limit of a call, in seconds.", least=0.1, most=600)
    max_bytes: int = setting(
        32 * 1024, doc="Maximum size of a result passed to the model.", least=256, most=2**24, size=True
    )

    @property
    def openapi_file(self) -> str:
        """Path of the file with the OpenAPI document; empty if the document itself is given, or none."""
        return "" if "\n" in self.openapi or self.openapi.lstrip().startswith("{") else self.openapi

    @property
    def header_variables(self) -> list[str]:
        """Environment variables that headers name."""
        return [name for header in self.headers for name in VARIABLE.findall(header)]


@dataclass(frozen=True, slots=True)
class ToolsConfig:
    """Tools that the gateway runs itself when a request names them in `server_tools`."""

    max_steps: int = setting(
        8, doc="Maximum of model calls in one request; the last one gets no tools.", least=2, most=64
    )
    max_parallel: int = setting(8, doc="Tool calls of one request that run in parallel.", least=1, most=64)
    networks: tuple[str, ...] = setting(
        (), doc="Private networks that tools may reach; empty: public addresses only.", example="[10.1.0.0/16]"
    )


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """LLM as a judge: a model grades sampled answers, for quality metrics."""

    rate: float = setting(0.0, doc="Share of chat answers to grade; 0: none.", least=0, most=1)
    model: str = setting("", doc="Model that grades; empty: the one that answered.")
    for_all_callers: bool = setting(
        False, doc="Whether it also grades answers to callers that may not use its model themselves; they are left "
        "out otherwise.",
    )  # fmt: skip
    queue: int = setting(
        100, doc="Maximum of answers waiting to be graded; further ones are dropped and counted.", least=1
    )
