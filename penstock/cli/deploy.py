"""`penstock deploy`: configurations for what runs Penstock or stands in front of it."""

from __future__ import annotations

import typer

from penstock.cli.deploy_balancers import envoy, haproxy, nginx
from penstock.cli.deploy_clickhouse import clickhouse
from penstock.cli.deploy_compose import compose
from penstock.cli.deploy_kubernetes import kubernetes
from penstock.cli.deploy_systemd import systemd

HELP = """
Write configurations for balancers, orchestrators and stores, from penstock.yaml.

Each command prints what it writes, or with `--output FOLDER` writes files there.

Examples:

    penstock deploy haproxy --gateway 10.0.0.7:8000 --gateway 10.0.0.8:8000 > haproxy.cfg

    penstock deploy kubernetes -c penstock.yaml --output k8s
"""

app = typer.Typer(name="deploy", help=HELP, no_args_is_help=True, rich_markup_mode="rich")
app.command(help=haproxy.__doc__)(haproxy)
app.command(help=nginx.__doc__)(nginx)
app.command(help=envoy.__doc__)(envoy)
app.command(help=clickhouse.__doc__)(clickhouse)
app.command(help=kubernetes.__doc__)(kubernetes)
app.command(help=compose.__doc__)(compose)
app.command(help=systemd.__doc__)(systemd)
