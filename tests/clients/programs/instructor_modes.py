"""Instructor: the same answer by tools, by JSON schema and by JSON in the prompt, streamed in parts, over both APIs.
Arguments: base URL without /v1, model."""

import json
import sys

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, Field

url, model = sys.argv[1:3]


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)


question = [{"role": "user", "content": "Alice is 31 years old. Who is it?"}]
said = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    asked = {"model": model, "messages": question, "response_model": Person, "max_retries": 0, "max_tokens": 100}
    said[mode.value] = client.chat.completions.create(temperature=0, **asked).model_dump()
    *_, last = client.chat.completions.create_partial(temperature=0, **asked)
    said[f"{mode.value} in parts"] = last.model_dump()
client = instructor.from_anthropic(Anthropic(base_url=url, api_key="none", max_retries=0))
said["anthropic"] = client.messages.create(**asked).model_dump()
print(json.dumps(said))
