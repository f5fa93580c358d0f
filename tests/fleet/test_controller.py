"""Machines and their controller on a virtual clock: replicas are placed, replaced and scaled (R-OPS-4). No process is
started here."""

from __future__ import annotations

import asyncio

import pytest

from penstock.errors import PenstockError
from penstock.fleet.gateway_side import FleetScaler
from penstock.fleet.machine_process import beside, restore_models
from penstock.fleet.records import (
    Assignment,
    CommandRecord,
    Device,
    LoadRecord,
    ModelRecord,
    key,
)
from penstock.fleet.registry import MemoryRegistry
from penstock.fleet.topology import topology
from penstock.fleet.view import FleetView
from penstock.protocol.control import Loads, ModelLoad
from tests.fleet.machines import LEASE_S, REBALANCE_S, World, world
from tests.virtual_time import run_in_virtual_time


def test_a_lost_machine_is_replaced_and_is_not_doubled_when_it_comes_back() -> None:
    async def run() -> None:
        async with world("a", "b", "c") as it:
            await it.want(3)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1, "c": 1})
            await it.kill("b")
            await it.until(lambda: sum(it.ready().values()) == 3)
            assert "b" not in it.ready()
            # It comes back with the engine that it still runs, as after a cut of its network.
            back = it.join("b")
            await back.replicas.take_on({"name": "m"})
            back.replicas.adjust("m", 1)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1, "c": 1})
            await asyncio.sleep(LEASE_S)
            assert len(it.memory.snapshot().engines) == 3

    run_in_virtual_time(run())


def test_another_controller_takes_over() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(1)
            await it.until(lambda: sum(it.ready().values()) == 1)
            leader, term = it.memory.snapshot().controller, it.memory.snapshot().term
            await it.kill(leader)
            (left,) = it.nodes
            await it.until(lambda: it.ready() == {left: 1})
            assert it.memory.snapshot().controller == left and it.memory.snapshot().term == term + 1

    run_in_virtual_time(run())


def test_scaling_restarting_and_draining_over_machines() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(1)
            await it.until(lambda: sum(it.ready().values()) == 1)
            operations = it.nodes["a"].operations
            await operations.scale("m", 3)
            assert sum(it.ready().values()) == 3
            with pytest.raises(PenstockError, match="no machine has room for 1 more replica"):
                await operations.scale("m", 5)
            await operations.scale("m", 2)
            assert it.ready() == {"a": 1, "b": 1}
            await operations.restart("m")
            await operations.drain("m", "b.0")
            assert it.ready() == {"a": 1}
            with pytest.raises(PenstockError, match="only running replica"):
                await operations.drain("m", "a.0")
            await operations.restart("m", "b.0")
            assert it.ready() == {"a": 1, "b": 1}
            with pytest.raises(PenstockError, match=r"no replica `z\.0`"):
                await operations.restart("m", "z.0")
            await operations.load({"name": "n", "source": "n"})
            assert len([one for one in it.memory.snapshot().engines.values() if one.model == "n"]) == 1
            await operations.unload("n")
            assert "n" not in it.memory.snapshot().models and sum(it.ready().values()) == 2
            await it.until(lambda: all("n" not in node.replicas.models for node in it.nodes.values()))
            assert not it.memory.snapshot().commands and await settled(it)

    async def settled(it: World) -> bool:
        await it.until(lambda: not it.memory.snapshot().outcomes)
        return True

    run_in_virtual_time(run())


def test_what_was_said_before_cannot_be_said_again_by_others() -> None:
    """Records are signed, but whoever writes to the registry can put back what was there once."""

    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(2)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1})
            machine, stranger = it.nodes["b"], MemoryRegistry(it.memory)
            now = asyncio.get_running_loop().time()
            command = CommandRecord(id="x", machine="b", verb="leave", at=now - 600)
            await stranger.publish(command)
            await it.until(lambda: "x" in it.memory.snapshot().outcomes)
            assert "clocks" in it.memory.snapshot().outcomes["x"].error and not machine.machine.leaving
            await stranger.withdraw(command)
            old = Assignment(machine="b", models={}, term=it.memory.term - 1)
            it.memory.records[key(old)] = (old, stranger)
            it.memory.changed()
            await asyncio.sleep(30)
            assert it.ready() == {"a": 1, "b": 1}

    run_in_virtual_time(run())


def test_a_machine_that_leaves_is_replaced_first() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(2)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1})
            await it.nodes["a"].operations.leave("b", 120.0)
            least = 2
            while not it.nodes["b"].processes.stopping:
                least = min(least, sum(it.ready().values()))
                await asyncio.sleep(0.1)
            assert least == 2 and it.ready() == {"a": 2}

    run_in_virtual_time(run())


def test_what_a_machine_cannot_start_is_started_elsewhere() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            it.nodes["a"].processes.broken = True
            await it.want(2)
            await it.until(lambda: it.ready() == {"b": 2})
            assert "out of memory" in it.memory.snapshot().machines["a"].problems["m"]

    run_in_virtual_time(run())


def test_a_registry_without_data_stops_nothing() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(2)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1})
            for name in [name for name, (record, _) in it.memory.records.items() if record.lasting]:
                del it.memory.records[name]
            it.memory.changed()
            await asyncio.sleep(3 * LEASE_S)
            assert it.ready() == {"a": 1, "b": 1}
            await it.want(2)
            async with beside(restore_models(it.client, it.nodes["a"].view), "models"):
                await asyncio.sleep(2.0)
                del it.memory.records["model:m"]
                it.memory.changed()
                await it.until(lambda: "m" in it.memory.snapshot().models)
            await asyncio.sleep(3 * LEASE_S)
            assert it.ready() == {"a": 1, "b": 1}

    run_in_virtual_time(run())


def test_load_adds_replicas_on_other_machines_and_idleness_takes_them_away() -> None:
    async def run() -> None:
        async with world("a", "b", "c", room=1) as it:
            autoscale = {"min": 1, "max": 3, "stabilisation_s": 5, "scale_down_cooldown_s": 2, "concurrency": 4}
            await it.want(1, autoscale=autoscale)
            await it.until(lambda: sum(it.ready().values()) == 1)
            scaler = FleetScaler(it.client, FleetView(it.client), "a")

            async def load(running: int, queued: int) -> None:
                slots = 4 * sum(it.ready().values())
                loads = Loads({"m": ModelLoad(in_flight=running, queued=queued, slots=slots, predicted_wait_s=5.0)})
                await it.client.publish(LoadRecord(gateway="a/1", loads=loads))

            for _ in range(20):
                await load(12, 20)
                await asyncio.sleep(1.0)
            assert it.ready() == {"a": 1, "b": 1, "c": 1}
            decision = it.memory.snapshot().decisions[it.memory.snapshot().controller]
            assert decision.scaling["m"].desired == 3 and decision.wanted == {"m": 3}
            with pytest.raises(PenstockError, match="scaled automatically"):
                await it.nodes["a"].operations.scale("m", 2)
            for _ in range(30):
                await load(0, 0)
                await asyncio.sleep(1.0)
            assert sum(it.ready().values()) == 1
            await it.nodes["a"].operations.set_limits("m", 2, None)
            await load(0, 0)
            await it.until(lambda: sum(it.ready().values()) == 2)
            assert scaler.state().models == {}, "it has not looked yet"

    run_in_virtual_time(run())


def test_gateways_get_the_engines_of_other_machines() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(2)
            await it.until(lambda: it.ready() == {"a": 1, "b": 1})
            found = topology(it.memory.snapshot(), besides="a")
            assert [replica.name for replica in found.models["m"]] == ["b.0"]
            assert found.loaded["m"]["name"] == "m"

    run_in_virtual_time(run())


def slots(it: World) -> dict[str, int]:
    """Ready replicas by machine and variant."""
    found: dict[str, int] = {}
    for engine in it.memory.snapshot().engines.values():
        if engine.state == "ready":
            where = f"{engine.machine}: {engine.variant}"
            found[where] = found.get(where, 0) + 1
    return found


def test_the_replicas_of_pools_are_placed_scaled_and_replaced() -> None:
    async def run() -> None:
        async with world("a", "b", room=3) as it:
            pools = [{"name": "chat", "replicas": 2}, {"name": "batch", "replicas": 1, "max_running": 4}]
            rules = [{"pool": "chat"}, {"pool": "batch", "tiers": ["a tier that machines do not know"]}]
            await it.want(3, pools=pools, pool_rules=rules, fallback=["somewhere"])
            await it.until(lambda: sum(it.ready().values()) == 3)
            assert slots(it)["a: pool chat"] == slots(it)["b: pool chat"] == 1
            operations = it.nodes["a"].operations
            with pytest.raises(PenstockError, match="has the pools chat, batch"):
                await operations.scale("m", 4)
            await operations.scale("m", 3, "batch")
            assert {where.partition(": ")[2] for where in slots(it)} == {"pool chat", "pool batch"}
            assert sum(it.ready().values()) == 5
            found = topology(it.memory.snapshot())
            assert sorted(replica.pool for replica in found.models["m"]) == ["batch"] * 3 + ["chat"] * 2
            await operations.scale("m", 1, "batch")
            await it.kill("b")
            await it.until(lambda: slots(it) == {"a: pool chat": 2, "a: pool batch": 1})

    run_in_virtual_time(run())


def test_roles_grids_and_devices_go_to_machines_that_have_them() -> None:
    async def run() -> None:
        gpu = Device("gpu", 80)
        async with world(room=4) as it:
            it.join("big", room=4, devices=[gpu] * 4)
            it.join("small", room=4, devices=[gpu])
            it.join("cpu", room=4)
            roles = {"replica_grids": ["4x1", "1x1"], "replica_roles": ["prefill", "decode"]}
            await it.want(2, replicas=2, device="cuda", **roles)
            await it.until(lambda: slots(it) == {"big: prefill, 4x1": 1, "small: decode, 1x1": 1})
            with pytest.raises(PenstockError, match="prefill and decode need each other"):
                await it.nodes["big"].operations.scale("m", 1)
            await it.want(2, replica_devices=["cuda:3", "cuda:0"])
            await it.until(lambda: len(slots(it)) == 2 and "big: cuda:3" in slots(it))
            # One more of the device that only one machine has.
            await it.want(3, replica_devices=["cuda:3", "cuda:0"])
            await asyncio.sleep(5.0)
            decision = it.memory.snapshot().decisions[it.memory.snapshot().controller]
            assert "no machine has room for 1 more replica" in decision.problems["m"]

    run_in_virtual_time(run())


def test_models_that_take_turns_share_a_machine() -> None:
    async def run() -> None:
        async with world(room=3) as it:
            it.join("a", room=1, devices=[Device("gpu", 80)])
            it.join("b", room=3, devices=[Device("gpu", 80)])
            for name in ("m", "n"):
                await it.client.publish(
                    ModelRecord(name=name, description={"name": name, "time_slice": "gpu0", "device": "cuda"})
                )
            await it.until(lambda: it.ready() == {"b": 2})

    run_in_virtual_time(run())


def test_changed_settings_reach_running_replicas_one_at_a_time() -> None:
    async def run() -> None:
        async with world("a", "b") as it:
            await it.want(3)
            await it.until(lambda: sum(it.ready().values()) == 3)
            old = {engine.revision for engine in it.memory.snapshot().engines.values()}
            await it.want(3, max_running=7, aliases=["mm"])
            least, changing, said = 3, 0, set()
            while {engine.revision for engine in it.memory.snapshot().engines.values()} & old:
                engines = it.memory.snapshot().engines.values()
                least = min(least, sum(engine.state == "ready" for engine in engines))
                changing = max(changing, sum(engine.state == "starting" for engine in engines))
                said |= set(it.memory.snapshot().decisions[it.memory.snapshot().controller].rollouts.values())
                await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() < 120
            assert changing == 1, "one at a time"
            assert least == 2, "a full machine stops one first"
            assert "2 of 3 replicas have the new settings" in said
            await it.until(lambda: sum(it.ready().values()) == 3)
            assert topology(it.memory.snapshot()).loaded["m"]["max_running"] == 7
            # What no engine reads changes no engine.
            ids = {id(unit) for node in it.nodes.values() for unit, _ in node.replicas.units}
            await it.want(3, max_running=7, aliases=["other"], input_price=3.0)
            await asyncio.sleep(30.0)
            assert ids == {id(unit) for node in it.nodes.values() for unit, _ in node.replicas.units}

    run_in_virtual_time(run())


@pytest.mark.parametrize("room", [2, 4])
def test_settings_that_cannot_start_stop_nothing(room: int) -> None:
    async def run() -> None:
        async with world("a", "b", room=room) as it:
            await it.want(4)
            await it.until(lambda: it.ready() == {"a": 2, "b": 2})
            old = {engine.revision for engine in it.memory.snapshot().engines.values()}
            for node in it.nodes.values():
                node.processes.broken = True
            await it.want(4, max_running=7)
            await asyncio.sleep(60.0)
            await it.until(lambda: sum(it.ready().values()) == 4)
            assert {engine.revision for engine in it.memory.snapshot().engines.values()} == old
            problems = [machine.problems for machine in it.memory.snapshot().machines.values()]
            assert sum(map(bool, problems)) <= 1, "no further machine begins"
            stopped = sum(node.processes.paused for node in it.nodes.values())
            assert stopped <= (2 if room == 2 else 0), "none is stopped in vain again and again"
            # The old settings again: nothing is left to do.
            for node in it.nodes.values():
                node.processes.broken = False
            await it.want(4)
            await asyncio.sleep(30.0)
            decision = it.memory.snapshot().decisions[it.memory.snapshot().controller]
            assert sum(it.ready().values()) == 4 and not decision.rollouts

    run_in_virtual_time(run())


def test_a_machine_that_joins_takes_replicas_over_one_at_a_time() -> None:
    async def run() -> None:
        async with world("a", room=8) as it:
            await it.want(6)
            await it.until(lambda: it.ready() == {"a": 6})
            it.join("b", room=8)
            it.join("c", room=8)
            least, most, begun = 6, 6, asyncio.get_running_loop().time()
            while it.ready() != {"a": 2, "b": 2, "c": 2}:
                least, most = min(least, sum(it.ready().values())), max(most, sum(it.ready().values()))
                await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() < begun + 400, it.ready()
            assert (least, most) == (6, 7), "the new one first, then the old one"
            assert asyncio.get_running_loop().time() - begun >= 4 * REBALANCE_S, "at a bounded rate"
            await asyncio.sleep(5 * REBALANCE_S)
            assert it.ready() == {"a": 2, "b": 2, "c": 2} and len(it.memory.snapshot().engines) == 6, "and then no more"

    run_in_virtual_time(run())


def test_a_move_whose_target_or_controller_is_lost_costs_no_replica() -> None:
    async def run() -> None:
        async with world("a", room=8) as it:
            await it.want(4)
            await it.until(lambda: it.ready() == {"a": 4})
            it.join("b", room=8)
            decided = lambda: it.memory.snapshot().decisions.get(it.memory.snapshot().controller)  # noqa: E731
            await it.until(lambda: bool(decided() and decided().moves), 120)
            await it.kill("b")
            await it.until(lambda: it.ready() == {"a": 4})
            least = 4
            broken = it.join("b", room=8)
            broken.processes.broken = True
            for _ in range(1200):
                least = min(least, sum(it.ready().values()))
                await asyncio.sleep(0.1)
            assert least == 4 and it.ready() == {"a": 4}

    run_in_virtual_time(run())
