"""Gateways learn through the engine what others sent to it, and agree on versions with it."""

from __future__ import annotations

from penstock.engine.kv.block_hash import DIGEST_SIZE
from penstock.engine_host.placements import AT_ONCE, MOST, Placements
from penstock.protocol.messages import Goodbye, Hello, Placed, Placement, Ready
from penstock.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from tests.engine_host.client import connected, serving
from tests.engine_host.scripted import ScriptedEngine


def note(number: int, blocks: int = 1) -> Placement:
    return Placement(bytes([number % 256]) * DIGEST_SIZE * blocks, "tenant", str(number))


def test_what_one_gateway_sent_the_others_hear_and_a_new_one_is_told() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as one, connected(running.endpoint) as two:
        one.hello()
        two.hello()
        one.send(Placed([note(1)]))
        assert two.until(Placed) == Placed([note(1)])
        one.send(Goodbye())
        with connected(running.endpoint) as late:
            late.hello()
            assert late.until(Placed) == Placed([note(1)]), "it takes over from one that died"


def test_a_gateway_of_the_release_before_is_served_without_what_it_does_not_know() -> None:
    with serving(ScriptedEngine()) as running, connected(running.endpoint) as one, connected(running.endpoint) as old:
        one.hello()
        old.send(Hello("old", OLDEST_VERSION))
        ready = old.until(Ready)
        assert isinstance(ready, Ready) and ready.version == OLDEST_VERSION
        one.send(Placed([note(1)]))
        old.submit("a")
        assert old.finish("a")[1].finish_reason == "length"
        old.send(Hello("old", PROTOCOL_VERSION))  # silent: it is registered


def test_no_more_is_remembered_than_the_cache_holds() -> None:
    kept = Placements()
    kept.add([note(number, blocks=10) for number in range(20)], capacity=50)
    found = [placement.session for message in kept.messages() for placement in message.placements]
    assert found == ["15", "16", "17", "18", "19"]
    kept.add([note(number) for number in range(MOST + 10)], capacity=0)
    assert len(list(kept.messages())) == MOST // AT_ONCE
    kept.clear()
    assert not list(kept.messages())
