"""Chat templates: the Jinja templates that models ship with, which render messages into the prompt format.

Templates are untrusted input: they run in an immutable sandbox that bounds their work (`bounded_jinja`).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.exceptions

from penstock.errors import CheckpointError, PenstockError
from penstock.text.bounded_jinja import BoundedEnvironment, strftime_now
from penstock.text.template_meter import WORK, TemplateLimit

LONGEST = 256 * 1024
"""Maximum of a template's text, in characters."""
OUTPUT = 8 * 1024 * 1024
"""Maximum of a rendered prompt, in characters."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables that no `template_kwargs` change: the request has fields for them."""
_SHOWN = 500
"""How much of a template's own error message is passed on."""
_NO_THOUGHTS = re.compile(r"<think>\s*</think>\s*\Z")
"""An empty block of thoughts, which some templates write before every last answer."""


class ChatTemplateError(PenstockError):
    """The messages cannot be rendered with the model's chat template; the caller should change them."""


class TemplateTooHeavy(ChatTemplateError):
    """Rendering these messages takes more work than was allowed for it."""


def _raise_exception(message: Any) -> None:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {str(message)[:_SHOWN]}")


class ChatTemplate:
    """A compiled template with the variables that do not change between calls."""

    def __init__(self, templates: str | Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`templates`: one template, or several by name, of which `default` and `tool_use` are used."""
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        longest = max(map(len, named.values()), default=0)
        if longest > LONGEST:
            raise CheckpointError(f"the model's chat template has {longest} characters; the limit is {LONGEST}")
        environment = BoundedEnvironment(_raise_exception)
        try:
            self._templates = {name: environment.compiled(text) for name, text in named.items()}
        except Exception as error:  # besides its own errors, Python's for code that is nested too deeply
            raise CheckpointError(
                f"the model's chat template cannot be compiled: {type(error).__name__}: {str(error)[:_SHOWN]}"
            ) from error
        self._globals = dict(environment.globals)
        if "default" not in self._templates:
            raise CheckpointError(f"the model has chat templates {sorted(named)} but none named 'default'")
        self.variables = dict(variables)
        tool_use = "tool_use" if "tool_use" in named else "default"
        self.source = named[tool_use]
        """The template for conversations with tools."""
        self.names = frozenset[str]().union(*(template.names for template in self._templates.values()))
        """The variables that it expects."""
        names = self._templates[tool_use].names
        self._takes_text = "tools" not in names and "functions" in names and "functools[" in self.source
        """Whether it wants the functions as JSON, and the date (Firefunction's)."""
        self.knows_tools = "tools" in names or self._takes_text

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        work: int = WORK,
    ) -> str:
        """The prompt for these messages, whose content must be plain text (see `flatten`). `TemplateTooHeavy` when it
        takes more than `work`, in units of `template_meter`.

        `continue_final`: the last message is to be continued, so the prompt ends exactly with its text, whatever the
        template trims or adds behind it.
        """
        if continue_final:
            return self._unfinished(messages, tools, template_kwargs, work)
        template = self._templates["default"]
        if tools and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        told: dict[str, str] = {}
        if self._takes_text:
            functions = [tool.get("function", tool) for tool in tools or ()]
            told["functions"] = json.dumps(functions, ensure_ascii=False, indent=4)
            told["datetime"] = strftime_now("%d %B %Y")
        variables = {
            **self._globals,
            **self.variables,
            **told,
            "documents": None,
            **(template_kwargs or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.render(variables, work)
            if len(text) > OUTPUT:
                raise TemplateLimit(f"the prompt has {len(text)} characters; the limit is {OUTPUT}")
            return text
        except ChatTemplateError:
            raise
        except TemplateLimit as error:
            raise TemplateTooHeavy(f"the model's chat template cannot render these messages: {error}") from error
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                f"the model's chat template does something unsafe: {str(error)[:_SHOWN]}"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way, for these messages only
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {str(error)[:_SHOWN]}"
            ) from error

    def _unfinished(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        work: int,
    ) -> str:
        """Renders a mark in place of the last message's text, and cuts there."""
        *before, last = messages
        if last.get("tool_calls"):
            raise ChatTemplateError("the last message makes tool calls, so there is no text to continue")
        text, mark = str(last["content"]), f"{secrets.randbelow(10**30):030}"
        rendered = self.render(
            [*before, {**last, "content": mark, "prefix": True}],  # some templates ask whether it is a prefix
            add_generation_prompt=False,
            tools=tools,
            template_kwargs=template_kwargs,
            work=work,
        )
        head, found, _ = rendered.rpartition(mark)
        if not found:
            raise ChatTemplateError("the model's chat template does not show the last message; it cannot be continued")
        if text.lstrip().startswith("<think>"):
            head = _NO_THOUGHTS.sub("", head)
        return head + text


def flatten(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages whose content is a plain string: text parts are joined, a missing content is empty; a
    null beside calls stays."""
    flat = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if content is None:
            content = None if message.get("tool_calls") and "content" in message else ""
        elif isinstance(content, str):
            pass  # the usual case
        elif isinstance(content, Sequence):
            content = "".join(_text(part, index) for part in content)
        else:
            raise ChatTemplateError(f"messages[{index}].content must be a string or a list of text parts")
        if not isinstance(message.get("role"), str):
            raise ChatTemplateError(f"messages[{index}].role must be a string")
        flat.append({**message, "content": content})
    return flat


def _text(part: Any, index: int) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ChatTemplateError(f"messages[{index}].content has a part of type {kind!r}; this model accepts text only")
