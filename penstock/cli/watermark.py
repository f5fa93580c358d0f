"""`penstock watermark`: the secret that watermarks are made with, and looking for them in a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import ConfigFile, Settings

if TYPE_CHECKING:
    from penstock.config import Config

app = typer.Typer(no_args_is_help=True, help="Watermarks in generated text: their secret, and looking for them.")


@app.command()
def secret(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")],
) -> None:
    """
    Write a new secret, from which the watermark of every tenant is derived; readable by its owner only.

    Name it in watermark.secret_file on every machine with a gateway. Whoever has it can find and imitate the
    watermarks. To change it, put the new one on a line above the old one.

    Example:

        penstock watermark secret watermark.secret
    """
    from penstock.identity.watermark import write_secret

    write_secret(file)
    typer.echo(f"{file}: name it in watermark.secret_file (and keep it secret)")


@app.command()
def detect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Text to look at; -: standard input.")],
    tenant: Annotated[str, typer.Option(help="Whose watermark to look for.")] = "default",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model whose tokenizer wrote it; by default the first.")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(min=0.0, max=0.5, help="Maximum p-value; by default watermark.threshold.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", "-u", help="Ask the server at this address, for the tenant of --key.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key, with --url.", show_envvar=True)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """
    Say whether a text carries a tenant's watermark, with the p-value. Exit status 0: it does, 1: not detected, 3: the
    text is too short.

    It needs the configuration with watermark.secret_file and the model's tokenizer, but no running server. With --url a
    server does it, and looks for the watermark of the key's own tenant.

    Examples:

        penstock watermark detect answer.txt --set watermark.secret_file=watermark.secret

        pbpaste | penstock watermark detect - --tenant acme

        penstock watermark detect answer.txt --url http://127.0.0.1:8000 --json
    """
    import json

    text = _read(file)
    if url is not None:
        from penstock.cli.admin import call

        asked = {"text": text, "model": model, "threshold": threshold}
        body = {name: value for name, value in asked.items() if value is not None}
        found: dict[str, Any] = call("POST", url, key, "/watermark/detect", body, under="/v1")
    else:
        from penstock.cli.terminal import flags
        from penstock.config import load

        found = _local(load(config_file, flags=flags(settings)), text, tenant, model, threshold)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        scored = f"{found['scored_tokens']} of {found['tokens']} tokens scored"
        typer.echo(f"{found['verdict'].replace('_', ' ')}: p-value {found['p_value']:.2g}, {scored}")
        if found.get("passage"):
            typer.echo(f"in the passage: {found['passage']}")
    raise typer.Exit({"watermarked": 0, "not_detected": 1, "too_short": 3}[found["verdict"]])


def _read(file: str) -> str:
    from penstock.errors import PenstockError

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PenstockError(f"{file}: {error.strerror}") from error
    return data.decode("utf-8", "replace")


def _local(config: Config, text: str, tenant: str, model: str | None, threshold: float | None) -> dict[str, Any]:
    from penstock.errors import ConfigError
    from penstock.identity.watermark import WatermarkKeys
    from penstock.sources.resolve import resolve
    from penstock.text.loader import load_text
    from penstock.text.watermark import detect as look

    keys = WatermarkKeys.read(config.watermark.secret_file)
    if keys is None:
        raise ConfigError("there is no secret to look for: set watermark.secret_file")
    known = {one.name: one for one in config.models}
    chosen = model or next(iter(known))
    if chosen not in known:
        raise ConfigError(f"there is no model {chosen!r}; the configuration has {', '.join(known)}")
    reader = load_text(resolve(known[chosen].source, weights=False))
    tokens = reader.encode(text, special=False, add_special_tokens=False)
    most = config.watermark.threshold if threshold is None else threshold
    found = look(tokens, keys.detecting(tenant))
    passage = None
    if found.passage is not None and found.p_value <= most:
        passage = reader.decode(tokens[found.passage[0] : found.passage[1] + 1])
    return {
        "verdict": found.verdict(most),
        "p_value": found.p_value,
        "threshold": most,
        "tokens": found.tokens,
        "scored_tokens": found.scored,
        "passage": passage,
        "model": chosen,
        "tenant": tenant,
    }
