"""Outlines: types, choices, patterns, schemas and grammars, through its OpenAI, vLLM and SGLang backends.
Arguments: base URL with /v1, model."""

import json
import re
import sys
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex
from pydantic import BaseModel, ConfigDict, Field

url, name = sys.argv[1:3]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
vllm = outlines.from_vllm(client, name)
sglang = outlines.from_sglang(client, name)
plain = outlines.from_openai(client, name)
said = {
    "choice": vllm("Is the sky blue?", Literal["yes", "no"], max_tokens=5),
    "int": vllm("How many legs has a cat?", int, max_tokens=4),
    "regex": vllm("A phone number.", Regex(r"[0-9]{3}-[0-9]{4}"), max_tokens=20),
    "person": json.loads(vllm("Invent a person.", Person, max_tokens=60)),
    "grammar": vllm("Yes or no?", CFG('root ::= "yes" | "no"'), max_tokens=5),
    "lark": vllm("Yes or no?", CFG('start: "yes" | "no"'), max_tokens=5),
    "streamed": "".join(vllm.stream("A number.", Regex(r"[0-9]{4}"), max_tokens=10)),
    "sglang regex": sglang("A year.", Regex(r"(19|20)[0-9]{2}"), max_tokens=10),
    "sglang person": json.loads(sglang("Invent a person.", Person, max_tokens=60)),
    "sglang grammar": sglang("Yes or no?", CFG('root ::= "yes" | "no"'), max_tokens=5),
    "openai person": json.loads(plain("Invent a person.", Person, max_tokens=60)),
}
for key in ("person", "sglang person", "openai person"):
    Person.model_validate(said[key])
assert re.fullmatch(r"-?[0-9]+", said["int"])
print(json.dumps(said))
