"""The official `ollama` package against a server: chat, tools, formats, generate, embeddings, lists. Arguments: the
server's address and the model. With `tools` the model is expected to call `weather` first."""

from __future__ import annotations

import json
import sys

import ollama


def weather(city: str) -> str:
    """The weather.

    Args:
        city: Where.
    """
    return f"It rains in {city}."


def main() -> None:
    host, model, *rest = sys.argv[1:]
    client = ollama.Client(host=host)
    if rest == ["tools"]:
        print(json.dumps(tool_loop(client, model)))
        return
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 1024}
    whole = client.chat(model, messages, options=options)
    parts = list(client.chat(f"{model}:latest", messages, options=options, stream=True))
    generated = list(client.generate(model, "The capital of France is", raw=True, options=options, stream=True))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    formed = client.chat(model, messages, format=schema, options={"temperature": 0, "num_predict": 60})
    said = {
        "whole": whole.message.content,
        "streamed": "".join(part.message.content or "" for part in parts),
        "eval_count": parts[-1].eval_count,
        "durations": [parts[-1].total_duration, parts[-1].prompt_eval_duration, parts[-1].eval_duration],
        "generated": "".join(part.response for part in generated),
        "formed": formed.message.content,
        "tags": [each.model for each in client.list().models],
        "running": [each.model for each in client.ps().models],
        "capabilities": client.show(model).capabilities,
        "embeddings": [len(row) for row in client.embed("minilm", ["one", "two"]).embeddings],
        "embedding": len(client.embeddings("minilm", "one").embedding),
        "pulled": [each.status for each in client.pull(model, stream=True)],
    }
    try:
        client.chat("no-such-model", messages)
    except ollama.ResponseError as error:
        said["missing"] = [error.status_code, error.error]
    print(json.dumps(said))


def tool_loop(client: ollama.Client, model: str) -> dict[str, object]:
    messages: list[object] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat(model, messages, tools=[weather])
    messages.append(first.message)
    for call in first.message.tool_calls or ():
        result = weather(**call.function.arguments)
        messages.append({"role": "tool", "content": result, "tool_name": call.function.name})
    calls = [call.function.name for call in first.message.tool_calls or ()]
    streamed = [
        call.function.arguments["city"]
        for part in client.chat(model, messages[:1], tools=[weather], stream=True)
        for call in part.message.tool_calls or ()
    ]
    return {
        "calls": calls,
        "streamed": streamed,
        "answer": client.chat(model, messages, tools=[weather]).message.content,
    }


main()
