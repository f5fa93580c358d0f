"""Clients of text-generation-inference, against the real model."""

from __future__ import annotations

import re

import pytest

from tests.clients.environment import Environment
from tests.e2e.conftest import MODEL, Server

REACHABLE = {"HF_HUB_OFFLINE": "0"}
"""With it set, this client reaches no server at all, ours neither."""


@pytest.mark.clients("huggingface-hub", "InferenceClient: text_generation, whole, streamed, with details; chat")
def test_inference_client(client: Environment, served: Server) -> None:
    said = client.script("tgi_session.py", served.url, MODEL, env=REACHABLE)
    assert "Paris" in said["whole"]
    assert said["streamed"] == said["detailed"] == said["tokens"] == said["last"] == said["whole"]
    assert said["top"] == [2] * 8 and said["reasons"] == ["length", "length"]
    assert said["stopped"] == " four, five"
    assert said["full"].startswith("One, two, three, four")
    assert re.fullmatch("[0-9]{4}", said["formed"])
    assert "`parameters.temperature`" in said["refused"] and said["chat"]


@pytest.mark.clients("text-generation", "generate and generate_stream, with details; errors by their kind")
def test_older_client(client: Environment, served: Server) -> None:
    said = client.script("tgi_session.py", served.url, MODEL, "older")
    assert "Paris" in said["whole"] and said["reason"] == "length" and said["prefill"] == 5
    assert said["streamed"] == said["last"] == " four, five"
    assert "maximum context length" in said["refused"]
