"""Chat templates: the Jinja templates that models ship with, which render messages into the prompt format.

Templates are untrusted input: they run in an immutable sandbox. The environment offers what model authors rely on
(block trimming, `raise_exception`, `strftime_now`, `tojson`, loop controls, the `generation` tag).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from jinja2.runtime import new_context

from penstock.errors import CheckpointError, PenstockError


class ChatTemplateError(PenstockError):
    """The messages cannot be rendered with the model's chat template; the caller should change them."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training tools; here it just renders its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"the model's chat template refuses these messages: {message}")


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template with the variables that do not change between calls."""

    def __init__(self, templates: str | Mapping[str, str], variables: Mapping[str, Any]) -> None:
        """`templates`: one template, or several by name, of which `default` and `tool_use` are used."""
        named = {"default": templates} if isinstance(templates, str) else dict(templates)
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the model's chat template cannot be compiled: {error}") from error
        self._globals = dict(environment.globals)
        if "default" not in self._templates:
            raise CheckpointError(f"the model has chat templates {sorted(named)} but none named 'default'")
        self._variables = dict(variables)
        text = named.get("tool_use", named["default"])
        self.source = text
        """The template for conversations with tools."""
        self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(text))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages, whose content must be plain text (see `flatten`)."""
        template = self._templates["default"]
        if tools and "tool_use" in self._templates:
            template = self._templates["tool_use"]
        variables = {
            **self._globals,
            **self._variables,
            "documents": None,
            **(template_kwargs or {}),
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            # `shared`: the globals are already among the variables and need not be collected every time.
            context = new_context(template.environment, template.name, template.blocks, variables, shared=True)
            return "".join(template.root_render_func(context))
        except ChatTemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(f"the model's chat template does something unsafe: {error}") from error
        except Exception as error:  # a template is a program: it may fail in any way, for these messages only
            raise ChatTemplateError(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error


def flatten(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of messages whose content is a plain string: text parts are joined, a missing content is empty."""
    flat = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if content is None:
            content = ""
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
