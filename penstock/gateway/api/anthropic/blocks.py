"""The content blocks of messages, as typed structs. Blocks that the public API has and a text model cannot use are here
as well, so that a history made elsewhere can be continued; `history.py` decides what becomes of each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.gateway.generation.schemas import Name


class CacheControl(Struct, forbid_unknown_fields=True, kw_only=True):
    """Marks the end of a prefix to cache. Every prefix is cached here, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None


class Block(Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(Block, tag_field="type", tag="text", kw_only=True):
    text: str
    citations: list[Any] | None = None


class ImageBlock(Block, tag_field="type", tag="image", kw_only=True):
    source: dict[str, Any]
    transformations: Any = None


class CitationsConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    enabled: bool | None = None


class DocumentBlock(Block, tag_field="type", tag="document", kw_only=True):
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None


class SearchResultBlock(Block, tag_field="type", tag="search_result", kw_only=True):
    source: str
    title: str
    content: list[TextBlock]
    citations: CitationsConfig | None = None


class ToolReferenceBlock(Block, tag_field="type", tag="tool_reference", kw_only=True):
    """In the result of a search for tools: a tool with `defer_loading` that may be called from here on."""

    tool_name: Name


class ThinkingBlock(Block, tag_field="type", tag="thinking", kw_only=True):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, tag_field="type", tag="redacted_thinking", kw_only=True):
    data: str


class ToolUseBlock(Block, tag_field="type", tag="tool_use", kw_only=True):
    id: Name
    name: Name
    input: dict[str, Any]
    caller: Any = None


class ServerToolUseBlock(Block, tag_field="type", tag="server_tool_use", kw_only=True):
    id: Name
    name: Name
    input: dict[str, Any]
    caller: Any = None


class McpToolUseBlock(Block, tag_field="type", tag="mcp_tool_use", kw_only=True):
    id: Name
    name: Name
    server_name: str
    input: dict[str, Any]


ResultContent = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(Block, tag_field="type", tag="tool_result", kw_only=True):
    tool_use_id: Name
    content: str | list[ResultContent] | None = None
    is_error: bool | None = None


class ServerToolResult(Block, kw_only=True):
    """What a tool of another server answered; the content is kept as it is."""

    tool_use_id: Name
    content: Any
    caller: Any = None


class McpToolResultBlock(ServerToolResult, tag_field="type", tag="mcp_tool_result", kw_only=True):
    is_error: bool | None = None


class WebSearchResultBlock(ServerToolResult, tag_field="type", tag="web_search_tool_result"):
    pass


class WebFetchResultBlock(ServerToolResult, tag_field="type", tag="web_fetch_tool_result"):
    pass


class CodeResultBlock(ServerToolResult, tag_field="type", tag="code_execution_tool_result"):
    pass


class BashResultBlock(ServerToolResult, tag_field="type", tag="bash_code_execution_tool_result"):
    pass


class EditorResultBlock(ServerToolResult, tag_field="type", tag="text_editor_code_execution_tool_result"):
    pass


class ToolSearchResultBlock(ServerToolResult, tag_field="type", tag="tool_search_tool_result"):
    pass


class ContainerUploadBlock(Block, tag_field="type", tag="container_upload", kw_only=True):
    file_id: str


class CompactionBlock(Block, tag_field="type", tag="compaction", kw_only=True):
    """A summary of the conversation before it."""

    content: str | None = None
    encrypted_content: str | None = None
    signature: str | None = None


Calls = ToolUseBlock | ServerToolUseBlock | McpToolUseBlock
Dropped = RedactedThinkingBlock | ContainerUploadBlock
"""What the model cannot read, or need not read again."""
ContentBlock = (
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ServerToolUseBlock
    | McpToolUseBlock
    | ToolResultBlock
    | McpToolResultBlock
    | WebSearchResultBlock
    | WebFetchResultBlock
    | CodeResultBlock
    | BashResultBlock
    | EditorResultBlock
    | ToolSearchResultBlock
    | ContainerUploadBlock
    | CompactionBlock
)


class Message(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[ContentBlock], Meta(max_length=65536)]
