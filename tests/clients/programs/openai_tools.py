"""The OpenAI SDK: a tool loop with its own message objects sent back, streamed and whole, and two calls at once.
Arguments: base URL, model."""

import json
import sys

from openai import OpenAI

url, model = sys.argv[1:3]
client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def results(message):
    for called in message.tool_calls:
        city = json.loads(called.function.arguments)["city"]
        yield {"role": "tool", "tool_call_id": called.id, "content": f"It rains in {city}."}


question = {"role": "user", "content": "What is the weather in Paris and Rome?"}
first = client.chat.completions.create(model=model, messages=[question], tools=TOOLS).choices[0].message
second = client.chat.completions.create(model=model, messages=[question, first, *results(first)], tools=TOOLS)
with client.chat.completions.stream(model=model, messages=[question], tools=TOOLS) as stream:
    for _ in stream:
        pass
    streamed = stream.get_final_completion().choices[0].message
third = client.chat.completions.create(model=model, messages=[question, streamed, *results(streamed)], tools=TOOLS)
print(
    json.dumps(
        {
            "calls": [call.function.arguments for call in first.tool_calls],
            "streamed": [call.function.arguments for call in streamed.tool_calls],
            "whole": second.choices[0].message.content,
            "after_stream": third.choices[0].message.content,
        }
    )
)
