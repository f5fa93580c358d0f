"""`penstock deploy haproxy|nginx|envoy`: a balancer in front of several gateways."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.deploy_options import Force, Output, emit
from penstock.cli.options import ConfigFile, Settings

if TYPE_CHECKING:
    from penstock.fleet.balancers.front import Front


class StickyBy(StrEnum):
    none = "none"
    session = "session"
    key = "key"


Gateways = Annotated[
    list[str] | None,
    typer.Option(
        "--gateway",
        "-g",
        metavar="HOST:PORT",
        help="A gateway; repeat it. By default the configured one of this machine.",
    ),
]
Port = Annotated[int, typer.Option("--port", "-p", min=1, max=65535, help="Port to listen on.")]
Name = Annotated[str, typer.Option(help="Host name that clients use; by default any.")]
Certificate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Certificate with its chain (HAProxy: and the key); without it, no TLS."),
]
Key = Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")]
Sticky = Annotated[
    StickyBy,
    typer.Option(help="Send requests of one x-session-id, or of one API key, to the same gateway while it is ready."),
]
CheckSeconds = Annotated[float, typer.Option("--check-s", min=0.1, help="Seconds between health checks.")]


def haproxy(
    gateway: Gateways = None,
    config_file: ConfigFile = None,
    port: Port = 443,
    name: Name = "_",
    certificate: Certificate = None,
    sticky: Sticky = StickyBy.none,
    check_s: CheckSeconds = 1.0,
    output: Output = None,
    force: Force = False,
    settings: Settings = None,
) -> None:
    """
    Write a configuration for HAProxy.

    Examples:

        penstock deploy haproxy -g 10.0.0.7:8000 -g 10.0.0.8:8000 --certificate /etc/ssl/both.pem > haproxy.cfg

        penstock deploy haproxy -g 127.0.0.1:8000 -g 127.0.0.1:8001 --port 8080 --sticky session
    """
    from penstock.fleet.balancers.haproxy import haproxy as write

    front = _front(gateway, config_file, settings, port, name, certificate, None, sticky, check_s)
    emit({"haproxy.cfg": write(front)}, output, force)


def nginx(
    gateway: Gateways = None,
    config_file: ConfigFile = None,
    port: Port = 443,
    name: Name = "_",
    certificate: Certificate = None,
    key: Key = None,
    sticky: Sticky = StickyBy.none,
    output: Output = None,
    force: Force = False,
    settings: Settings = None,
) -> None:
    """
    Write a configuration for nginx.

    Examples:

        penstock deploy nginx -g 10.0.0.7:8000 -g 10.0.0.8:8000 --certificate chain.pem --key key.pem > gateways.conf
    """
    from penstock.fleet.balancers.nginx import nginx as write

    front = _front(gateway, config_file, settings, port, name, certificate, _needed(certificate, key), sticky, 1.0)
    emit({"gateways.conf": write(front)}, output, force)


def envoy(
    gateway: Gateways = None,
    config_file: ConfigFile = None,
    port: Port = 443,
    name: Name = "_",
    certificate: Certificate = None,
    key: Key = None,
    sticky: Sticky = StickyBy.none,
    check_s: CheckSeconds = 1.0,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="Port of Envoy's own pages, on 127.0.0.1.")] = 9901,
    output: Output = None,
    force: Force = False,
    settings: Settings = None,
) -> None:
    """
    Write a configuration for Envoy.

    Examples:

        penstock deploy envoy -g 10.0.0.7:8000 -g 10.0.0.8:8000 --certificate chain.pem --key key.pem > envoy.yaml
    """
    from penstock.fleet.balancers.envoy import envoy as write

    front = _front(gateway, config_file, settings, port, name, certificate, _needed(certificate, key), sticky, check_s)
    emit({"envoy.yaml": write(front, admin_port)}, output, force)


def _needed(certificate: Path | None, key: Path | None) -> Path | None:
    from penstock.errors import ConfigError

    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key must be given together")
    return key


def _front(
    gateways: list[str] | None,
    config_file: Path | None,
    settings: list[str] | None,
    port: int,
    name: str,
    certificate: Path | None,
    key: Path | None,
    sticky: StickyBy,
    check_s: float,
) -> Front:
    from penstock.cli.terminal import flags
    from penstock.config import load
    from penstock.fleet.balancers.front import BODY_LIMIT, Front, Gateway

    server = load(config_file, flags=flags(settings)).server
    return Front(
        tuple(Gateway.parse(text) for text in gateways or [f"127.0.0.1:{server.port}"]),
        port=port,
        name=name,
        certificate="" if certificate is None else str(certificate),
        key="" if key is None else str(key),
        sticky=sticky.value,
        body_limit=max(BODY_LIMIT, server.body_limit),
        check_s=check_s,
    )
