"""`penstock serve` with a model that no family describes: through transformers, asked by the OpenAI SDK (R-ENG-17)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.e2e.test_supervisor import Server
from tests.engine.foreign import write_foreign
from tests.engine.tiny import Reference

pytestmark = pytest.mark.slow
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SCHEMA = {"type": "object", "properties": {"n": {"const": 7}}, "required": ["n"], "additionalProperties": False}


def write_tokenizer(folder: Path) -> Tokenizer:
    """Every byte is a token."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_foreign("gpt2", tmp_path_factory.mktemp("gpt2"), vocab_size=257, eos_token_id=256)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    model = {"source": str(folder), "name": "tiny", "max_running": 4, "num_blocks": 64, "dtype": "float32"}
    config = folder / "penstock.yaml"
    config.write_text(json.dumps({"models": [{**model, "device": "cpu", "threads": 1}]}))
    server = Server("-c", str(config), defaults=False)
    try:
        server.wait_for("curl http")
        yield server
    finally:
        server.close()


def test_the_sdk_gets_the_librarys_tokens(server: Server, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    prompt = "a model of another kind"
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
    )
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    assert answer.usage is not None and answer.usage.prompt_tokens == len(ids)
    expected = Reference(folder).model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert answer.choices[0].text == tokenizer.decode(expected[0, len(ids) :].tolist())
    streamed = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=8, stream=True
    )
    assert [chunk.choices[0].finish_reason for chunk in streamed if chunk.choices][-1] in ("length", "stop")
    json_answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=200,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": {
                    "type": "object",
                    "properties": {"n": {"const": 7}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
        },
    )
    assert json.loads(json_answer.choices[0].message.content or "").get("n") == 7


def test_it_is_said_what_runs_the_model(server: Server) -> None:
    model = httpx.get(f"{server.url}/v1/models/tiny").json()
    assert model["runs_through"] == "transformers"
    assert any("runs through transformers" in line for line in server.lines)
