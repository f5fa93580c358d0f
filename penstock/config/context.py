"""Settings of what happens between a user's question and the model: conversations, tools, quality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class ConversationsConfig:
    """Histories kept by session id, for clients that send only what is new."""

    url: str = setting(
        "", doc="redis://HOST:PORT; the store when empty; off: none are kept, and `conversation` is refused.", off=True
    )
    ttl_s: float = setting(3600.0, doc="Seconds after its last turn that a conversation is forgotten.", least=1)
    overflow: Literal["truncate", "summarise"] = setting(
        "truncate", doc="What becomes of the oldest turns that do not fit: left out, or condensed by the model."
    )
    keep_turns: int = setting(2, doc="Newest turns that stay as they are, if they fit at all.", least=1)
    reply_tokens: int = setting(
        512, doc="Tokens kept free for an answer without `max_tokens`; at most a quarter of the window.", least=1
    )
    note_tokens: int = setting(
        160, doc="Longest note on condensed turns; all notes together take at most a quarter of the window.", least=16
    )
    max_bytes: int = setting(
        2**20, doc="Largest history; beyond it the oldest turns are forgotten.", least=1024, size=True
    )
    per_user: int = setting(1000, doc="Conversations a user has at most; those used longest ago go first.", least=1)
    wait_s: float = setting(
        10.0, doc="Seconds a turn waits for the one before it in the same conversation before it gets 409.", least=0
    )


@dataclass(frozen=True, slots=True)
class ToolServerConfig:
    """Functions that the gateway runs for models: an HTTP API (openapi) or an MCP server (mcp_url or command)."""

    name: str = setting("", doc="What requests call it in `server_tools`.")
    tenants: tuple[str, ...] = setting((), doc="Who may use it; everybody when empty.", example="[acme]")
    openapi: str = setting("", doc="An HTTP API: an OpenAPI document (YAML or JSON), or the path of a file with one.")
    url: str = setting("", doc="Where that API is; the document's first server when empty.")
    mcp_url: str = setting("", doc="An MCP server over HTTP.", example="https://tools.example.com/mcp")
    command: tuple[str, ...] = setting(
        (), doc="An MCP server over standard streams: the program to start, with arguments.",
        example="[python, server.py]",
    )  # fmt: skip
    env: tuple[str, ...] = setting((), doc="Environment variables that the command sees.", example="[TOKEN]")
    headers: tuple[str, ...] = setting(
        (), doc="Sent with every call; ${NAME} is an environment variable.",
        example="['Authorization: Bearer ${TOKEN}']",
    )  # fmt: skip
    allow: tuple[str, ...] = setting((), doc="Functions that may be called; all when empty.", example="[search]")
    timeout_s: float = setting(15.0, doc="Seconds a call may take.", least=0.1, most=600)
    max_bytes: int = setting(
        32 * 1024, doc="Most of a result that the model gets to see.", least=256, most=2**24, size=True
    )


@dataclass(frozen=True, slots=True)
class ToolsConfig:
    """Tools that the gateway runs itself when a request names them in `server_tools`."""

    max_steps: int = setting(
        8, doc="Answers of the model in one request; in the last one it must do without tools.", least=2, most=64
    )
    max_parallel: int = setting(8, doc="Calls of one request that run at the same time.", least=1, most=64)
    networks: tuple[str, ...] = setting(
        (), doc="Private networks that tools may reach; without it only public addresses.", example="[10.1.0.0/16]"
    )


@dataclass(frozen=True, slots=True)
class JudgeConfig:
    """Answers graded by a model, for metrics of quality."""

    rate: float = setting(0.0, doc="Share of chat answers that are graded; 0 for none.", least=0, most=1)
    model: str = setting("", doc="The model that grades; the one that answered when empty.")
    queue: int = setting(100, doc="Answers that may wait to be graded; more are not, and counted.", least=1)
