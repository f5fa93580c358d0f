"""LlamaIndex: complete, chat, stream, embeddings, and an agent with a tool. Arguments: base URL, model, embedding
model; an empty embedding model: the agent, otherwise the rest."""

import asyncio
import json
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

url, model, encoder = sys.argv[1:4]
common = {"model": model, "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 400, "max_retries": 0}
llm = OpenAILike(is_chat_model=True, is_function_calling_model=True, context_window=8192, **common)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


async def agent() -> str:
    return str(await FunctionAgent(tools=[weather], llm=llm).run("What is the weather in Paris?"))


if encoder:
    question = ChatMessage(role="user", content="What is the capital of France?")
    plain = OpenAILike(is_chat_model=False, context_window=8192, **common)
    embedding = OpenAILikeEmbedding(model_name=encoder, api_base=url, api_key="none")
    said = {
        "chat": llm.chat([question]).message.content,
        "streamed": "".join(chunk.delta for chunk in llm.stream_chat([question])),
        "completed": plain.complete("One, two, three,").text,
        "dimensions": [len(vector) for vector in embedding.get_text_embedding_batch(["water", "wheel"])],
    }
else:
    said = {"agent": asyncio.run(agent())}
print(json.dumps(said))
