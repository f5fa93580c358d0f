"""Named files of an S3 prefix, through `obstore` (the extra `s3`).

The usual variables apply: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION` and, for
stores other than Amazon's, `AWS_ENDPOINT_URL` (then `ENDPOINT/BUCKET/KEY`). Without credentials requests are anonymous.
A file whose ETag has not changed since it was fetched is not fetched again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import SourceError, needs_extra
from penstock.sources.model_cache import Progress, Slot

if TYPE_CHECKING:
    from obstore.store import S3Store

_SOURCE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^?#]+)")
_TAGS = ".etags"
_CONNECT_S, _REQUEST_S, _RETRY_S = 10, 900, 30
_RETRIES = 3
_CHUNK = 1 << 20
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""One of these variables is set where requests can be signed."""


class _Missing(SourceError):
    """There is no such object."""


def fetch_files(
    source: str,
    names: Sequence[str],
    slot: Slot,
    progress: Progress | None = None,
    *,
    optional: bool = False,
    limit_s: int = _REQUEST_S,
    most_bytes: int | None = None,
) -> Path:
    """The folder with the files `names` of the prefix `source`, as they are in the store now; `optional`: with those of
    them that are there. Where nothing has changed the folder is left alone. `limit_s`: for each file. `most_bytes`: a
    file that has more is not fetched whole, and one byte more of it is kept: its readers refuse it."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise SourceError(f"{source!r} does not name a prefix: write s3://BUCKET/PREFIX")
    store, prefix = _open(match[1], limit_s), match[2].strip("/")
    with slot.lock(progress):
        there = slot.complete()
        before = _read_tags(slot.folder) if there else {}
        shutil.rmtree(slot.partial, ignore_errors=True)
        slot.partial.mkdir(parents=True)
        tags: dict[str, str] = {}
        kept: list[str] = []
        for name in names:
            key, to = f"{prefix}/{name}", slot.partial / name
            try:
                tag = _download(store, key, to, before.get(name), source, progress, most_bytes)
            except _Missing:
                if not optional:
                    raise
                continue
            if tag is None:
                kept.append(name)
            tags[name] = before[name] if tag is None else tag
        if there and kept == list(before) == list(tags):  # those who read it now are not disturbed
            shutil.rmtree(slot.partial, ignore_errors=True)
            return slot.folder
        for name in kept:
            shutil.copyfile(slot.folder / name, slot.partial / name)
        (slot.partial / _TAGS).write_text(json.dumps(tags))
        slot.publish(source)
    return slot.folder


def _open(bucket: str, limit_s: int) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise SourceError(f"an s3:// source {needs_extra('s3')}") from error

    variables = os.environ
    return S3Store(
        bucket,
        endpoint=variables.get("AWS_ENDPOINT_URL_S3") or variables.get("AWS_ENDPOINT_URL"),
        region=variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1",
        skip_signature=not any(variables.get(name) for name in _CREDENTIALS),
        client_options={
            "allow_http": True,
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=limit_s),
        },
        retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)},
    )


def _download(
    store: S3Store, key: str, to: Path, tag: str | None, source: str, progress: Progress | None, most: int | None
) -> str | None:
    """Download one file, or `most` bytes of it and one more; returns its ETag, or None when it still is `tag`."""
    import obstore
    from obstore.exceptions import BaseError, NotModifiedError, PermissionDeniedError, UnauthenticatedError

    try:
        reply = obstore.get(store, key, options={"if_none_match": tag} if tag else None)
        total, done = reply.meta["size"], 0
        wanted = total if most is None else min(total, most + 1)
        with to.open("wb") as file:
            for chunk in reply.stream(min_chunk_size=_CHUNK):
                done += file.write(memoryview(chunk)[: wanted - done])
                if done == wanted and done < total:
                    break
                if progress is not None:
                    progress(f"downloading {to.name}", done, total)
    except NotModifiedError:
        return None
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise SourceError(f"{source} cannot be fetched: access is refused; check the AWS_ variables") from error
    except FileNotFoundError as error:
        raise _Missing(f"{source} cannot be fetched: it has no {to.name}") from error
    except BaseError as error:
        raise SourceError(f"{source} cannot be fetched: {_first_line(error)}; try again later") from error
    if done != wanted:
        raise SourceError(f"{to.name} of {source} arrived incomplete ({done} of {total} bytes); try again")
    return reply.meta["e_tag"] or ""


def _first_line(error: Exception) -> str:
    """The useful part of the library's message, which continues with a dump of its structures."""
    return str(error).partition("\n")[0].strip().rstrip(":")


def _read_tags(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _TAGS).read_text()))
    except (OSError, ValueError):
        return {}
