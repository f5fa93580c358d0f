"""`langchain-ollama` against a server: chat, a stream, a bound tool, embeddings. Arguments: address and model."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaLLM


@tool
def weather(city: str) -> str:
    """The weather."""
    return f"It rains in {city}."


host, model = sys.argv[1:]
chat = ChatOllama(model=model, base_url=host, temperature=0, num_ctx=2048, validate_model_on_init=True)
messages: list[object] = [HumanMessage("What is the weather in Paris?")]
first = chat.bind_tools([weather]).invoke(messages)
messages.append(first)
for call in first.tool_calls:
    messages.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
answer = chat.bind_tools([weather]).invoke(messages)
print(
    json.dumps(
        {
            "calls": [call["name"] for call in first.tool_calls],
            "answer": answer.content,
            "streamed": "".join(str(part.content) for part in chat.stream([HumanMessage("hi")])),
            "tokens": answer.usage_metadata["output_tokens"],
            "completed": OllamaLLM(model=model, base_url=host, num_predict=8).invoke("hi"),
        }
    )
)
