"""The composition root: everything that was started is closed, in reverse order, also when a later part fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.errors import PenstockError
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.app.endpoint import bind
from penstock.gateway.process import composition
from penstock.gateway.process.composition import compose
from penstock.gateway.process.endpoints import endpoints_of
from penstock.gateway.process.gateway import Gateway
from penstock.gateway.process.request_log import RequestLogOff
from penstock.gateway.process.settings import GatewaySettings, ModelSettings
from penstock.routing.encoders import Encoders
from penstock.routing.registry import ModelRegistry, ServedModel
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.scripted import ScriptedEngine

PARTS = (
    "FairThreads",
    "RequestTracing",
    "Accounts",
    "BackgroundTasks",
    "KnowledgeLibrary",
    "Guardrails",
    "Admissions",
    "TimeSlices",
    "BatchRunner",
)
"""Some of the parts, in the order of the start."""


def registry_of(text: TextModel) -> ModelRegistry:
    return ModelRegistry([ServedModel("tiny", text, InProcessBackend(ScriptedEngine(text)))])


def settings(**more: object) -> GatewaySettings:
    return GatewaySettings(models=(ModelSettings("tiny", ""),), **more)  # type: ignore[arg-type]


def closed_parts(monkeypatch: pytest.MonkeyPatch, parts: Sequence[str]) -> list[str]:
    """The names of parts in the order in which they are closed."""
    closed: list[str] = []
    for name in parts:
        kind = getattr(composition, name)
        close = kind.close

        def noting(self: object, name: str = name, close: object = close) -> object:
            closed.append(name)
            return close(self)  # type: ignore[operator]

        monkeypatch.setattr(kind, "close", noting)
    return closed


async def test_parts_are_closed_in_reverse_order(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closed_parts(monkeypatch, PARTS)
    async with compose(settings(store_url=f"sqlite:///{tmp_path}/store.db"), registry_of(text), Encoders((), ())):
        assert not closed
    assert closed == list(reversed(PARTS))


async def test_a_part_that_fails_to_start_closes_those_before_it(
    text: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = closed_parts(monkeypatch, PARTS)
    with pytest.raises(PenstockError, match="cannot reach the supervisor"):
        async with compose(
            settings(store_url=f"sqlite:///{tmp_path}/store.db"),
            registry_of(text),
            Encoders((), ()),
            tmp_path / "no such socket",
        ):
            raise AssertionError("it started")
    assert closed == list(reversed(PARTS))


@pytest.mark.parametrize("stored", [False, True])
async def test_every_endpoint_is_answered_with_and_without_a_store(
    text: TextModel, tmp_path: Path, stored: bool
) -> None:
    url = f"sqlite:///{tmp_path}/store.db" if stored else None
    async with compose(settings(store_url=url), registry_of(text), Encoders((), ())) as gateway:
        assert isinstance(gateway, Gateway)
        assert len(bind(ENDPOINTS, endpoints_of(gateway))) == len(ENDPOINTS)
        assert isinstance(gateway.request_log, RequestLogOff) == (not stored)
        assert (gateway.batch_runner is None) == (not stored)
