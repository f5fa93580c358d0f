"""`tools` and `tool_choice` as a toolbox, a prompt and a grammar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from penstock.gateway.accounting.request_limits import Cap
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.response_format import (
    GrammarCache,
    encode,
    explained,
    grammar_of,
    param_of,
)
from penstock.gateway.generation.schemas import (
    ChatRequest,
    TextFormat,
)
from penstock.gateway.generation.tokenized_model import TokenizedModel
from penstock.gateway.generation.tool_schemas import (
    FreeTextFunction,
    NamedTool,
    ToolDefinition,
)
from penstock.protocol.errors import InvalidRequest
from penstock.text.grammars import Grammar
from penstock.text.template_fit import Accepted, fitted
from penstock.text.thought_grammar import behind_thought
from penstock.text.thought_styles import ThoughtStyle
from penstock.tools import prompt as prompting
from penstock.tools.channels import ChannelTokens, channel_grammar
from penstock.tools.formats import ToolFormat, ToolFormatSetting, choose
from penstock.tools.toolbox import Tool, Toolbox, Use


def check_tools(request: ChatRequest) -> None:
    """Check what does not depend on the model."""
    tools, choice = request.tools, request.tool_choice
    if not tools:
        if choice not in (None, "none"):
            raise InvalidRequest("`tool_choice` is only allowed with `tools`.", param="tool_choice")
        if request.parallel_tool_calls is not None:
            raise InvalidRequest("`parallel_tool_calls` is only allowed with `tools`.", param="parallel_tool_calls")
        return
    names: set[str] = set()
    for index, tool in enumerate(tools):
        at = f"tools[{index}].{'custom' if isinstance(tool.function, FreeTextFunction) else 'function'}"
        if tool.function.name in names:
            raise InvalidRequest(f"Two tools are called `{tool.function.name}`.", param=f"{at}.name")
        names.add(tool.function.name)
        if (tool.function.parameters or {}).get("type", "object") != "object":
            raise InvalidRequest(f"`{at}.parameters` must describe an object.", param=f"{at}.parameters")
    for name in chosen_names(choice) or ():
        if name not in names:
            raise InvalidRequest(f"`tool_choice` names `{name}`, which is not among the tools.", param="tool_choice")


def check_tool_count(request: ChatRequest, cap: Cap | None) -> None:
    """Within what the caller may offer."""
    if cap is not None and request.tools and len(request.tools) > cap.most:
        raise cap.refusal(f"`tools` has {len(request.tools)} functions", "tools", "tools")


def chosen_names(choice: str | NamedTool | None) -> tuple[str, ...] | None:
    """The functions that `tool_choice` allows; None: all of them."""
    if not isinstance(choice, NamedTool):
        return None
    if choice.type == "function" and choice.function is not None:
        return (choice.function.name,)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return tuple(tool.function.name for tool in choice.allowed_tools.tools)
    param = f"tool_choice.{choice.type}"
    raise InvalidRequest(f"Missing required parameter: `{param}`.", param=param, code="missing_parameter")


def tool_of(definition: ToolDefinition) -> Tool:
    function = definition.function
    tool = Tool(function.name, function.description, function.parameters, bool(function.strict))
    if isinstance(function, FreeTextFunction) and function.syntax != "text":
        return replace(tool, input_syntax=function.syntax, input_grammar=function.grammar)
    return tool


def toolbox_of(request: ChatRequest, model: TokenizedModel) -> Toolbox | None:
    """The functions of a request; None where none may be called."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    form = format_of(model)
    special = {mark: id for mark in (form.opener, *form.control) if (id := _control_id(mark, model)) is not None}
    return Toolbox(
        tuple(map(tool_of, request.tools)),
        form,
        use=_use(choice),
        only=chosen_names(choice),
        parallel=_parallel(request),
        first_only=bool(request.functions),
        opener_id=special.pop(form.opener, None),
        control=tuple(special.items()),
    )


def check_constrained(model: TokenizedModel, grammar: str) -> None:
    """Refuse a grammar for a model whose adapter has other tokens than the engine's grammars are made of."""
    if grammar and not model.text.takes_grammars:
        raise InvalidRequest(
            f"The answers of `{model.name}` cannot be constrained (structured output, grammars, required tool calls): "
            "its adapter's tokenizer spells tokens of the model differently.",
            code="unsupported_grammar",
        )


def _control_id(mark: str, model: TokenizedModel) -> int | None:
    id = model.text.token_id(mark)
    return id if id is not None and model.text.is_special(id) else None


def _use(choice: str | NamedTool | None) -> Use:
    if isinstance(choice, NamedTool) and choice.allowed_tools is not None:
        return choice.allowed_tools.mode
    return "auto" if choice in (None, "auto") else "required"


def _parallel(request: ChatRequest) -> bool:
    """Whether there may be several calls. A function that is named is called once, unless several are asked for."""
    if request.parallel_tool_calls is None:
        choice = request.tool_choice
        return not isinstance(choice, NamedTool) or choice.function is None
    return request.parallel_tool_calls


def format_of(model: TokenizedModel) -> ToolFormat:
    return choose(cast(ToolFormatSetting, model.tool_format), model.text.template_source)


def for_template(
    messages: list[dict[str, Any]], tools: tuple[Tool, ...], model: TokenizedModel, template: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the model's template takes them. `template`: one to use instead; thoughts have the name
    that it knows."""

    def accepted() -> Accepted:
        return model.text.accepted

    if not tools and not any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        source = template or model.text.template_source
        if any("reasoning_content" in message for message in messages):
            messages = [prompting.with_thought(message, source) for message in messages]
        return fitted(messages, accepted), None
    form = format_of(model)
    source, style = template or model.text.template_source, model.text.call_style
    if model.text.template_knows_tools:
        suited = fitted(messages, accepted)
        if form.name in ("lfm2", "granite") and not style.shown:
            suited = prompting.shown_as_text(suited, form)
        elif form.name == "glm4" and not style.shown:
            suited = prompting.as_observations(suited)
        prepared = prompting.native(suited, form, source, style)
        return prepared, [tool.described() for tool in tools] or None
    if form.marks is not None and style.shown:
        # DeepSeek's own templates show calls and results, but no functions.
        if tools:
            rules = prompting.instructions(tools, form, results="as a message of the tool")
            messages = prompting.with_instructions(messages, rules)
        return prompting.native(fitted(messages, accepted), form, source, style), None
    return fitted(prompting.explained(messages, tools, form, source), accepted), None


async def grammar_for(
    cache: GrammarCache,
    request: ChatRequest,
    toolbox: Toolbox | None,
    exchange: Exchange,
    channels: ChannelTokens | None = None,
    behind: ThoughtStyle | None = None,
    begun: bool = False,
) -> str:
    """The grammar of the answer, from `tools` and `response_format`; empty when any text is allowed. `channels`: the
    answer is a message with a header. `behind`: the grammar describes a thought before it, too, which the prompt has
    `begun`."""
    wanted = request.response_format
    free = wanted is None or isinstance(wanted, TextFormat)
    if toolbox is None and channels is None and behind is None:
        return await cache.response_format(wanted, exchange)
    if free and (toolbox is None or not toolbox.constrained):
        return ""
    answer = None if free or (toolbox is not None and toolbox.use == "required") else wanted
    asked = (request.tools, request.tool_choice, request.parallel_tool_calls, answer)
    key = encode((asked, None if toolbox is None else (toolbox.form.name, toolbox.opener_id, toolbox.control)))
    if channels is not None:
        key += encode(("channels", sorted(channels.ids.values())))
    elif behind is not None:
        key += encode(("behind", behind.name, begun))

    def build() -> tuple[Grammar, list[tuple[str, Grammar]]]:
        parts = []
        for tool in () if toolbox is None else toolbox.allowed:
            where = f"the parameters of `{tool.name}`"
            with explained(where):
                parts.append((where, tool.arguments_grammar()))
        said = None if answer is None else grammar_of(answer)
        if channels is not None:
            return channel_grammar(channels, toolbox, said), parts
        whole = said if toolbox is None else toolbox.grammar(said)
        assert whole is not None
        return whole if behind is None else behind_thought(whole, behind, begun=begun), parts

    param = "tools" if toolbox is not None or wanted is None else param_of(wanted)
    return await cache.source(key, build, param, exchange)
