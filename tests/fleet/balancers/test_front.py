"""What a balancer is told: gateways as people write them, mistakes, files that are not overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import ConfigError
from penstock.fleet.balancers.envoy import envoy
from penstock.fleet.balancers.front import Front, Gateway
from penstock.fleet.balancers.haproxy import haproxy
from penstock.fleet.balancers.nginx import nginx
from penstock.fleet.files import write_files


def test_gateways_are_written_as_people_write_them() -> None:
    assert Gateway.parse("10.0.0.7:8000") == Gateway("10.0.0.7", 8000)
    assert Gateway.parse("http://gateway-1.lan:80/") == Gateway("gateway-1.lan", 80)
    assert Gateway.parse("[fd00::1]:8000") == Gateway("[fd00::1]", 8000)
    for wrong in ("10.0.0.7", "10.0.0.7:99999", "https://x:1", "a b:1", "x:y", "fd00::1:8000"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Gateway.parse(wrong)
    with pytest.raises(ConfigError, match="named twice"):
        Front((Gateway("a", 1), Gateway("a", 1)))
    with pytest.raises(ConfigError, match="at least once"):
        Front(())


def test_every_gateway_is_in_every_configuration() -> None:
    front = Front((Gateway("10.0.0.7", 8000), Gateway("[fd00::1]", 8001)), sticky="session", certificate="c", key="k")
    assert "server gateway-2 [fd00::1]:8001 check" in haproxy(front) and "balance hdr(x-session-id)" in haproxy(front)
    assert "server [fd00::1]:8001 " in nginx(front) and "hash $http_x_session_id consistent;" in nginx(front)
    cluster = yaml.safe_load(envoy(front))["static_resources"]["clusters"][0]
    hosts = [
        each["endpoint"]["address"]["socket_address"]
        for each in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert hosts == [{"address": "10.0.0.7", "port_value": 8000}, {"address": "fd00::1", "port_value": 8001}]
    assert cluster["lb_policy"] == "RING_HASH"


def test_files_are_printed_or_written_but_not_over_changes(tmp_path: Path) -> None:
    command = ["deploy", "nginx", "-g", "127.0.0.1:8000", "--port", "8080"]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0 and "listen 8080;" in printed.stdout
    written = CliRunner().invoke(app, [*command, "--output", str(tmp_path)])
    assert written.exit_code == 0 and (tmp_path / "gateways.conf").read_text() == printed.stdout
    write_files({"gateways.conf": printed.stdout}, tmp_path)  # the same again is no change
    with pytest.raises(ConfigError, match="--force"):
        write_files({"gateways.conf": "other"}, tmp_path)
    write_files({"gateways.conf": "other"}, tmp_path, force=True)
    assert (tmp_path / "gateways.conf").read_text() == "other"
    refused = CliRunner().invoke(app, [*command, "--certificate", "chain.pem"])
    assert isinstance(refused.exception, ConfigError) and "--key" in str(refused.exception)
