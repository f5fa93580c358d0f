"""Messages with blocks as chat messages. One message may become several: every tool result is one of its own, and what
another server's tool answered in the middle of an assistant's message stands between the parts of that message.

Consecutive messages of one role are one turn, as this API has it. What the model cannot see is refused where the user
hands it in, and replaced by a note the model can read where a tool did, since an agent cannot take that back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.gateway.api.anthropic.blocks import (
    Calls,
    CompactionBlock,
    ContentBlock,
    DocumentBlock,
    Dropped,
    ImageBlock,
    McpToolResultBlock,
    Message,
    ResultContent,
    SearchResultBlock,
    ServerToolResult,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
)
from penstock.gateway.api.sealed_text import opened
from penstock.gateway.app.exchange import encode_json
from penstock.gateway.generation.schemas import (
    ChatMessage,
)
from penstock.gateway.generation.tool_schemas import (
    FunctionCall,
    ToolCall,
)
from penstock.protocol.errors import InvalidRequest

BETWEEN = "\n\n"
"""Stands between the texts of two messages, and of a document and what is around it."""
BILLING = "x-anthropic-billing-header"
"""Begins a block with which Claude Code tells a server about itself. It is not for the model, and differs from session
to session: in front of everything else, it would keep them from sharing the cached prompt."""
_ONLY_FOR_SERVERS = ("encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control")


class History:
    """The conversation of one request, and what of it the model does not see."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.ignored: dict[str, None] = {}
        """Paths of what was left out, in order."""
        self.referenced: set[str] = set()
        """Tools that the results of searches named."""
        self._calls: set[str] = set()
        """Ids of the tool uses so far, which results must answer."""

    def add_system(self, content: str | Sequence[TextBlock] | None) -> None:
        """The request's `system`."""
        texts = [content or ""] if isinstance(content, str | None) else [block.text for block in content]
        told = [text for text in texts if not text.startswith(BILLING)]
        if len(told) < len(texts):
            self.ignored[f"system.{BILLING}"] = None
        if any(told):
            self.messages.append(ChatMessage(role="system", content=BETWEEN.join(told)))

    def add(self, message: Message, at: str) -> None:
        content: Sequence[ContentBlock]
        content = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        if message.role == "system":
            self._say("system", "".join(_system_text(block, f"{at}.content[{i}]") for i, block in enumerate(content)))
            return
        texts: list[str] = []
        made: list[ToolCall] = []
        thoughts: list[str] = []
        for index, block in enumerate(content):
            here = f"{at}.content[{index}]"
            if isinstance(block, ToolResultBlock):
                # Before the text of this message: they answer the turn before, and the text refers to them.
                self._add_result(message, block, here)
            elif isinstance(block, Calls):
                _belongs(message, "assistant", "Calls of tools", here)
                self._calls.add(block.id)
                made.append(_call(block))
            elif isinstance(block, ServerToolResult):
                _belongs(message, "assistant", "Results of tools that a server ran", here)
                self._answers(block.tool_use_id, here)
                self._say(message.role, "".join(texts), made, thoughts)
                texts, made, thoughts = [], [], []
                self.messages.append(
                    ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=_server_text(block))
                )
            elif isinstance(block, ThinkingBlock):
                _belongs(message, "assistant", "Thoughts", here)
                thought = block.thinking or opened(block.signature)
                if not thought:  # another server left it out
                    self.ignored["messages.content.thinking"] = None
                thoughts.append(thought)
            else:
                texts.append(self._text(block, here))
        if made or any(texts) or (message.role == "user" and self._silent):
            self._say(message.role, "".join(texts), made, thoughts)

    @property
    def _silent(self) -> bool:
        """Whether nobody but the assistant has said anything since its last turn, so that an empty text is a turn."""
        return not self.messages or self.messages[-1].role in ("assistant", "system")

    def _say(self, role: Any, text: str, calls: Sequence[ToolCall] = (), thoughts: Sequence[str] = ()) -> None:
        """Adds to the turn of the same role, or begins one."""
        last = self.messages[-1] if self.messages else None
        thought = BETWEEN.join(filter(None, thoughts)) or None
        if last is None or last.role != role or last.tool_calls or thought:
            self.messages.append(
                ChatMessage(role=role, content=text, tool_calls=list(calls) or None, reasoning_content=thought)
            )
            return
        assert isinstance(last.content, str)
        last.content = BETWEEN.join(filter(None, (last.content, text)))
        last.tool_calls = list(calls) or None

    def _text(self, block: ContentBlock, at: str) -> str:
        """What the model reads of a block in a message."""
        if isinstance(block, TextBlock):
            if block.citations:
                self.ignored["messages.content.citations"] = None
            return block.text
        if isinstance(block, Dropped):
            self.ignored[f"messages.content.{block.__struct_config__.tag}"] = None
            return ""
        if isinstance(block, CompactionBlock):
            return block.content or ""
        if isinstance(block, SearchResultBlock):
            return self._search_result(block) + BETWEEN
        if isinstance(block, DocumentBlock):
            if (text := self._document(block)) is None:
                raise InvalidRequest(
                    "Only documents whose `source` is `text`, `content`, `base64`, `file` or `url` can be read here.",
                    param=f"{at}.source",
                    code="unsupported_parameter",
                )
            return text + BETWEEN
        assert isinstance(block, ImageBlock)
        raise InvalidRequest(
            f"`{at}.type`: images are not supported yet; send text.", param=f"{at}.type", code="unsupported_parameter"
        )

    def _add_result(self, message: Message, block: ToolResultBlock, at: str) -> None:
        _belongs(message, "user", "`tool_result` blocks", at)
        self._answers(block.tool_use_id, at)
        content = block.content or ""
        text = content if isinstance(content, str) else "".join(map(self._result_text, content))
        if block.is_error:
            text = f"Error: {text}"  # chat templates have no other place for it
        self.messages.append(ChatMessage(role="tool", tool_call_id=block.tool_use_id, content=text))

    def _answers(self, id: str, at: str) -> None:
        if id not in self._calls:
            raise InvalidRequest(
                f"`{at}.tool_use_id` answers no call: no `tool_use` before it has the id {id!r}.",
                param=f"{at}.tool_use_id",
            )

    def _result_text(self, block: ResultContent) -> str:
        """What the model reads of a block in the result of a tool."""
        if isinstance(block, TextBlock):
            return block.text
        if isinstance(block, SearchResultBlock):
            return self._search_result(block) + BETWEEN
        if isinstance(block, ToolReferenceBlock):
            self.referenced.add(block.tool_name)
            return f"The tool `{block.tool_name}` is available now.\n"
        if isinstance(block, DocumentBlock):
            if (text := self._document(block)) is not None:
                return text + BETWEEN
            self.ignored["messages.content.content.document"] = None
            return "[a document that is not text, which this model cannot read]\n"
        self.ignored["messages.content.content.image"] = None
        return "[an image, which this model cannot see]\n"

    def _document(self, block: DocumentBlock) -> str | None:
        """The text of a document; None where it has none."""
        if block.citations is not None and block.citations.enabled:
            self.ignored["messages.content.citations"] = None
        source = block.source
        text: Any = None
        if source.get("type") == "text":
            text = source.get("data")
        elif source.get("type") == "content":
            text = source.get("content")
            if isinstance(text, list):
                parts = [part.get("text") for part in text if isinstance(part, dict)]
                texts = [part for part in parts if isinstance(part, str)]
                text = "".join(texts) if len(texts) == len(text) else None
        return "\n".join(filter(None, (block.title, block.context, text))) if isinstance(text, str) else None

    def _search_result(self, block: SearchResultBlock) -> str:
        if block.citations is not None and block.citations.enabled:
            self.ignored["messages.content.citations"] = None
        return f"{block.title}\n{block.source}\n{''.join(part.text for part in block.content)}"


def _belongs(message: Message, role: str, what: str, at: str) -> None:
    if message.role != role:
        raise InvalidRequest(f"{what} go into messages of the {role}.", param=f"{at}.type")


def _system_text(block: ContentBlock, at: str) -> str:
    if not isinstance(block, TextBlock):
        raise InvalidRequest("Messages with the role `system` have text only.", param=f"{at}.type")
    return block.text


def _call(block: Calls) -> ToolCall:
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=encode_json(block.input).decode()))


def _server_text(block: ServerToolResult) -> str:
    """What a tool of another server answered: its text, or its JSON without what only that server can read."""
    content = block.content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        text = "".join(str(part.get("text", "")) for part in content)
    else:
        text = content if isinstance(content, str) else encode_json(_readable(content)).decode()
    return f"Error: {text}" if isinstance(block, McpToolResultBlock) and block.is_error else text


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items() if name not in _ONLY_FOR_SERVERS}
    return [_readable(item) for item in value] if isinstance(value, list) else value
