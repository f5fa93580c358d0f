"""Models whose tokenizer is known here: those that run here, and remote ones with a configured tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.protocol.errors import InvalidRequest
from penstock.routing.remotes import RemoteModel
from penstock.text import TextModel


class TokenizedModel(Protocol):
    """What turning text into tokens needs to know of a model."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> TextModel: ...

    @property
    def tool_format(self) -> str: ...

    @property
    def context_window(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class RemoteText:
    """The tokenizer of a remote model."""

    name: str
    text: TextModel
    context_window: int | None
    tool_format: str = "auto"


def known_text(model: RemoteModel) -> RemoteText:
    """The tokenizer of a remote model; a 400 where it is not known."""
    text = remote_text(model)
    if text is None:
        raise InvalidRequest(
            f"`{model.name}` runs on another server, and its tokenizer is not known here (`remotes[].tokenizer` names "
            "it).",
            param="model",
            code="remote_model",
        )
    return text


def remote_text(model: RemoteModel) -> RemoteText | None:
    """None where no tokenizer is configured for it."""
    text = model.text
    return None if text is None else RemoteText(model.name, text, model.context_window or text.context_length)
