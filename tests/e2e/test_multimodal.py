"""`penstock serve` with a model that was made for images too: it answers text, and refuses images (R-ENG-17)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from tokenizers import Tokenizer

from tests.e2e.test_supervisor import Server
from tests.e2e.test_transformers import write_tokenizer
from tests.engine.multimodal import saved

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, object, Path]]:
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    model = saved("qwen2_5_vl", folder, vocab_size=257)
    write_tokenizer(folder)
    entry = {"source": str(folder), "name": "tiny", "max_running": 4, "num_blocks": 64, "dtype": "float32"}
    config = folder / "penstock.yaml"
    config.write_text(json.dumps({"models": [{**entry, "device": "cpu", "threads": 1}]}))
    server = Server("-c", str(config), defaults=False)
    try:
        server.wait_for("curl http")
        yield server, model, folder
    finally:
        server.close()


def test_the_sdk_gets_the_references_tokens(served: tuple[Server, object, Path]) -> None:
    server, model, folder = served
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("what is in no picture").ids
    answer = client.completions.create(model="tiny", prompt="what is in no picture", max_tokens=12, temperature=0)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)  # type: ignore[attr-defined]
    assert answer.choices[0].text == tokenizer.decode(expected[0, len(ids) :].tolist())


def test_it_is_listed_and_refuses_images(served: tuple[Server, object, Path]) -> None:
    server = served[0]
    listed = {model["id"]: model for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    assert listed["tiny"]["runs_through"] == "penstock" and listed["tiny"]["max_model_len"] == 1024
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "what is this?"}, image]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (
        error["param"] == "messages[0].content[1].type"
        and "only the part that reads and writes text" in error["message"]
    )
