"""The rank that slots are made for when none is configured: that of the adapters that are listed (R-ENG-8)."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.config.models import ModelConfig
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.backend import Backend
from penstock.engine.config import EngineConfig
from penstock.engine.startup.adapters import adapter_rank, row_count, token_count
from penstock.errors import SourceError
from penstock.sources import adapters, hub
from penstock.sources.adapters import TextFetcher, adapter_folder, needs_of_listed
from penstock.sources.hub import HubSource
from tests.sources.test_hub import Hub
from tests.sources.test_hub import hub as hub_server
from tests.sources.test_object_store import Store, store

__all__ = ["hub_server", "store"]


def written(folder: Path, rank: Any) -> AdapterSpec:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return AdapterSpec(folder.name, str(folder))


def test_the_largest_listed_rank_counts_and_what_cannot_be_read_does_not(tmp_path: Path) -> None:
    small, large = written(tmp_path / "small", 4), written(tmp_path / "large", 64)
    huge, odd, none = written(tmp_path / "huge", 4096), written(tmp_path / "odd", "8"), AdapterSpec("none", "nowhere")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "adapter_config.json").write_text("[]")
    strange = AdapterSpec("list", str(tmp_path / "list"))
    for listed, rank in (
        ([], 16), ([small], 16), ([small, large], 64), ([huge], 512), ([odd, none, strange], 16)
    ):  # fmt: skip
        assert needs_of_listed(listed).rank == rank
        assert adapter_rank(EngineConfig(model="m", adapters=tuple(listed))) == rank
    assert adapter_rank(EngineConfig(model="m", adapters=(large,), adapter_rank=8)) == 8, "what is set is a limit"
    assert ModelConfig(source="m").engine_config("m").adapter_rank is None


def test_of_adapters_elsewhere_only_the_configuration_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    asked: list[str] = []

    def fetch(source: HubSource, name: str, folder: Path) -> Path:
        asked.append(f"{source.repository} {name}")
        if source.repository == "org/gone":
            raise SourceError("no answer from the hub")
        (folder / name).write_text(json.dumps({"r": 48}))
        return folder / name

    monkeypatch.setattr(hub, "fetch_file", fetch)
    listed = [AdapterSpec("a", "hf:org/a"), AdapterSpec("gone", "hf:org/gone"), written(tmp_path / "here", 20)]
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        assert needs_of_listed(listed).rank == 48
    assert sorted(asked) == ["org/a adapter_config.json", "org/gone adapter_config.json"]
    assert "the rank of adapter gone is not known (no answer from the hub)" in caplog.text


def test_virtual_tokens_of_adapters_elsewhere_have_room(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their configuration says how many they are, so `adapter_tokens` need not be set."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name, kind, count in (("prompt", "PROMPT_TUNING", 100), ("prefix", "PREFIX_TUNING", 30), ("lora", "LORA", 0)):
        config = {"peft_type": kind, "num_virtual_tokens": count, "r": 8}
        store.files[f"/bucket/{name}/adapter_config.json"] = (json.dumps(config).encode(), f'"{name}"')
    listed = tuple(AdapterSpec(name, f"s3://bucket/{name}") for name in ("prompt", "prefix", "lora"))
    needs = needs_of_listed(listed)
    assert sorted(needs.elsewhere) == [(0, 0), (30, 30), (100, 0)]
    config = EngineConfig(model="m", adapters=listed, adapters_elsewhere=needs.elsewhere)
    assert token_count(config, 1000) == 100
    assert token_count(replace(config, adapter_tokens=7), 1000) == 7, "what is set is a limit"
    assert row_count(config, cast(Backend, SimpleNamespace(in_host_memory=False))) == 100
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "nothing else was fetched"


def test_a_hub_that_does_not_answer_holds_up_the_start_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(adapters, "_LOOKUP_S", 0.05)
    monkeypatch.setattr(hub, "fetch_file", lambda *_: never.wait(30))
    with caplog.at_level(logging.WARNING, "penstock.engine"):
        assert needs_of_listed([AdapterSpec("a", "hf:org/a")]).rank == 16
    never.set()
    assert "no answer in time" in caplog.text


def test_text_of_an_adapter_in_a_bucket_is_fetched_and_asked_for_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    now = 0.0
    fetcher, source = TextFetcher(lambda: now), "s3://bucket/a/b"
    store.files = {"/bucket/a/b/tokenizer.json": (b"{}", '"1"'), "/bucket/a/b/adapter_model.safetensors": (b"x", '"w"')}
    assert adapter_folder(source) is None
    fetch = fetcher.due(source)
    assert fetch is not None and fetcher.due(source) is None, "handed out once"
    fetch()
    folder = adapter_folder(source)
    assert folder is not None and (folder / "tokenizer.json").read_bytes() == b"{}"
    assert not (folder / "adapter_model.safetensors").exists()
    store.files["/bucket/a/b/chat_template.jinja"] = (b"hi", '"2"')
    assert fetcher.due(source) is None
    now = 60.0
    fetch = fetcher.due(source)
    assert fetch is not None
    fetch()
    assert (folder / "chat_template.jinja").read_bytes() == b"hi"
    now, store.status = 120.0, 403
    fetch = fetcher.due(source)
    assert fetch is not None
    fetch()  # what was there stays
    assert (folder / "chat_template.jinja").read_bytes() == b"hi"


def test_text_of_an_adapter_on_a_hub_is_fetched_once_without_its_weights(hub_server: Hub) -> None:
    hub_server.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "tokenizer.json": b"{}"}
    now = 0.0
    fetcher = TextFetcher(lambda: now)
    fetch = fetcher.due("hf:org/name")
    assert fetch is not None
    fetch()
    folder = adapter_folder("hf:org/name")
    assert folder is not None
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "penstock.json", "tokenizer.json"]
    now = 60.0
    assert fetcher.due("hf:org/name") is None
    assert TextFetcher().due(str(folder)) is None, "a folder is read where it is"
    assert TextFetcher().due("hf:misspelt") is None, "who asks for its text is told why there is none"
