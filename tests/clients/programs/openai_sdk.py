"""The OpenAI SDK: chat, stream, structured output by `parse`, embeddings, responses, token counts. Arguments: base
URL, chat model, embedding model."""

import json
import sys

from openai import OpenAI
from pydantic import BaseModel

url, model, encoder = sys.argv[1:4]
client = OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


class Person(BaseModel):
    name: str
    age: int


ask = [{"role": "user", "content": "What is the capital of France?"}]
chat = client.chat.completions.create(model=model, messages=ask, temperature=0, max_tokens=20)
with client.chat.completions.stream(model=model, messages=ask, temperature=0, max_tokens=20) as stream:
    streamed = "".join(event.delta for event in stream if event.type == "content.delta")
parsed = client.chat.completions.parse(
    model=model,
    messages=[{"role": "user", "content": "Alice is 31 years old. Who is it?"}],
    response_format=Person,
    temperature=0,
    max_tokens=100,
)
response = client.responses.create(
    model=model, input="What is the capital of France?", temperature=0, max_output_tokens=20
)
completion = client.completions.create(model=model, prompt="One, two, three,", max_tokens=6, temperature=0)
vectors = client.embeddings.create(model=encoder, input=["water", "wheel"])
print(
    json.dumps(
        {
            "models": [found.id for found in client.models.list()],
            "chat": chat.choices[0].message.content,
            "streamed": streamed,
            "parsed": parsed.choices[0].message.parsed.model_dump(),
            "response": response.output_text,
            "completion": completion.choices[0].text,
            "dimensions": [len(vector.embedding) for vector in vectors.data],
        }
    )
)
