"""`penstock bench replica-policies`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.bench.options import Chart, Json, console


def replica_policies(
    seed: Annotated[int, typer.Option(help="Of the conversations.")] = 1,
    rate: Annotated[float, typer.Option(min=0.1, help="New conversations per second.")] = 12.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Simulated time.")] = 120.0,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants, each with a system prompt.")] = 12,
    skew: Annotated[float, typer.Option(min=0.0, help="Exponent of Zipf's law over tenants.")] = 1.1,
    system: Annotated[int, typer.Option(min=1, help="Tokens of a system prompt.")] = 800,
    turns: Annotated[int, typer.Option(min=1, help="Mean number of turns of a conversation.")] = 5,
    question: Annotated[int, typer.Option(min=1, help="Mean tokens of a question.")] = 80,
    answer: Annotated[int, typer.Option(min=1, help="Mean tokens of an answer.")] = 120,
    think_s: Annotated[float, typer.Option(min=0.001, help="Mean seconds between answer and question.")] = 3.0,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas.")] = 4,
    blocks: Annotated[int, typer.Option(min=64, help="KV blocks of a replica.")] = 4096,
    chart: Chart = None,
    json_file: Json = None,
) -> None:
    """
    Replica policies compared on the same conversations, in simulated time.

    Examples:

        penstock bench replica-policies

        penstock bench replica-policies --rate 14 --seconds 240 --chart docs/images/replica-policies.svg

        penstock bench replica-policies --turns 1 --system 1
    """
    from penstock.bench import replica_policies as measured

    work = measured.ConversationWorkload(
        seed, rate, seconds, tenants, skew, system, turns, question, answer, think_s, replicas, blocks
    )
    if not measured.main(work, chart, json_file, console()):
        raise typer.Exit(1)
