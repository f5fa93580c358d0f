"""Engines are added, removed and restarted while the server runs, over the control socket (R-OPS-1)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.config import Config, ModelConfig
from penstock.config.load import check_model
from penstock.config.variants import Variant
from penstock.errors import PenstockError
from penstock.gateway.process.supervisor_link import SupervisorLink
from penstock.protocol.control import Drain, LoadModel, Restart, Scale, Stop, Topology, UnloadModel
from penstock.protocol.errors import InvalidRequest, ServiceUnavailable
from penstock.supervisor import replicas as module
from penstock.supervisor.catalogue import ModelCatalogue
from penstock.supervisor.child import STATUS_FD
from penstock.supervisor.control import ControlServer
from penstock.supervisor.replicas import Replicas
from penstock.supervisor.runtime import RuntimeFolder
from penstock.supervisor.saved_models import SavedModels
from penstock.supervisor.supervisor import Supervisor
from penstock.supervisor.unit import Unit
from tests.supervisor.test_supervisor import alive, folder, supervised, until

__all__ = ["folder"]


@dataclass
class World:
    supervisor: Supervisor
    first: Unit
    line: SupervisorLink
    kinds: dict[int, str]
    seen: list[Topology] = field(default_factory=list)
    made: list[Unit] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [replica.name for replica in self.seen[-1].models["m"]]


class Known(ModelCatalogue):
    """Takes any model that is not called `wrong`, and fetches nothing."""

    def __init__(self) -> None:
        super().__init__(Config(), cast(RuntimeFolder, None))

    async def add(self, described: Mapping[str, Any], check_room: Callable[[int], None]) -> ModelConfig:
        model = check_model(described)
        check_room(model.replicas)
        if model.name == "odd":
            raise RuntimeError("nobody expected this")
        if model.name == "wrong":
            raise PenstockError("there is no such model")
        self.on_progress(model.name, "fetching", 0.0)
        return model


@asynccontextmanager
async def world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, saved: SavedModels | None = None
) -> AsyncIterator[World]:
    monkeypatch.setattr(module, "FOUND_S", 0.0)
    async with supervised(folder) as (supervisor, _, engine, _gateway):
        engine.model, engine.replica, engine.endpoint = "m", "0", f"ipc://{folder}/engine"
        kinds: dict[int, str] = {}

        def make(model: str, index: int, variant: Variant | None = None) -> Unit:
            run = [sys.executable, "-m", "tests.supervisor.fakes", "engine"]
            endpoint = f"ipc://{folder}/{model}-{index}"
            command = [*run, endpoint, STATUS_FD, kinds.get(index, "good")]
            unit = Unit(f"engine {index}", command, model=model, replica=str(index), endpoint=endpoint)
            it.made.append(unit)
            return unit

        async def follow(topology: Topology) -> dict[str, str]:
            it.seen.append(topology)
            if "exploding" in topology.models:
                raise ZeroDivisionError("boom")
            return {name: "its chat template is broken" for name in topology.models if name == "broken"}

        async with ControlServer(folder / "control", Replicas(supervisor, [engine], make, Known(), saved, 8)):
            line = SupervisorLink(folder / "control", follow)
            it = World(supervisor, engine, line, kinds)
            await line.start()
            await until(lambda: bool(it.seen))
            yield it
            await line.close()


async def test_models_come_and_go_and_gateways_hear_of_them_when_they_are_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, monkeypatch) as it:
        with pytest.raises(InvalidRequest, match="only model"):
            await it.line.ask(lambda number: UnloadModel(number, "m"))
        await it.line.ask(lambda number: LoadModel(number, {"source": "x", "name": "new", "replicas": 2}))
        assert [len(seen.models) for seen in it.seen] == [1, 2], "told once, when it was there"
        assert len(it.seen[-1].models["new"]) == 2 and all(unit.up.is_set() for unit in it.made)
        assert not it.line.loading, "it is over"
        with pytest.raises(InvalidRequest, match="no such model"):
            await it.line.ask(lambda number: LoadModel(number, {"source": "x", "name": "wrong"}))
        it.kinds[1] = "broken"
        with pytest.raises(InvalidRequest, match="no such model"):
            await it.line.ask(lambda number: LoadModel(number, {"source": "x", "name": "half", "replicas": 2}))
        assert "half" not in it.seen[-1].models
        assert not it.made[2].child or not it.made[2].child.alive, "one replica of two is none"
        await it.line.ask(lambda number: UnloadModel(number, "new"))
        assert list(it.seen[-1].models) == ["m"]
        assert not any(unit.child.alive for unit in it.made if unit.child is not None)


@pytest.mark.slow
async def test_models_that_were_loaded_are_there_again_after_a_restart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "models.json"
    file.write_text('{"wrong": {"source": "x", "name": "wrong"}}')
    async with world(folder, monkeypatch, SavedModels(file)) as it:
        await it.line.ask(lambda number: LoadModel(number, {"source": "x", "name": "new"}))
        await it.line.ask(lambda number: LoadModel(number, {"source": "x", "name": "brief"}))
        await it.line.ask(lambda number: UnloadModel(number, "brief"))
    async with world(folder, monkeypatch, SavedModels(file)) as it:
        await until(lambda: "new" in it.seen[-1].models)
        assert set(it.seen[-1].models) == {"m", "new"}, "what cannot be loaded hurts nobody"
        await it.line.ask(lambda number: UnloadModel(number, "new"))
    assert [model["name"] for model in SavedModels(file).models] == ["wrong"], "and is not forgotten"
    file.write_text("damaged")
    assert SavedModels(file).models == []


async def test_scaling_up_and_down_starts_and_drains_and_tells_every_gateway(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, monkeypatch) as it:
        assert it.names == ["0"]
        await it.line.ask(lambda number: Scale(number, "m", 3))
        assert it.names == ["0", "1", "2"] and all(unit.up.is_set() for unit in it.made)
        pids = [unit.child.pid for unit in it.made if unit.child is not None]
        await it.line.ask(lambda number: Scale(number, "m", 1))
        assert it.names == ["0"] and not any(alive(pid) for pid in pids)
        assert it.first.child is not None and it.first.child.alive


async def test_a_restart_renews_one_after_the_other_without_backoff(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, monkeypatch) as it:
        await it.line.ask(lambda number: Scale(number, "m", 2))
        units = [it.first, *it.made]
        before = [unit.child.pid for unit in units if unit.child is not None]
        together: list[int] = []
        restarting = asyncio.create_task(it.line.ask(lambda number: Restart(number, "m")))
        while not restarting.done():
            together.append(sum(unit.up.is_set() for unit in units))
            await asyncio.sleep(0.01)
        await restarting
        assert min(together) >= 1, "never both away at once"
        assert all(unit.up.is_set() for unit in units)
        assert not set(before) & {unit.child.pid for unit in units if unit.child is not None}


@pytest.mark.slow
async def test_a_drained_replica_stays_away_until_it_is_restarted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, monkeypatch) as it:
        await it.line.ask(lambda number: Scale(number, "m", 2))
        (second,) = it.made
        await it.line.ask(lambda number: Drain(number, "m", "1"))
        await until(lambda: second.child is not None and not second.child.alive)
        await asyncio.sleep(0.3)
        assert second.child is not None and not second.child.alive, "nobody starts it again"
        with pytest.raises(InvalidRequest, match="only running replica"):
            await it.line.ask(lambda number: Drain(number, "m", "0"))
        await it.line.ask(lambda number: Restart(number, "m", "1"))
        assert second.up.is_set()
        await it.line.ask(lambda number: Drain(number, "m", "1"))
        await it.line.ask(lambda number: Scale(number, "m", 1))
        assert it.names == ["0"]


async def test_what_cannot_be_done_is_said_and_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, monkeypatch) as it:
        it.kinds[1] = "broken"
        with pytest.raises(InvalidRequest, match="no such model"):
            await it.line.ask(lambda number: Scale(number, "m", 2))
        assert it.names == ["0"] and it.first.up.is_set()
        for wrong, says in (
            (lambda number: Scale(number, "other", 2), "serves `other`"),
            (lambda number: Scale(number, "m", 0), "replicas"),
            (lambda number: Restart(number, "m", "9"), "no replica `9`"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await it.line.ask(wrong)


async def test_the_whole_server_can_be_drained_from_a_gateway(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, monkeypatch) as it:
        await it.line.ask(lambda number: Stop(number))
        await until(lambda: it.first.child is not None and not it.first.child.alive)
        assert (folder / "drained").read_text() == "drained"
    with pytest.raises(ServiceUnavailable):
        await it.line.ask(lambda number: Stop(number))


async def test_a_model_that_gateways_cannot_serve_fails_alone_and_its_engine_stops(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(folder, monkeypatch) as it:
        with pytest.raises(InvalidRequest, match="cannot serve it: its chat template is broken"):
            await it.line.ask(lambda n: LoadModel(n, {"source": "x", "name": "broken"}))
        assert "its chat template is broken" in caplog.text
        with pytest.raises(InvalidRequest, match="supervisor failed: RuntimeError: nobody expected"):
            await it.line.ask(lambda n: LoadModel(n, {"source": "x", "name": "odd"}))
        await until(lambda: list(it.seen[-1].models) == ["m"])
        assert not any(unit.child is not None and alive(unit.child.pid) for unit in it.made)
        await it.line.ask(lambda n: Scale(n, "m", 2))
        assert it.names == ["0", "1"], "the link lives, and the next operation works"


@pytest.mark.slow
async def test_a_gateway_that_fails_in_any_way_keeps_its_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, monkeypatch) as it:
        monkeypatch.setattr(Known, "loaded", {"exploding": {}})
        with pytest.raises(InvalidRequest, match="ZeroDivisionError: boom"):
            await it.line.ask(lambda n: LoadModel(n, {"source": "x", "name": "exploding"}))
        await it.line.ask(lambda n: Scale(n, "m", 2))


async def test_more_engines_than_the_limit_are_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, monkeypatch) as it:
        for count in (100_000, 2**62):
            with pytest.raises(InvalidRequest, match="256"):
                await it.line.ask(lambda n, count=count: LoadModel(n, {"source": "x", "name": "y", "replicas": count}))
        with pytest.raises(InvalidRequest, match=r"server.max_engines \(8\)"):
            await it.line.ask(lambda n: LoadModel(n, {"source": "x", "name": "y", "replicas": 8}))
        with pytest.raises(InvalidRequest, match=r"server.max_engines \(8\)"):
            await it.line.ask(lambda n: Scale(n, "m", 9))
        assert not it.made


async def test_stopping_interrupts_an_operation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(folder, monkeypatch) as it:
        it.kinds[1] = "endless"
        scaling = asyncio.ensure_future(it.line.ask(lambda n: Scale(n, "m", 2)))
        await until(lambda: bool(it.made) and it.made[-1].child is not None)
        it.supervisor.stop()
        with pytest.raises((InvalidRequest, ServiceUnavailable), match=r"stopping|ended"):
            await asyncio.wait_for(scaling, 60)
