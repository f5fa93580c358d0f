"""The command tree of `penstock bench`: one module per command, each importing what it runs when it runs."""

from __future__ import annotations

import typer

from penstock.bench.commands.adapters import adapters
from penstock.bench.commands.admission_cost import admission_cost
from penstock.bench.commands.agents import agents
from penstock.bench.commands.compare import compare
from penstock.bench.commands.cpu_peers import cpu_peers
from penstock.bench.commands.determinism import determinism
from penstock.bench.commands.embed import embed
from penstock.bench.commands.engine import engine
from penstock.bench.commands.exposition import exposition
from penstock.bench.commands.gguf_reader import gguf_reader
from penstock.bench.commands.goodput import goodput
from penstock.bench.commands.handover import handover
from penstock.bench.commands.hostile import hostile
from penstock.bench.commands.http import http
from penstock.bench.commands.http_servers import http_servers
from penstock.bench.commands.log_pipeline import log_pipeline
from penstock.bench.commands.offload import offload
from penstock.bench.commands.overhead import overhead
from penstock.bench.commands.perplexity import perplexity
from penstock.bench.commands.pipeline import pipeline
from penstock.bench.commands.predictions import predictions
from penstock.bench.commands.retrieval import retrieval
from penstock.bench.commands.scrape import scrape
from penstock.bench.commands.search_speed import search_speed
from penstock.bench.commands.semantic_cache import semantic_cache
from penstock.bench.commands.serve import serve
from penstock.bench.commands.servers import servers
from penstock.bench.commands.shard import shard
from penstock.bench.commands.soak import soak
from penstock.bench.commands.speculation import speculation
from penstock.bench.commands.start import start
from penstock.bench.commands.streams import streams
from penstock.bench.commands.structure import structure
from penstock.bench.commands.table import table
from penstock.bench.commands.train_head import train_head
from penstock.bench.commands.watermark import watermark
from penstock.bench.options import reported

app = typer.Typer(
    name="bench",
    help="Measure the engine, the gateway, a server, or any of them against a peer.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for command in (
    engine,
    table,
    goodput,
    shard,
    predictions,
    compare,
    cpu_peers,
    embed,
    adapters,
    offload,
    handover,
    determinism,
    structure,
    speculation,
    train_head,
    perplexity,
    watermark,
    pipeline,
    soak,
    serve,
    servers,
    agents,
    http,
    start,
    overhead,
    streams,
    hostile,
    scrape,
    admission_cost,
    semantic_cache,
    retrieval,
    search_speed,
    http_servers,
    exposition,
    gguf_reader,
    log_pipeline,
):
    app.command(help=command.__doc__)(reported(command))
