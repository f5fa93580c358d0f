"""LangChain: invoke, stream, batch, embeddings, a structured answer and an agent of LangGraph with a tool. Arguments:
base URL, model, embedding model; an empty embedding model: the agent, otherwise the rest."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, model, encoder = sys.argv[1:4]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=400, max_retries=0)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"It rains in {city}."


class Person(BaseModel):
    name: str
    age: int


if encoder:
    question = "What is the capital of France?"
    embeddings = OpenAIEmbeddings(base_url=url, api_key="none", model=encoder, check_embedding_ctx_length=False)
    person = chat.with_structured_output(Person, method="json_schema").invoke("Alice is 31 years old. Who is it?")
    said = {
        "invoked": chat.invoke(question).content,
        "streamed": "".join(chunk.content for chunk in chat.stream(question)),
        "batch": [message.content for message in chat.batch([question, question])],
        "person": person.model_dump(),
        "dimensions": [len(vector) for vector in embeddings.embed_documents(["water", "wheel"])],
    }
else:
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(chat, [weather])
    turns = agent.invoke({"messages": [("user", "What is the weather in Paris?")]})["messages"]
    streamed = [chunk for chunk, _ in agent.stream({"messages": [("user", "And now?")]}, stream_mode="messages")]
    responses = ChatOpenAI(base_url=url, api_key="none", model=model, use_responses_api=True, max_retries=0)
    bound = responses.bind_tools([weather]).invoke("What is the weather in Paris?")
    said = {
        "turns": [turn.type for turn in turns],
        "said": turns[-1].content,
        "streamed": "".join(str(chunk.content) for chunk in streamed if chunk.type == "AIMessageChunk"),
        "responses": [call["args"] for call in bound.tool_calls],
    }
print(json.dumps(said))
