"""The bodies of POST /v1/messages and /v1/messages/count_tokens. The policy is that of
`penstock.gateway.generation.schemas`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from penstock.gateway.api.anthropic.blocks import Block, CacheControl, Message, TextBlock
from penstock.gateway.app.decoding import Unsupported
from penstock.gateway.generation.schemas import INT64, Name


class ToolParam(Block, kw_only=True):
    """A tool of the client; or, with a `type`, one whose schema the API defines (see `tools.py`)."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")] | None = None
    type: Annotated[str, Meta(max_length=128)] | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class Choice(Struct, forbid_unknown_fields=True, kw_only=True):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(Choice, tag_field="type", tag="auto"):
    """Call tools or answer."""


class AnyChoice(Choice, tag_field="type", tag="any"):
    """Call a tool."""


class NoChoice(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """Call none."""


class NamedChoice(Choice, tag_field="type", tag="tool", kw_only=True):
    """Call this one."""

    name: Name


class MessagesMetadata(Struct, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None


class Thinking(Struct, forbid_unknown_fields=True):
    """How much to think before the answer; advice."""

    type: Literal["disabled", "enabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: str | None = None


class OutputSchema(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputSchema | None = None
    effort: Annotated[str, Meta(max_length=64)] | None = None
    """Advice that is not followed."""


class Conversation(Struct, forbid_unknown_fields=True, kw_only=True):
    """What the two endpoints share."""

    model: Name
    messages: Annotated[list[Message], Meta(min_length=1, max_length=16384)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=1024)] | None = None
    tool_choice: AutoChoice | AnyChoice | NoChoice | NamedChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputSchema | None = None
    """The older place of `output_config.format`."""
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] | None = None
    """Advice about what to leave out of a long history; not followed."""
    speed: Literal["standard", "fast"] | None = None
    thread: Unsupported = UNSET
    mcp_servers: Unsupported = UNSET
    compaction: Unsupported = UNSET


class MessagesRequest(Conversation, kw_only=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, le=INT64)]
    stop_sequences: Annotated[list[Annotated[str, Meta(max_length=1024)]], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Unsupported = UNSET
    inference_geo: Unsupported = UNSET


class CountTokensRequest(Conversation, kw_only=True):
    """POST /v1/messages/count_tokens"""


UNSUPPORTED = {
    "mcp_servers": "Connect the servers under `tools` in the server's configuration, or in the client.",
    "compaction": "Ask for a summary in a message instead.",
    "container": "Nothing runs code here; run it in the client.",
    "inference_geo": "Demand a region with the header `x-penstock-require: region=...` instead.",
}
"""What would change the answer, or where it is made, with what to do instead."""
