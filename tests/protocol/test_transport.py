"""Endpoints: stale socket files are replaced, live ones respected, and the network needs keys."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.protocol.transport import (
    CurveClient,
    CurveServer,
    Listener,
    generate_keypair,
    public_key,
    write_secret_key,
)
from tests.engine_host.client import connected, serving
from tests.engine_host.scripted import ScriptedEngine


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not tmp_path: its names are too long for a socket.
    with tempfile.TemporaryDirectory(prefix="ps-") as name:
        yield Path(name)


def test_a_socket_file_left_by_a_dead_engine_is_replaced(folder: Path) -> None:
    import socket

    path = folder / "engine"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    assert path.exists()
    with serving(ScriptedEngine(), f"ipc://{path}") as running, connected(running.endpoint) as client:
        assert client.hello().info.instance == "one"


def test_a_live_engine_is_not_taken_over(folder: Path) -> None:
    with (
        Listener(f"ipc://{folder}/engine"),
        pytest.raises(ConfigError, match="another engine listens here"),
        Listener(f"ipc://{folder}/engine"),
    ):
        pass


def test_a_file_that_is_no_socket_is_left_alone(folder: Path) -> None:
    path = folder / "notes.txt"
    path.write_text("keep me")
    with pytest.raises(ConfigError, match="is not a socket"):
        Listener(f"ipc://{path}")
    assert path.read_text() == "keep me"


@pytest.mark.parametrize("endpoint", ["", "/tmp/x", "http://a", "ipc://", "ipc:///" + "x" * 200, "tcp://127.0.0.1"])
def test_a_bad_endpoint_is_a_clear_error(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        Listener(endpoint)


def test_a_port_in_use_is_a_clear_error() -> None:
    with Listener("tcp://127.0.0.1:*") as first, pytest.raises(ConfigError, match="cannot listen"):
        Listener(first.endpoint)


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "192.0.2.1", "example.org"])
def test_an_address_others_can_reach_needs_keys(address: str) -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        Listener(f"tcp://{address}:5555")


def test_only_listed_clients_get_through_curve() -> None:
    server_public, server_secret = generate_keypair()
    friend_public, friend_secret = generate_keypair()
    _, stranger_secret = generate_keypair()
    curve = CurveServer(server_secret, [friend_public])
    with serving(ScriptedEngine(), curve=curve) as running:
        with connected(running.endpoint, curve=CurveClient(server_public, friend_secret)) as friend:
            friend.hello()
            friend.submit("a")
            assert friend.finish("a")[1].finish_reason == "length"
        with connected(running.endpoint, curve=CurveClient(server_public, stranger_secret)) as stranger:
            stranger.submit("b")
            assert stranger.receive(0.7) is None
        with connected(running.endpoint) as plain:
            plain.submit("c")
            assert plain.receive(0.7) is None


def test_the_public_key_follows_from_the_secret_one() -> None:
    public, secret = generate_keypair()
    assert public_key(secret) == public
    with pytest.raises(ConfigError, match="not a CURVE secret key"):
        public_key("short")


def test_a_secret_key_is_written_once_and_read_back_with_the_admitted_clients(tmp_path: Path) -> None:
    key, clients = tmp_path / "engine.key", tmp_path / "gateways.txt"
    public = write_secret_key(key)
    clients.write_text(f"{public}\n\n")
    assert key.stat().st_mode & 0o777 == 0o600
    curve = CurveServer.read(key, clients)
    assert curve is not None and curve.clients == [public] and public_key(curve.secret_key) == public
    with pytest.raises(ConfigError, match="exists"):
        write_secret_key(key)


def test_curve_files_are_given_together_and_must_be_readable(tmp_path: Path) -> None:
    assert CurveServer.read(None, None) is None
    with pytest.raises(ConfigError, match="must be given together"):
        CurveServer.read(tmp_path / "engine.key", None)
    with pytest.raises(ConfigError, match=r"engine\.key"):
        (tmp_path / "gateways.txt").write_text("")
        CurveServer.read(tmp_path / "engine.key", tmp_path / "gateways.txt")
