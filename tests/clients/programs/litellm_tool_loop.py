"""litellm: a tool loop of two turns with its own message objects sent back as they are. Arguments: model, base
URL."""

import json
import sys

import litellm

model, url = sys.argv[1:3]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
messages: list = [{"role": "user", "content": "What is the weather in Paris?"}]
common = {"model": model, "api_base": url, "api_key": "none", "tools": TOOLS, "max_tokens": 100}
turns = []
for _ in range(3):
    message = litellm.completion(messages=messages, **common).choices[0].message
    turns.append(message.model_dump())
    if not message.tool_calls:
        break
    messages.append(message)
    for called in message.tool_calls:
        city = json.loads(called.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": called.id, "content": f"It rains in {city}."})

chunks = list(litellm.completion(messages=messages[:1], stream=True, **common))
streamed = litellm.stream_chunk_builder(chunks).choices[0].message
# The whole dictionary of a streamed turn sent back, with every null that litellm puts into it.
messages = [
    messages[0],
    {**streamed.model_dump(), "reasoning_content": None, "function_call": None, "provider_specific_fields": {}},
    {"role": "tool", "tool_call_id": streamed.tool_calls[0].id, "content": "It snows in Paris."},
]
second = litellm.completion(messages=messages, **common).choices[0].message.content
print(json.dumps({"turns": turns, "streamed": streamed.model_dump(), "second": second}))
