"""`penstock chat`: talk to a running server from a terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def chat(
    message: Annotated[
        str | None, typer.Argument(help="A single question (- reads stdin); without it, an interactive conversation.")
    ] = None,
    url: Annotated[
        str, typer.Option("--url", "-u", envvar="PENSTOCK_URL", help="Address of the server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model; by default the server's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", help="0: always the likeliest token; by default the model's own."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the likeliest tokens with this total probability.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens in an answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="How much the model thinks: none, minimal, low, medium, high; by default the model's own."),
    ] = None,
    key: Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key.", show_envvar=True)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer, without timings.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Show the text as it comes, not as Markdown.")] = False,
) -> None:
    """
    Chat with a running server.

    After each answer, its time to first token and its tokens per second are shown. On a terminal answers are formatted
    as Markdown; in a pipe they are plain text. What a model thinks first is shown dim, on standard error.

    In a conversation, /model NAME changes the model, /system TEXT the system prompt, /retry asks again, /reset starts
    over, /help lists all commands; Ctrl-C stops an answer, Ctrl-D quits.

    Examples:

        penstock chat "What is the capital of France?"

        penstock chat --system "Answer in French." --temperature 0

        cat notes.txt | penstock chat - --max-tokens 200
    """
    from penstock.cli.chat_client import Client, Options
    from penstock.cli.conversation import Conversation, one_shot

    options = Options(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed, reasoning_effort=effort)
    with Client(url, key) as client:
        chosen = model or client.models()[0]
        if message == "-" or (message is None and not sys.stdin.isatty()):
            message = sys.stdin.read()
        if message is None:
            Conversation(client, chosen, system, options, plain=plain).run()
        else:
            one_shot(client, chosen, system, options, message, quiet=quiet, plain=plain)
