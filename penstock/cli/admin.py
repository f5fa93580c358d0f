"""Requests to the admin API of a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import httpx

Url = Annotated[str, typer.Option("--url", "-u", envvar="PENSTOCK_URL", help="Address of the server.")]
Key = Annotated[
    str | None,
    typer.Option(envvar="PENSTOCK_API_KEY", help="API key with the scope `admin`.", show_envvar=True),
]
DEFAULT_URL = "http://127.0.0.1:8000"


def call(
    method: str, url: str, key: str | None, path: str, body: dict[str, Any] | None = None, *, under: str = "/v1/admin"
) -> Any:
    """The JSON reply to one request; an error reply is raised with the server's message."""
    import httpx

    # Loading may include a download: no limit on the reply.
    return fetch(method, url, key, path, body, under=under, timeout=httpx.Timeout(10.0, read=None)).json()


def fetch(
    method: str,
    url: str,
    key: str | None,
    path: str,
    body: dict[str, Any] | None = None,
    *,
    under: str,
    timeout: httpx.Timeout,
    **form: Any,
) -> httpx.Response:
    """The reply to one request. `form`: httpx arguments for a body that is not JSON."""
    import httpx

    from penstock.errors import PenstockError

    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{server_url(url)}{under}{path}"
    try:
        answer = httpx.request(method, address, json=body, headers=headers, timeout=timeout, **form)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PenstockError(f"{address} cannot be reached: {error}; is `penstock serve` running there?") from error
    if answer.is_success:
        return answer
    raise PenstockError(refusal(answer))


def server_url(given: str) -> str:
    """The address of a server without a path. `localhost:8000` and an API address that ends in /v1 are as good."""
    from penstock.errors import PenstockError

    url = given.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    url = url if "://" in url else f"http://{url}"
    scheme, _, host = url.partition("://")
    if scheme not in ("http", "https") or not host:
        raise PenstockError(f"--url {given}: write the server's address, for example http://127.0.0.1:8000")
    return url


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Shows on the terminal what is being waited for; the value changes the text."""
    from rich.text import Text

    from penstock.cli.terminal import stderr

    with stderr().status(Text(what)) as shown:
        yield lambda text: shown.update(Text(text))


def refusal(answer: httpx.Response) -> str:
    """The error message of a reply."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} returned HTTP {answer.status_code}"
