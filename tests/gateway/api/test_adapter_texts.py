"""Adapters with tokens, a tokenizer and a chat template of their own, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.adapters.spec import AdapterSpec
from penstock.errors import CheckpointError
from penstock.identity.access import Access
from penstock.protocol.errors import InvalidRequest
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.sources.adapters import adapter_folder
from penstock.text import adapter_text as texts_module
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
    texts.refresh(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"^tokenizer\.json cannot be read") as refused:
        texts.of(str(tmp_path))
    assert str(tmp_path) not in str(refused.value)


def own_text(folder: Path, *added: str, pad: str = "", weights: bool = True) -> Path:
    folder.mkdir()
    if weights:
        (folder / "adapter_model.safetensors").touch()
    words(*added).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad, "eos_token": pad}))
    return folder


def test_adapters_with_the_same_tokenizer_share_it(base: Path, tmp_path: Path) -> None:
    texts = AdapterTexts(load_text(base), base, adapter_folder)
    own_text(tmp_path / "a", "<pad>", pad="<pad>")
    own_text(tmp_path / "b", "<pad>", pad="<pad>")
    (tmp_path / "b" / "chat_template.jinja").write_text("w7")
    first, second = (texts.of(str(tmp_path / name)) for name in "ab")
    assert first is not second and first._tokenizer is second._tokenizer


def test_a_tokenizer_with_tokens_that_have_no_rows_is_refused(base: Path, tmp_path: Path) -> None:
    text = load_text(base)
    assert adapter_text(own_text(tmp_path / "text", "<more>", weights=False), text, base).vocab_size == OWN + 1
    padded = adapter_text(own_text(tmp_path / "padded", "<pad>", pad="<pad>"), text, base)
    assert padded.vocab_size == OWN and OWN not in padded.eos_token_ids
    with pytest.raises(CheckpointError, match="has 1 tokens behind the 199 that model and adapter have rows for"):
        adapter_text(own_text(tmp_path / "more", "<pad>", "<more>", pad="<pad>"), text, base)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_cannot_be_a_tokenizer_or_template_are_not_read(base: Path, tmp_path: Path, name: str) -> None:
    texts = AdapterTexts(load_text(base), base, adapter_folder)
    huge, queue, odd = (own_text(tmp_path / kind) for kind in ("huge", "queue", "odd"))
    with (huge / name).open("wb") as file:
        file.truncate((128 << 20) + 1)
    (queue / name).unlink(missing_ok=True)
    os.mkfifo(queue / name)  # whoever read it would wait for ever
    (odd / name).write_bytes(b"\xff\xfe{%")
    for folder, why in ((huge, "bytes, more than"), (queue, "is not a file"), (odd, "cannot be read|utf-8")):
        with pytest.raises(CheckpointError, match=why):
            texts.of(str(folder))


def test_a_source_that_could_not_be_looked_up_is_looked_up_again(base: Path) -> None:
    text, problems = load_text(base), [CheckpointError("not now")]

    def find(source: str) -> Path | None:
        if problems:
            raise problems.pop()
        return None

    texts = AdapterTexts(text, base, find)
    with pytest.raises(CheckpointError, match="not now"):
        texts.of("a")
    texts.refresh("a")
    assert texts.of("a") is text


async def test_files_are_read_off_the_event_loop_and_once(base: Path, adapter: Path) -> None:
    text, threads = load_text(base), []

    def find(source: str) -> Path | None:
        threads.append(threading.current_thread())
        return adapter_folder(source)

    texts = AdapterTexts(text, base, find)
    await asyncio.gather(*(texts.prepare(str(adapter)) for _ in range(8)))
    assert texts.of(str(adapter)) is not text
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_requests_wait_for_files_that_are_fetched_the_first_time_only(base: Path, adapter: Path) -> None:
    text, arrived, begun, go_on = load_text(base), [False], threading.Event(), threading.Event()
    due = ["first"]

    def fetch(source: str) -> Callable[[], None] | None:
        if source != "elsewhere" or not due:
            return None
        due.pop(0)

        def work() -> None:
            begun.set()
            assert go_on.wait(60)
            arrived[0] = True

        return work

    texts = AdapterTexts(text, base, lambda source: adapter if arrived[0] or source == "here" else None, fetch)
    texts.refresh("elsewhere")
    waiting = [asyncio.ensure_future(texts.prepare("elsewhere")) for _ in range(3)]
    await asyncio.to_thread(begun.wait, 60)
    due.clear()
    await texts.prepare("here")
    assert texts.of("here") is not text and not any(each.done() for each in waiting)
    go_on.set()
    await asyncio.gather(*waiting)
    assert texts.of("elsewhere") is not text
    due.append("again")
    begun.clear()
    go_on.clear()
    await texts.prepare("elsewhere")
    assert not due and texts.of("elsewhere") is not text
    go_on.set()


async def test_a_store_that_does_not_answer_holds_up_the_first_requests_only_so_long(
    base: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "WAIT_S", 0.05)
    monkeypatch.setattr(texts_module, "CHECK_S", 0.0)
    text, answers, begun = load_text(base), threading.Event(), []

    def fetch(source: str) -> Callable[[], None]:
        def work() -> None:
            begun.append(source)
            assert answers.wait(60)

        return work

    texts = AdapterTexts(text, base, lambda source: adapter if answers.is_set() else None, fetch)
    try:
        for source in ("a", "b", "a", "b", "c", "d", "e", "a"):
            await texts.prepare(source)
            assert texts.of(source) is text
    finally:
        answers.set()
        await asyncio.to_thread(texts._fetchers.shutdown)
    assert sorted(begun) == ["a", "b", "c", "d", "e"], "none is asked again before it has answered"
    texts.refresh("a")
    assert texts.of("a") is not text


def test_a_token_id_that_tables_have_no_place_for_is_refused(base: Path, tmp_path: Path) -> None:
    raw = json.loads((own_text(tmp_path / "a", weights=False) / "tokenizer.json").read_text())
    raw["model"]["vocab"]["far"] = 4_000_000_000
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="has the token id 4000000000"):
        adapter_text(tmp_path / "a", load_text(base), base)


async def test_no_request_reads_files_on_the_event_loop(base: Path, adapter: Path) -> None:
    """Another worker loaded the adapter: this one has not seen its files."""
    text, threads = load_text(base), set()

    def find(source: str) -> Path | None:
        threads.add(threading.current_thread())
        return adapter_folder(source)

    chat = [{"role": "user", "content": "w5"}]
    texts = AdapterTexts(text, base, find)
    async with serving(base, text, AdapterSpec("calls", str(adapter)), texts=texts) as client:
        for path, body in (
            ("/tokenize", {"prompt": "w1"}),
            ("/v1/completions", {"prompt": "w1", "max_tokens": 1}),
            ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
            ("/v1/messages/count_tokens", {"messages": chat}),
            ("/v1/responses", {"input": "w5", "max_output_tokens": 1}),
            ("/api/chat", {"messages": chat, "stream": False, "options": {"num_predict": 1}}),
        ):
            await post(client, path, model="calls", **body)
            assert threads and threading.current_thread() not in threads, path
            threads.clear()
            texts._known.clear()


def test_an_adapter_of_another_tenant_stays_unknown_whatever_its_files_are(base: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("nonsense")
    text = load_text(base)
    backend = cast(Any, SimpleNamespace(adapters=None))
    model = ServedModel("tiny", text, backend, adapters=("secret",), adapter_owners={"secret": "acme"})
    model.adapter_sources = {"secret": str(tmp_path)}
    model.adapter_texts = AdapterTexts(text, base, adapter_folder)
    registry = ModelRegistry([model])
    assert not registry.allows(Access("other"), "secret") and registry.allows(Access("acme"), "secret")
    with pytest.raises(InvalidRequest, match="cannot be used"):
        registry.route("secret")


def letters(*added: str, blanks: str = "\u0120\u010a") -> Tokenizer:
    """A token for each printable character, and control tokens up to the model's last and behind it."""
    known = [*blanks, *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(known)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unused = [f"<unused{i}>" for i in range(len(known), OWN - 1)]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in (*unused, "<eos>", *added)])
    return tokenizer


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint("llama-gqa", tmp_path_factory.mktemp("spelled") / "base")
    letters().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder


CALLS = (
    '{% if tools %}{{ tools[0].function.name }} <tool_call> {"name": , "arguments": } </tool_call>{% endif %}'
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


async def test_structured_output_and_tool_calls(spelled: Path, tmp_path: Path) -> None:
    """With control tokens of the adapter's own; refused where its tokenizer spells the model's tokens differently."""
    text = load_text(spelled)
    specs = []
    for name, blanks in (("calls", "\u0120\u010a"), ("other", "\u010a\u0120")):
        folder = write_saved(tmp_path / name, spelled, count=OWN + 3)
        letters("<tool_call>", "</tool_call>", "<end>", blanks=blanks).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        (folder / "chat_template.jinja").write_text(CALLS)
        specs.append(AdapterSpec(name, str(folder)))
    chat = [{"role": "user", "content": "hi"}]
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "yes"]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    formed = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    asked = {"messages": chat, "max_tokens": 200, "temperature": 1, "seed": 3}
    async with serving(spelled, text, *specs, texts=AdapterTexts(text, spelled, adapter_folder)) as client:
        path = "/v1/chat/completions"
        for bias in ({}, {str(OWN + 2): 100}, {str(OWN): 100}):
            got = await post(client, path, model="calls", **asked, response_format=formed, logit_bias=bias)
            assert json.loads(got["choices"][0]["message"]["content"])["a"] in ("x", "yes")
            assert got["choices"][0]["finish_reason"] == "stop"
            called = {"tools": [tool], "tool_choice": "required", "logit_bias": bias}
            got = await post(client, path, model="calls", **asked, **called)
            choice = got["choices"][0]
            assert choice["finish_reason"] == "tool_calls", choice
            assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["a"] in ("x", "yes")
        for more in ({"response_format": formed}, {"tools": [tool], "tool_choice": "required"}):
            refused = await post(client, path, 400, model="other", **asked, **more)
            assert "spells tokens of the model differently" in refused["error"]["message"]
        await post(client, path, model="other", **asked)
