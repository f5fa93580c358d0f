"""The OpenAI Agents SDK: a tool loop, whole and streamed, with both of its APIs, and an agent that hands over to
another. Arguments: URL MODEL; prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


class Person(BaseModel):
    name: str
    age: int


async def run(model: OpenAIChatCompletionsModel | OpenAIResponsesModel) -> dict[str, object]:
    expert = Agent(name="expert", instructions="You know the weather.", tools=[weather], model=model)
    first = Agent(name="first", instructions="Hand over.", handoffs=[expert], model=model)
    whole = await Runner.run(expert, "What is the weather in Paris?")
    stream = Runner.run_streamed(expert, "What is the weather in Paris?")
    events = [event.type async for event in stream.stream_events()]
    handed = await Runner.run(first, "What is the weather in Rome? Ask the expert.")
    maker = Agent(name="maker", instructions="Make a person.", output_type=Person, model=model)
    made = await Runner.run(maker, "Go on.")
    further = await Runner.run(expert, [*whole.to_input_list(), {"role": "user", "content": "Say it again."}])
    return {
        "whole": whole.final_output,
        "streamed": stream.final_output,
        "events": len(events),
        "handed": [handed.final_output, handed.last_agent.name],
        "made": made.final_output.model_dump(),
        "further": further.final_output,
    }


async def main() -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = await run(OpenAIChatCompletionsModel(model=name, openai_client=client))
    responses = await run(OpenAIResponsesModel(model=name, openai_client=client))
    print(json.dumps({"chat": chat, "responses": responses}))


asyncio.run(main())
