"""The shared secret of a fleet: keys of engines and gateways, signatures, change without a pause."""

import stat
from pathlib import Path

import pytest
import zmq

from penstock.errors import ConfigError
from penstock.protocol import fleet_secret
from penstock.protocol.fleet_secret import FleetSecret
from penstock.protocol.transport import CurveClient, Listener

OLD, NEW = "old-" * 10, "new-" * 10


def answered(engine: FleetSecret, client: CurveClient) -> bool:
    """Whether an engine of one fleet hears a client with these keys."""
    with Listener("tcp://127.0.0.1:*", curve=engine.engine()) as listener:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            client.apply(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(listener.endpoint)
            socket.send(b"hello")
            return bool(listener.socket.poll(300 if client.server_public_key != engine.engine_public_key else 10_000))
        finally:
            socket.close()
            context.term()


def test_who_has_the_secret_is_heard_and_nobody_else() -> None:
    ours, theirs = FleetSecret((OLD,)), FleetSecret((NEW,))
    assert answered(ours, ours.gateway())
    assert not answered(ours, theirs.gateway())
    with pytest.raises(ConfigError, match="not of this fleet"):
        theirs.gateway(ours.engine_public_key)


def test_a_secret_changes_without_a_pause() -> None:
    both = FleetSecret((NEW, OLD))  # a machine that was restarted with the new secret in front
    before = FleetSecret((OLD,))
    assert answered(both, before.gateway(before.engine_public_key)) is False, "it must use the key of the record"
    with pytest.raises(ConfigError):
        before.gateway(both.engine_public_key)
    assert answered(before, both.gateway(before.engine_public_key)), "an older engine, a newer gateway"
    assert both.verify(b"record", before.sign(b"record"))
    assert not before.verify(b"record", both.sign(b"record"))
    assert not both.verify(b"other", both.sign(b"record"))


def test_a_secret_is_read_and_written_with_care(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    fleet_secret.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert FleetSecret.read(str(file), {}).secrets == (file.read_text().strip(),)
    assert FleetSecret.read(str(file), {fleet_secret.VARIABLE: OLD}).secrets == (OLD,)
    assert OLD not in repr(FleetSecret((OLD,)))
    with pytest.raises(ConfigError, match="File exists"):
        fleet_secret.write(file)
    with pytest.raises(ConfigError, match="penstock fleet secret FILE"):
        FleetSecret.read("", {})
    with pytest.raises(ConfigError, match="too short"):
        FleetSecret.read("", {fleet_secret.VARIABLE: "abc"})
