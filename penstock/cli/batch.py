"""`penstock batch`: files of requests that a running server answers when it has capacity."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Url, call, waiting
from penstock.cli.admin import fetch as ask
from penstock.cli.lists import Column, Output, show

if TYPE_CHECKING:
    import httpx

app = typer.Typer(
    name="batch",
    help="Send a file of requests to a running server and fetch the answers.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

PART = 32 * 2**20
"""Bytes of a file that are sent at once."""
Key = Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key.", show_envvar=True)]
BatchId = Annotated[str, typer.Argument(help="Id of the batch, as shown by `submit` and `list`.")]
_RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


@app.command()
def submit(
    file: Annotated[
        Path, typer.Argument(help="JSON lines: custom_id, method, url, body.", exists=True, dir_okay=False)
    ],
    endpoint: Annotated[
        str | None, typer.Option(help="Endpoint of the requests; by default that of the first line.")
    ] = None,
    window: Annotated[str, typer.Option(help="Time limit of the batch, such as 90m, 24h or 7d.")] = "24h",
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the batch has ended.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Upload a file and run the requests in it.

    Examples:

        penstock batch submit questions.jsonl

        penstock batch submit questions.jsonl --wait
    """
    made = call(
        "POST", url, key, "/batches",
        {
            "input_file_id": _sent(file, url, key),
            "endpoint": endpoint or _endpoint_of(file),
            "completion_window": window,
        },
        under="/v1",
    )  # fmt: skip
    if wait:
        with waiting(_line(made)) as shown:
            while made["status"] in _RUNNING:
                time.sleep(0.5)
                made = _get(url, key, made["id"])
                shown(_line(made))
    _say(made)


@app.command()
def status(batch: BatchId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Show the progress of a batch.

    Example:

        penstock batch status batch_0123
    """
    _say(_get(url, key, batch))


@app.command("list")
def list_(url: Url = DEFAULT_URL, key: Key = None, output: Output = "table") -> None:
    """
    Show the newest batches.

    Examples:

        penstock batch list

        penstock batch list -o csv
    """
    columns: list[Column[dict[str, Any]]] = [
        Column("batch", lambda batch: batch["id"], rank=0),
        Column("status", lambda batch: batch["status"], rank=0),
        Column("endpoint", lambda batch: batch["endpoint"], rank=4),
        Column("answered", lambda batch: batch["request_counts"]["completed"]),
        Column("failed", lambda batch: batch["request_counts"]["failed"]),
        Column("total", lambda batch: batch["request_counts"]["total"]),
        Column("created", lambda batch: batch["created_at"], lambda batch: _when(batch["created_at"]), rank=3),
    ]
    found = call("GET", url, key, "/batches?limit=20", under="/v1")["data"]
    show(columns, found, output, empty="No batches: `penstock batch submit FILE` starts one.")


@app.command()
def fetch(
    batch: BatchId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; standard output by default.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Fetch the failed requests instead.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """
    Fetch the answers of a finished batch.

    Examples:

        penstock batch fetch batch_0123 -o answers.jsonl

        penstock batch fetch batch_0123 --errors
    """
    from penstock.errors import PenstockError

    found = _get(url, key, batch)
    file = found["error_file_id" if errors else "output_file_id"]
    if file is None:
        what = "no failed requests" if errors else "no answers"
        raise PenstockError(f"{batch} is {found['status']} and has {what}")
    content = ask("GET", url, key, f"/files/{file}/content", under="/v1", timeout=_patient()).content
    if output is None:
        typer.echo(content.decode(), nl=False)
    else:
        output.write_bytes(content)
        typer.echo(f"{output}: {len(content):,} bytes")


@app.command()
def cancel(batch: BatchId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """
    Cancel a batch; answers that are complete are kept.

    Example:

        penstock batch cancel batch_0123
    """
    _say(call("POST", url, key, f"/batches/{batch}/cancel", under="/v1"))


def _sent(file: Path, url: str, key: str | None) -> str:
    """Send a file, in parts if it is large; returns its id."""
    size = file.stat().st_size
    with file.open("rb") as content:
        if size <= PART:
            form: dict[str, Any] = {"files": {"file": (file.name, content)}, "data": {"purpose": "batch"}}
            return str(ask("POST", url, key, "/files", under="/v1", timeout=_patient(), **form).json()["id"])
        about = {"bytes": size, "filename": file.name, "mime_type": "application/jsonl", "purpose": "batch"}
        upload = call("POST", url, key, "/uploads", about, under="/v1")["id"]
        parts, digest = [], hashlib.md5(usedforsecurity=False)
        while part := content.read(PART):
            digest.update(part)
            form = {"files": {"data": part}}
            sent = ask("POST", url, key, f"/uploads/{upload}/parts", under="/v1", timeout=_patient(), **form)
            parts.append(sent.json()["id"])
    done = {"part_ids": parts, "md5": digest.hexdigest()}
    return str(call("POST", url, key, f"/uploads/{upload}/complete", done, under="/v1")["file"]["id"])


def _get(url: str, key: str | None, batch: str) -> dict[str, Any]:
    found: dict[str, Any] = call("GET", url, key, f"/batches/{batch}", under="/v1")
    return found


def _patient() -> httpx.Timeout:
    """Files may be large."""
    import httpx

    return httpx.Timeout(60.0, connect=10.0)


def _say(batch: dict[str, Any]) -> None:
    from penstock.telemetry.printable import printable

    typer.echo(_line(batch))
    for problem in (batch["errors"] or {"data": ()})["data"]:
        where = "" if problem["line"] is None else f"line {problem['line']}: "
        typer.echo(printable(f"  {where}{problem['message']}"), err=True)


def _line(batch: dict[str, Any]) -> str:
    counts = batch["request_counts"]
    return (
        f"{batch['id']}  {batch['status']}  {batch['endpoint']}  "
        f"{counts['completed']} of {counts['total']} answered, {counts['failed']} failed"
    )


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _endpoint_of(file: Path) -> str:
    import json

    from penstock.errors import PenstockError

    try:
        with file.open(encoding="utf-8-sig") as lines:
            return str(json.loads(next(lines))["url"])
    except (StopIteration, ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{file}: the first line is not a request with a `url`; give --endpoint") from error
