"""Asking the admin API of a running server."""

from __future__ import annotations

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
    """The answer to one request; a refusal is raised in the server's words."""
    import httpx

    # Loading may have to download: no limit on the answer.
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
    """`form`: what is sent when it is not JSON, as httpx takes it."""
    import httpx

    from penstock.errors import PenstockError

    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/').removesuffix('/v1')}{under}{path}"
    try:
        answer = httpx.request(method, address, json=body, headers=headers, timeout=timeout, **form)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PenstockError(f"{address} cannot be reached: {error}; is `penstock serve` running there?") from error
    if answer.is_success:
        return answer
    raise PenstockError(refusal(answer))


def refusal(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.url} answered HTTP {answer.status_code}"
