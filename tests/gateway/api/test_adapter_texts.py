"""Adapters with tokens, a tokenizer and a chat template of their own, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.adapters.spec import AdapterSpec
from penstock.sources.adapters import adapter_folder
from penstock.text import load_text
from penstock.text.adapter_text import AdapterTexts, adapter_text
from tests.engine.adapters.test_end_rows import write_saved
from tests.engine.tiny import write_checkpoint
from tests.gateway.api.test_adapters import serving

OWN, CALL, END = 199, 199, 200


def words(*added: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(OWN)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=text == "<end>") for text in added])
    return tokenizer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint("llama-gqa", tmp_path_factory.mktemp("texts") / "base")
    words().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "w1 {{ messages[0].content }}"}))
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    folder = write_saved(base.parent / "adapter", base, count=OWN + 2)
    words("<call>", "<end>").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "chat_template.jinja").write_text("<call> {{ messages[0].content }} {{ eos_token }}")
    return folder


async def post(client: httpx.AsyncClient, path: str, status: int = 200, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_requests_for_an_adapter_use_its_tokenizer(base: Path, adapter: Path, tmp_path: Path) -> None:
    text = load_text(base)
    texts = AdapterTexts(text, base, adapter_folder)
    plain = write_saved(tmp_path / "plain", base, modules=())
    specs = [AdapterSpec("calls", str(adapter)), AdapterSpec("plain", str(plain))]
    async with serving(base, text, *specs, texts=texts) as client:
        for model, ids in (("calls", [3, CALL]), ("plain", [3, 0]), ("tiny", [3, 0])):
            found = await post(client, "/tokenize", model=model, prompt="w3 <call>", add_special_tokens=False)
            assert found["tokens"] == ids, model
        chat = [{"role": "user", "content": "w5"}]
        found = await post(client, "/tokenize", model="calls", messages=chat)
        assert found["tokens"] == [CALL, 5, END]
        wanted = {"model": "calls", "prompt": "w3 <call> w4", "max_tokens": 4, "temperature": 0}
        bias = {str(CALL): 100}
        got = await post(client, "/v1/completions", **wanted, logit_bias=bias, logprobs=1)
        choice = got["choices"][0]
        assert choice["text"] == "<call>" * 4 and choice["logprobs"]["tokens"] == ["<call>"] * 4
        assert got["usage"]["prompt_tokens"] == 3
        got = await post(client, "/v1/completions", **wanted, logit_bias=bias, stop=["<call><call>"])
        assert got["choices"][0]["text"] == "" and got["choices"][0]["finish_reason"] == "stop"
        got = await post(client, "/v1/completions", **wanted, logit_bias={str(END): 100})
        assert got["choices"][0]["text"] == "" and got["choices"][0]["finish_reason"] == "stop"
        await post(client, "/v1/completions", 400, **{**wanted, "model": "tiny", "prompt": [1, CALL]})
        await post(client, "/v1/completions", 400, **{**wanted, "model": "plain", "prompt": [1, CALL]})
        got = await post(client, "/v1/chat/completions", model="calls", messages=chat, max_tokens=2)
        assert got["usage"]["prompt_tokens"] == 3


async def test_one_that_is_loaded_later(base: Path, adapter: Path) -> None:
    text = load_text(base)
    settings = {"adapter_slots": 2, "adapter_tokens": 4}
    async with serving(base, text, texts=AdapterTexts(text, base, adapter_folder), **settings) as client:
        await post(client, "/v1/admin/adapters", name="late", source=str(adapter))
        found = await post(client, "/tokenize", model="late", prompt="<call>", add_special_tokens=False)
        assert found["tokens"] == [CALL]
        got = await post(client, "/v1/completions", model="late", prompt="<call>", max_tokens=2)
        assert got["usage"]["prompt_tokens"] == 1


def test_what_is_the_models_own_is_not_kept_twice(base: Path, adapter: Path, tmp_path: Path) -> None:
    text = load_text(base)
    words().save(str(tmp_path / "tokenizer.json"))
    assert adapter_text(tmp_path, text, base) is text
    (tmp_path / "chat_template.jinja").write_text(text.template_source)
    assert adapter_text(tmp_path, text, base) is text
    (tmp_path / "chat_template.jinja").write_text("w7 {{ messages[0].content }}")
    changed = adapter_text(tmp_path, text, base)
    assert changed.encode_chat([{"role": "user", "content": "w5"}]) == [7, 5]
    texts = AdapterTexts(text, base, adapter_folder)
    assert texts.of(str(tmp_path)) is texts.of(str(tmp_path)) and texts.of("nowhere") is text
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(Exception, match="cannot be read"):
        texts.of(str(tmp_path))
