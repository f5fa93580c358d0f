"""Whatever a fuzzer makes of our own OpenAPI document, the server never fails (no 5xx), and what it
answers is what the document says."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from penstock.config.schema import DEFAULT_TIERS
from penstock.text import TextModel
from tests.gateway.api.test_identity import make_key
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine

pytest.importorskip("schemathesis", reason="pip install schemathesis to fuzz the API")

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LOCKS_OUT = ("change_tenant", "revoke_key")
"""A fuzzer that has seen its own tenant in a list disables it sooner or later, and then sees nothing but 401."""
ROOT = Path(__file__).resolve().parents[3]
RUNS_A_MODEL = "^/(v1/(chat|completions|responses|messages|embeddings|rerank|tokenize)|api/)"
NOT_FOR_STRANGERS = "/(drain|restart|sleep|wake|scale)$"
"""What stops the server on purpose is no failure of it."""


async def fuzz(serving: Serving, text: TextModel, folder: Path, *options: str, store: str = "store") -> str:
    """What the fuzzer says; it is a process of its own."""
    settings = {
        "store_url": f"sqlite:///{folder / store}.db",
        "default_tier": "standard",
        "tiers": DEFAULT_TIERS,
        "time_limit_s": 2.0,
        "engine_wait_s": 1.0,
    }
    async with serving(ScriptedEngine(text, "Hi."), **settings) as gateway:
        await gateway.client.post("/v1/admin/tenants", json={"id": "acme"})
        key = await make_key(gateway, scopes=["admin", "inference", "metrics"])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{gateway.port}/openapi.json"),
            *("--checks", CHECKS, "--exclude-path-regex", NOT_FOR_STRANGERS, "-H", f"Authorization: Bearer {key}"),
            *("--no-color", "--generation-deterministic", "--generation-with-security-parameters", "false", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.gateway.fuzz_hooks", "PYTHONPATH": str(ROOT)},
        )
        said, _ = await process.communicate()
        assert (await gateway.chat()).status_code in (200, 401), "it still answers"
    output = said.decode(errors="replace")
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.mark.slow
async def test_a_short_fuzz_finds_no_failure(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    """One example of every operation that runs a model; the others have theirs in the long one."""
    await fuzz(
        serving, text, tmp_path, "--phases", "fuzzing", "--max-examples", "1", "--include-path-regex", RUNS_A_MODEL
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_long_fuzz_finds_no_failure(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    phases = ("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", "100")
    await fuzz(serving, text, tmp_path, *phases, *(f"--exclude-operation-id={name}" for name in LOCKS_OUT))
    only = (f"--include-operation-id={name}" for name in LOCKS_OUT)
    await fuzz(serving, text, tmp_path, *phases, *only, store="again")
