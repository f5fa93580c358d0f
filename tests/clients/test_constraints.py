"""Libraries whose whole purpose is structured output, against the real model."""

from __future__ import annotations

import re

import pytest

from tests.clients.environment import Environment
from tests.e2e.conftest import MODEL, Server


@pytest.mark.clients("outlines", "types, patterns, models and grammars by its vLLM, SGLang and OpenAI backends")
def test_outlines(client: Environment, served: Server) -> None:
    said = client.script("outlines_types.py", f"{served.url}/v1", MODEL)
    assert {said[name] for name in ("choice", "grammar", "lark", "sglang grammar")} <= {"yes", "no"}
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", str(said["regex"]))
    assert re.fullmatch(r"[0-9]{4}", str(said["streamed"]))
    assert re.fullmatch(r"(19|20)[0-9]{2}", str(said["sglang regex"]))


@pytest.mark.clients("guidance", "choices, patterns and JSON by its vLLM backend; text by its OpenAI one")
def test_guidance(client: Environment, served: Server) -> None:
    said = client.script("guidance_session.py", f"{served.url}/v1", MODEL)
    assert said["choice"] in ("yes", "no")
    assert re.fullmatch(r"20[0-9]{2}", str(said["year"]))
    assert said["free"]
