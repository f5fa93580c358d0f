"""Pydantic AI: an agent with a tool and a typed result, over chat completions, responses and messages. Arguments:
base URL without /v1, model."""

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

url, model = sys.argv[1:3]


class Report(BaseModel):
    city: str
    rain: bool


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
models = {
    "chat": OpenAIChatModel(model, provider=openai),
    "responses": OpenAIResponsesModel(model, provider=openai),
    "messages": AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none")),
}


async def streamed(agent: Agent) -> dict:
    async with agent.run_stream("How is the weather in Paris?") as run:
        return (await run.get_output()).model_dump()


async def main() -> dict:
    said = {}
    for name, chosen in models.items():
        agent = Agent(chosen, output_type=Report, tools=[weather], retries=0)
        said[name] = (await agent.run("How is the weather in Paris?")).output.model_dump()
        said[f"{name} streamed"] = await streamed(agent)
    return said


print(json.dumps(asyncio.run(main())))
