"""Prepares conversations with function calls for the model's chat template.

A template with tool support gets tools in its own format. For other templates, the functions and the format are
explained in the system prompt, and calls and results in the history become text.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protocol.errors import InvalidRequest
from penstock.protocol.json_limits import excess
from penstock.text.guard import Marked
from penstock.text.template_calls import OBJECTS, CallStyle
from penstock.tools.formats import ToolFormat
from penstock.tools.quoted_calls import quoted_call
from penstock.tools.toolbox import Tool

Message = dict[str, Any]


def with_thought(message: Message, template: str) -> Message:
    """A copy of a message whose thought has the name that the template knows."""
    message = dict(message)
    thought = message.get("reasoning_content")
    if thought and "reasoning_content" not in template and ".thinking" in template:
        message["thinking"] = message.pop("reasoning_content")
        if message.get("tool_calls") and message["content"]:  # gpt-oss takes one of them only
            message["thinking"] = f"{thought}\n\n{message['content']}"
            message["content"] = ""
    elif thought and "reasoning_content" not in template and "message.reasoning" in template:
        message["reasoning"] = message.pop("reasoning_content")
    return message


def native(
    messages: Sequence[Message], form: ToolFormat, template: str = "", style: CallStyle = OBJECTS
) -> list[Message]:
    """Messages for a template that shows calls: arguments as it takes them, accepted ids, results with their name."""
    names: dict[str, str] = {}
    ids: dict[str, str] = {}
    count = 0
    prepared: list[Message] = []
    for message in messages:
        message = with_thought(message, template)
        if calls := message.get("tool_calls"):
            for call in calls:
                given, name = call["id"], call["function"]["name"]
                names[given], ids[given] = name, form.template_id(given, name, count)
                count += 1
            message["tool_calls"] = [_native_call(call, ids[call["id"]], style) for call in calls]
            if style.alone and message["content"]:
                prepared.append({key: value for key, value in message.items() if key != "tool_calls"})
                message = {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
            if style.without_content and not message["content"]:
                message["content"] = None
        if (given := message.get("tool_call_id")) is not None:
            message.setdefault("name", names.get(given, ""))
            message["tool_call_id"] = ids.get(given) or form.known_id(given)
        prepared.append(message)
    return prepared


def _native_call(call: Mapping[str, Any], id: str, style: CallStyle) -> dict[str, Any]:
    arguments = _parsed(call["function"]["arguments"])
    if style.arguments_as_text:
        arguments = _said(call)
    elif style.only_objects and not isinstance(arguments, dict):
        arguments = {"arguments": arguments}
    return {**call, "id": id, "function": {**call["function"], "arguments": arguments}}


def _said(call: Mapping[str, Any]) -> str:
    """The arguments of a call as they were sent; those of a call without any as an empty object."""
    arguments: str = call["function"]["arguments"]
    return "{}" if arguments.strip() in ("", "null") else arguments


def _parsed(arguments: str) -> Any:
    """The arguments as an object, which templates write as JSON themselves; a truncated call stays a string."""
    if arguments.strip() in ("", "null"):
        return {}
    if (much := excess(arguments.encode("utf-8", "replace"))) is not None:
        raise InvalidRequest(f"The arguments of a call have {much}.", param="messages", code="body_too_complex")
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def explained(
    messages: Sequence[Message], tools: Sequence[Tool], form: ToolFormat, template: str = ""
) -> list[Message]:
    """Messages for a template without tool support."""
    prepared: list[Message] = []
    for message in messages:
        message = with_thought(message, template)
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if prepared and prepared[-1].pop("result", False):
                result = f"{prepared.pop()['content']}\n{result}"
            prepared.append({"role": "user", "content": result, "result": True})
        elif calls := message.get("tool_calls"):
            text = "\n".join(filter(None, (message["content"], written(calls, form))))
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            prepared.append({**others, "content": text})
        else:
            prepared.append(message)
    for message in prepared:
        message.pop("result", None)
    return with_instructions(prepared, instructions(tools, form)) if tools else prepared


def with_instructions(prepared: list[Message], rules: str) -> list[Message]:
    """Messages that begin with instructions, in the system prompt."""
    if prepared and prepared[0]["role"] == "system":
        first = {**prepared[0], "content": f"{prepared[0]['content']}\n\n{rules}"}
        return [first, *prepared[1:]]
    return [{"role": "system", "content": rules}, *prepared]


def shown_as_text(messages: Sequence[Message], form: ToolFormat) -> list[Message]:
    """Messages for a template that shows functions and results, but not the calls between them (LFM2's, Granite's).
    What stands around the calls are control tokens, whatever the calls contain."""
    prepared: list[Message] = []
    for message in messages:
        if calls := message.get("tool_calls"):
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            body = written(calls, form).removeprefix(form.opener).removesuffix(form.closer)
            said = message["content"] or ""
            content = Marked((said, False), (form.opener, True), (body, False), (form.closer, True))
            message = {**others, "content": content}
        prepared.append(message)
    return prepared


def as_observations(messages: Sequence[Message]) -> list[Message]:
    """Messages for GLM-4's template, which knows no calls: each is a message whose `metadata` is the function's name,
    and a result is an observation."""
    prepared: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            prepared.append({"role": "observation", "content": message["content"]})
            continue
        others = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls") or ()
        prepared += [others] if message["content"] or not calls else []
        for call in calls:
            function = call["function"]
            prepared.append({"role": "assistant", "metadata": function["name"], "content": _said(call)})
    return prepared


def written(calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """Calls as the model itself would write them."""
    if (marks := form.marks) is not None:
        each = []
        for number, call in enumerate(calls):
            id = f"{_made_up_id(number)}{marks.id_end}" if marks.id_end else ""
            name = f"{call['function']['name']}{f':{number}' if marks.numbered else ''}"
            head = f"{marks.before_name}{id}{name}{marks.after_name}"
            each.append(f"{head}{_said(call)}{marks.after_arguments}")
        return f"{form.opener}{form.between.join(each)}{form.closer}"
    if form.syntax == "python" and not form.bare and (python := _in_python(calls)) is not None:
        begin, end = "[]" if form.listed else ("", "")
        return f"{form.opener}{begin}{form.between.join(python)}{end}{form.closer}"
    if form.syntax == "quoted":
        functions = (call["function"] for call in calls)
        quoted = [quoted_call(function["name"], _parsed(function["arguments"])) for function in functions]
        return form.between.join(f"{form.opener}{call}{form.closer}" for call in quoted)
    if form.name_first:
        return form.between.join(f"{call['function']['name']}\n{_said(call)}" for call in calls)
    bodies = []
    for call in calls:
        function = call["function"]
        body = {form.name_key: function["name"], form.arguments: _parsed(function["arguments"])}
        bodies.append(json.dumps(body, ensure_ascii=False))
    if form.listed:
        opener = "" if form.bare else form.opener
        return f"{opener}{form.before}[{form.between.join(bodies)}]{form.after}{form.closer}"
    if form.bare:
        return form.between.join(bodies)
    return form.between.join(f"{form.opener}{form.before}{body}{form.after}{form.closer}" for body in bodies)


def _made_up_id(number: int) -> str:
    """Ten letters and digits, as models that number their calls themselves write them."""
    return f"call{number:06}"


def _in_python(calls: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Calls with keyword arguments; None where one has no such form."""
    found = []
    for call in calls:
        name, arguments = call["function"]["name"], _parsed(call["function"]["arguments"])
        if not isinstance(arguments, dict) or not all(map(_is_keyword_name, [*name.split("."), *arguments])):
            return None
        given = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
        found.append(f"{name}({given})")
    return found


def _is_keyword_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _literal(value: Any) -> str:
    """JSON's value in Python, text in double quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_literal(key)}: {_literal(each)}' for key, each in value.items())}}}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def instructions(tools: Sequence[Tool], form: ToolFormat, *, results: str = "inside <tool_response> tags") -> str:
    """Instructions for a model whose template has no tool support. `results`: where they stand."""
    listing = "\n".join(json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools)
    example = {"function": {"name": "function_name", "arguments": '{"argument_name": "value"}'}}
    return (
        "You can call functions to answer the user. These are available, one JSON description per line:\n"
        f"<tools>\n{listing}\n</tools>\n"
        "To call a function, answer with nothing but its name and its arguments, in this form:\n"
        f"{written([example], form)}\n"
        f"The result comes back to you {results}. If no function is needed, answer in plain text."
    )
