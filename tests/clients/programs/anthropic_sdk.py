"""The Anthropic SDK: a message, a stream, a count of tokens, a tool loop with its own content blocks sent back.
Arguments: base URL, model."""

import json
import sys

from anthropic import Anthropic

url, model = sys.argv[1:3]
client = Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
TOOLS = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
question = {"role": "user", "content": "What is the weather in Paris and Rome?"}


def results(message):
    return {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"It rains in {block.input['city']}."}
            for block in message.content
            if block.type == "tool_use"
        ],
    }


def texts(message):
    return "".join(block.text for block in message.content if block.type == "text")


common = {"model": model, "max_tokens": 200, "tools": TOOLS, "system": "Be brief."}
first = client.messages.create(messages=[question], **common)
answer = {"role": "assistant", "content": first.content}
second = client.messages.create(messages=[question, answer, results(first)], **common)
with client.messages.stream(messages=[question], **common) as stream:
    streamed = stream.get_final_message()
counted = client.messages.count_tokens(model=model, messages=[question], tools=TOOLS)
print(
    json.dumps(
        {
            "calls": [block.input for block in first.content if block.type == "tool_use"],
            "stop": first.stop_reason,
            "streamed": [block.input for block in streamed.content if block.type == "tool_use"],
            "text": texts(second),
            "counted": counted.input_tokens,
        }
    )
)
