"""`penstock webhooks` against a gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import PenstockError
from tests.gateway.conftest import Serving, serving, text
from tests.gateway.webhooks.test_operator import registered
from tests.gateway.webhooks.test_webhooks import Receiver, receiver, settings

__all__ = ["receiver", "serving", "text"]


async def test_endpoints_are_shown_tested_and_disabled(serving: Serving, tmp_path: Path, receiver: Receiver) -> None:
    async with serving(**settings(tmp_path)) as running:
        url = ("--url", f"http://127.0.0.1:{running.port}")

        async def webhooks(*words: str) -> str:
            result = await asyncio.to_thread(CliRunner().invoke, app, ["webhooks", *words, *url])
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            assert result.exit_code == 0, result.output
            return result.output

        assert "No webhook endpoints." in await webhooks("list")
        id = await registered(running, receiver.url)
        (row,) = json.loads(await webhooks("list", "-o", "json"))
        assert row["endpoint"] == id and row["state"] == "unused" and row["url"] == receiver.url
        assert "It was told of everything." in await webhooks("show", id)
        assert await webhooks("test", id) == f"{id} replied to batch.failed with status 200\n"
        receiver.statuses = [500]
        with pytest.raises(PenstockError, match="with status 500"):
            await webhooks("test", id, "--event-type", "response.failed")
        assert receiver.types == ["batch.failed", "response.failed"]
        assert "  disabled  " in await webhooks("disable", id)
        assert id in await webhooks("list", "--state", "disabled") and id not in await webhooks("list", "--tenant", "x")
        assert "  unused  " in await webhooks("enable", id)
        assert await webhooks("resend", id) == f"{id}: 0 deliveries sent again\n"
        assert await webhooks("delete", id) == f"{id} deleted\n"
        with pytest.raises(PenstockError, match="There is no webhook endpoint"):
            await webhooks("show", id)
