"""`penstock ingest`: uploads documents from folders into a collection of a running server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.admin import DEFAULT_URL, Url, server_url

if TYPE_CHECKING:
    import httpx
    from rich.progress import Progress

Key = Annotated[str | None, typer.Option(envvar="PENSTOCK_API_KEY", help="API key.", show_envvar=True)]
AT_ONCE = 8
POLL_S = 0.5
TRIES = 8


def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Folders and files: text, Markdown, HTML, PDF.", exists=True)],
    collection: Annotated[
        str,
        typer.Option(
            "--collection",
            "-c",
            help="Collection, created if it does not exist; by default named after the first folder or file.",
        ),
    ] = "",
    url: Url = DEFAULT_URL,
    key: Key = None,
    prune: Annotated[
        bool, typer.Option(help="Delete documents of earlier runs that are not among the given files.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until all documents are indexed.")] = True,
) -> None:
    """
    Upload documents into a collection, to be searched and cited in answers.

    A document is identified by its path inside the given folder. Running the command again uploads every file; the
    server indexes only those whose content changed. Hidden and empty files are skipped.

    Examples:

        penstock ingest handbook/

        penstock ingest docs/ notes.md --collection project

        penstock ingest docs/ --collection project --prune
    """
    import asyncio

    from penstock.errors import PenstockError
    from penstock.knowledge.readers.media import SUFFIXES

    files = dict(_files(paths))
    if not files:
        raise PenstockError(f"no documents found; these file types are read: {', '.join(sorted(SUFFIXES))}")
    name = collection or (paths[0].resolve().name if paths[0].is_dir() else paths[0].stem)
    asyncio.run(_Run(url, key, name, wait).everything(files, prune))


def _files(paths: list[Path]) -> Iterator[tuple[str, Path]]:
    """Names and paths of the documents, without hidden files and folders."""
    from penstock.knowledge.readers.media import SUFFIXES

    for root in paths:
        if root.is_file():
            yield root.name, root
            continue
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            hidden = any(part.startswith(".") for part in inside.parts)
            if path.is_file() and not hidden and path.suffix.lower() in SUFFIXES:
                yield inside.as_posix(), path


def document_id(name: str) -> str:
    """An id that depends only on the name and can be used in a URL."""
    import hashlib

    return f"file_{hashlib.sha256(name.encode()).hexdigest()[:24]}"


class _Run:
    def __init__(self, url: str, key: str | None, collection: str, wait: bool) -> None:
        self._base = server_url(url)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._collection = collection
        self._wait = wait

    async def everything(self, files: dict[str, Path], prune: bool) -> None:
        import httpx
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        async with httpx.AsyncClient(base_url=self._base, headers=self._headers, timeout=120) as client:
            await self._prepare(client)
            with Progress(*columns, console=console) as progress:
                changed = await self._send_all(client, files, progress)
                if prune:
                    await self._prune(client, set(files))
                if self._wait:
                    await self._read_all(client, changed, progress)
            await self._tell(client, console, len(files), changed)

    async def _prepare(self, client: httpx.AsyncClient) -> None:
        found = await self._ask(client, "GET", f"/v1/collections/{self._collection}", missing=True)
        if found is None:
            await self._ask(client, "POST", "/v1/collections", json={"name": self._collection})

    async def _send_all(self, client: httpx.AsyncClient, files: dict[str, Path], progress: Progress) -> set[str]:
        """Uploads all files; returns the ids of new and changed documents, which the server has to index."""
        import asyncio

        bar = progress.add_task("sending", total=len(files))
        slots = asyncio.Semaphore(AT_ONCE)
        changed: set[str] = set()

        async def send(name: str, path: Path) -> None:
            async with slots:
                body = await asyncio.to_thread(path.read_bytes)
                if body.strip():
                    id = document_id(name)
                    reply = await self._ask(
                        client, "PUT", f"{self._documents}/{id}", params={"name": name}, content=body,
                        headers={"content-type": _content_type(name)},
                    )  # fmt: skip
                    if not reply["unchanged"]:
                        changed.add(id)
                progress.advance(bar)

        async with asyncio.TaskGroup() as group:
            for name, path in files.items():
                group.create_task(send(name, path))
        return changed

    async def _read_all(self, client: httpx.AsyncClient, changed: set[str], progress: Progress) -> None:
        import asyncio

        bar = progress.add_task("indexing", total=len(changed))
        while changed:
            waiting = {
                document["id"] for status in ("queued", "processing") async for document in self._listed(client, status)
            }
            progress.update(bar, completed=len(changed - waiting))
            if not changed & waiting:
                return
            await asyncio.sleep(POLL_S)

    async def _prune(self, client: httpx.AsyncClient, names: set[str]) -> None:
        kept = {document_id(name) for name in names}
        gone = [
            document["id"]
            async for document in self._listed(client)
            if document["id"].startswith("file_") and document["id"] not in kept
        ]
        for id in gone:
            await self._ask(client, "DELETE", f"{self._documents}/{id}")

    async def _tell(self, client: httpx.AsyncClient, console: Any, sent: int, changed: set[str]) -> None:
        from penstock.telemetry.printable import printable

        failed = [document async for document in self._listed(client, "failed")]
        for document in failed:
            console.print(printable(f"{document['name']}: {document['error']}"), style="yellow", markup=False)
        found = await self._ask(client, "GET", f"/v1/collections/{self._collection}")
        documents = found["documents"]
        console.print(
            f"{self._collection}: {documents['ready']} documents in {found['chunks']} chunks "
            f"({sent} sent, {len(changed)} new or changed, {documents['duplicate']} duplicates, {len(failed)} failed)"
        )

    async def _listed(self, client: httpx.AsyncClient, status: str | None = None) -> AsyncIterator[dict[str, Any]]:
        asked = {"limit": "100", **({"status": status} if status is not None else {})}
        while True:
            page = await self._ask(client, "GET", self._documents, params=asked)
            for document in page["data"]:
                yield document
            if not page["has_more"]:
                return
            asked["after"] = page["last_id"]

    @property
    def _documents(self) -> str:
        return f"/v1/collections/{self._collection}/documents"

    async def _ask(
        self, client: httpx.AsyncClient, method: str, path: str, *, missing: bool = False, **request: Any
    ) -> Any:
        """The JSON reply; None for an expected 404. Retries while the server is busy or its encoder is starting."""
        import asyncio

        import httpx

        from penstock.cli.admin import refusal
        from penstock.errors import PenstockError

        for attempt in range(TRIES):
            try:
                answer = await client.request(method, path, **request)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise PenstockError(f"{self._base} cannot be reached: {error}; is `penstock serve` running?") from error
            if answer.status_code not in (429, 503) or attempt == TRIES - 1:
                break
            await asyncio.sleep(float(answer.headers.get("retry-after", "1")))
        if answer.is_success:
            return answer.json()
        if missing and answer.status_code == 404 and answer.json()["error"]["code"] == "collection_not_found":
            return None
        raise PenstockError(refusal(answer))


def _content_type(name: str) -> str:
    from penstock.knowledge.readers.media import SUFFIXES

    return SUFFIXES[Path(name).suffix.lower()]
