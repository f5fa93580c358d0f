"""A port that is taken or does not exist is reported before anything is loaded."""

from __future__ import annotations

import socket

import pytest

from penstock.errors import ConfigError
from penstock.gateway.http.port import check_port


def test_a_port_in_use_is_a_clear_error_and_a_free_one_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use .* --port {port + 1}"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


def test_a_port_that_another_server_would_share_counts_as_in_use() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="in use by another program"):
            check_port("127.0.0.1", other.getsockname()[1])


def test_an_address_of_another_machine_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        check_port("192.0.2.1", 8000)


def test_a_host_that_does_not_exist_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="not an address of this machine"):
        check_port("no.such.host.invalid", 80)
