"""`penstock deploy systemd`: units from penstock.yaml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.deploy_options import Force, Output, emit
from penstock.cli.options import ConfigFile


def systemd(
    config_file: ConfigFile = None,
    output: Output = None,
    program: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The installed command; by default that of this environment.")
    ] = None,
    force: Force = False,
) -> None:
    """
    Write systemd units: the server of one machine; in a fleet also a gateway and a machine that joins it.

    They wait for READY=1, drain on stop, and run as a user of their own with little but their folders.

    Examples:

        penstock deploy systemd -c /etc/penstock/penstock.yaml --output /etc/systemd/system

        penstock deploy systemd --program /opt/penstock/bin/penstock
    """
    from penstock.config import load
    from penstock.fleet.systemd import CONFIG, PROGRAM, units

    installed = program or Path(sys.executable).with_name("penstock")
    if program is None and not installed.exists():
        installed = Path(PROGRAM)
    path = CONFIG if config_file is None else str(config_file.absolute())
    emit(units(load(config_file), program=str(installed), config_file=path), output, force)
