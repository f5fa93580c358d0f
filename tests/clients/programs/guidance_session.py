"""Guidance: choices, patterns and JSON in a conversation, through its vLLM and OpenAI backends.
Arguments: base URL with /v1, model."""

import json
import sys

import guidance
from guidance import assistant, gen, models, select, system, user
from guidance.models.experimental import VLLMModel
from pydantic import BaseModel, ConfigDict, Field

url, name = sys.argv[1:3]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


said = {}
lm = VLLMModel(name, base_url=url, api_key="none", echo=False)
with system():
    lm += "You are brief."
with user():
    lm += "Is the sky blue?"
with assistant():
    lm += select(["yes", "no"], name="choice")
with user():
    lm += "And which year is it?"
with assistant():
    lm += gen(regex=r"20[0-9]{2}", name="year", max_tokens=8)
with user():
    lm += "Invent a person."
with assistant():
    lm += guidance.json(schema=Person, name="person", max_tokens=60)
said |= {"choice": lm["choice"], "year": lm["year"], "person": json.loads(lm["person"])}
Person.model_validate(said["person"])

lm = models.OpenAI(name, base_url=url, api_key="none", echo=False)
with user():
    lm += "Say something."
with assistant():
    lm += gen(name="free", max_tokens=8)
said["free"] = lm["free"]
print(json.dumps(said))
