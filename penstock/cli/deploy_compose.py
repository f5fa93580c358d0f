"""`penstock deploy compose`: a Compose project from penstock.yaml."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.deploy_options import Force, Output, emit
from penstock.cli.options import ConfigFile


class _Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def compose(
    config_file: ConfigFile = None,
    output: Output = None,
    image: Annotated[
        str, typer.Option(help="Image repository; the tags VERSION-gateway, VERSION-cpu and VERSION-cuda are added.")
    ] = "penstock",
    gateways: Annotated[int, typer.Option(min=1, max=64, help="Gateways, each on a port of its own.")] = 2,
    device: Annotated[_Device, typer.Option(help="For models whose device is auto.")] = _Device.cpu,
    force: Force = False,
) -> None:
    """
    Write a Compose project: gateways, engines of every model, Redis, PostgreSQL, Prometheus.

    Passwords are files that its make-secrets.sh makes. The configuration is mounted from penstock.yaml beside it.

    Examples:

        penstock deploy compose -c penstock.yaml --output compose

        penstock deploy compose --gateways 3 --device cuda --output compose
    """
    from penstock.config import load
    from penstock.fleet.compose import ComposeOptions, project

    options = ComposeOptions(image=image, gateways=gateways, device=device.value)
    emit(project(load(config_file), options), output, force)
