"""The command tree. Importing it is cheap: commands import torch, zmq and the rest inside their functions."""

from __future__ import annotations

import copy
from typing import Annotated

import typer
from typer.models import CommandInfo, TyperInfo

from penstock.bench.commands.app import app as bench
from penstock.cli.adapters import app as adapters
from penstock.cli.audit import audit
from penstock.cli.backup import backup
from penstock.cli.batch import app as batch
from penstock.cli.cache import app as cache
from penstock.cli.chat import chat
from penstock.cli.config import config
from penstock.cli.deploy import app as deploy
from penstock.cli.doctor import doctor
from penstock.cli.drill import drill
from penstock.cli.engine import engine
from penstock.cli.experiments import arms, detect, promote, rollback
from penstock.cli.fleet import app as fleet
from penstock.cli.gateway import gateway
from penstock.cli.health import health
from penstock.cli.ingest import ingest
from penstock.cli.join import join
from penstock.cli.keys import keys, tenants
from penstock.cli.kv import app as kv
from penstock.cli.log_pipeline import app as log_pipeline
from penstock.cli.models import app as models
from penstock.cli.plan import plan
from penstock.cli.pull import pull
from penstock.cli.quantize import quantize
from penstock.cli.replicas import autoscale, drain, replicas, restart, scale
from penstock.cli.requests import requests
from penstock.cli.route import route
from penstock.cli.serve import serve
from penstock.cli.simulate import simulate
from penstock.cli.top import top
from penstock.cli.trace import trace
from penstock.cli.usage import usage
from penstock.cli.watermark import app as watermark
from penstock.cli.webhooks import app as webhooks

HELP = """
Serve large language models: an OpenAI-compatible server with its own inference engine.

Examples:

    penstock serve                      serve the default model on http://127.0.0.1:8000

    penstock chat "Hello"               chat with it

    penstock doctor                     check this machine

    penstock plan llama-3-70b           what it takes to serve it: GPUs, latency, money
"""

app = typer.Typer(
    name="penstock",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"penstock {version('penstock')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command(help=serve.__doc__)(serve)
app.command(help=chat.__doc__)(chat)
app.command(help=pull.__doc__)(pull)
app.command(help=quantize.__doc__)(quantize)
app.command(help=doctor.__doc__)(doctor)
app.command(help=config.__doc__)(config)
app.command(help=plan.__doc__)(plan)
app.command(help=ingest.__doc__)(ingest)
app.command(help=usage.__doc__)(usage)
app.command(help=backup.__doc__)(backup)
app.command(help=requests.__doc__)(requests)
app.command(help=audit.__doc__)(audit)
app.command(help=top.__doc__)(top)
app.command(help=trace.__doc__)(trace)
app.command(help=health.__doc__)(health)
app.command(help=replicas.__doc__)(replicas)
app.command(help=scale.__doc__)(scale)
app.command(help=autoscale.__doc__)(autoscale)
app.command(help=restart.__doc__)(restart)
app.command(help=drain.__doc__)(drain)
app.command(help=simulate.__doc__)(simulate)
app.command(help=drill.__doc__)(drill)
app.command(help=engine.__doc__)(engine)
app.command(help=gateway.__doc__)(gateway)
app.command(help=join.__doc__)(join)
app.add_typer(adapters, name="adapters")
app.add_typer(batch, name="batch")
app.add_typer(models, name="models")
app.add_typer(cache, name="cache")
app.add_typer(kv, name="kv")
for experiment in (arms, promote, rollback, detect):
    route.command(help=experiment.__doc__)(experiment)
app.add_typer(route, name="route")
app.add_typer(bench, name="bench")
app.add_typer(fleet, name="fleet")
app.add_typer(deploy, name="deploy")
app.add_typer(log_pipeline, name="log-pipeline")
app.add_typer(watermark, name="watermark")
app.add_typer(webhooks, name="webhooks")
app.add_typer(keys)
app.add_typer(tenants)


def narrowed(command: str) -> typer.Typer:
    """The tree with this command alone, all of it where there is none: reading the parameters of a hundred commands
    takes a quarter of a second of every process that `penstock serve` starts."""
    commands = [entry for entry in app.registered_commands if _name(entry) == command]
    groups = [entry for entry in app.registered_groups if _group_name(entry) == command]
    if len(commands) + len(groups) != 1:
        return app
    narrow = copy.copy(app)
    narrow.registered_commands, narrow.registered_groups = commands, groups
    return narrow


def _name(entry: CommandInfo) -> str:
    return entry.name or (entry.callback.__name__.replace("_", "-") if entry.callback is not None else "")


def _group_name(entry: TyperInfo) -> str:
    own = "" if entry.typer_instance is None else entry.typer_instance.info.name
    return entry.name or own or ""
