"""Named files of an S3 prefix over plain HTTPS, signed with the usual variables.

`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, `AWS_REGION` and, for stores other than Amazon's,
`AWS_ENDPOINT_URL` (then `ENDPOINT/BUCKET/KEY`). Without keys requests are anonymous. A file that has not changed since
it was fetched (its ETag) is not fetched again.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import SourceError
from penstock.sources.model_cache import Progress, Slot

_SOURCE = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/([^?#]+)")
_TAGS = ".etags"
_TIMEOUT_S = 30.0
_CHUNK = 1 << 20


def fetch_files(source: str, names: Sequence[str], slot: Slot, progress: Progress | None = None) -> Path:
    """The folder with the files `names` of the prefix `source`, as they are in the store now."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise SourceError(f"{source!r} does not name a prefix: write s3://BUCKET/PREFIX")
    bucket, prefix = match[1], match[2].strip("/")
    with slot.lock(progress):
        before = _read_tags(slot.folder) if slot.complete() else {}
        shutil.rmtree(slot.partial, ignore_errors=True)
        slot.partial.mkdir(parents=True)
        tags: dict[str, str] = {}
        for name in names:
            url = _url(bucket, f"{prefix}/{name}")
            tag = _download(url, slot.partial / name, before.get(name), source, progress)
            if tag is None:
                shutil.copyfile(slot.folder / name, slot.partial / name)
            tags[name] = tag or before[name]
        (slot.partial / _TAGS).write_text(json.dumps(tags))
        slot.publish(source)
    return slot.folder


def _url(bucket: str, key: str) -> str:
    path = urllib.parse.quote(key, safe="/-_.~")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        return f"{endpoint.rstrip('/')}/{bucket}/{path}"
    return f"https://{bucket}.s3.{_region()}.amazonaws.com/{path}"


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def _download(url: str, to: Path, tag: str | None, source: str, progress: Progress | None) -> str | None:
    """Fetch one file; its ETag, or None when it is still the one called `tag`."""
    headers = signed_headers(url, os.environ, datetime.datetime.now(datetime.UTC))
    if tag is not None:
        headers["If-None-Match"] = tag
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as reply:
            total, done = reply.headers.get("Content-Length"), 0
            with to.open("wb") as file:
                while chunk := reply.read(_CHUNK):
                    file.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"downloading {to.name}", done, int(total) if total else None)
            if total is not None and done != int(total):
                raise SourceError(f"{to.name} of {source} arrived incomplete ({done} of {total} bytes); try again")
            return str(reply.headers.get("ETag", ""))
    except urllib.error.HTTPError as error:
        if error.code == 304:
            return None
        reason = {403: "access is refused; check the AWS_ variables", 404: f"it has no {to.name}"}.get(error.code, "")
        raise SourceError(f"{source} cannot be fetched (HTTP {error.code}): {reason or 'try again later'}") from error
    except (OSError, http.client.HTTPException) as error:
        raise SourceError(f"{source} cannot be fetched: no answer from {urllib.parse.urlsplit(url).netloc}") from error


def signed_headers(
    url: str, variables: Mapping[str, str], now: datetime.datetime, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Headers of a GET with an AWS version 4 signature; only `extra` where there are no keys."""
    headers = dict(extra or {})
    access, secret = variables.get("AWS_ACCESS_KEY_ID"), variables.get("AWS_SECRET_ACCESS_KEY")
    if not access or not secret:
        return headers
    parts = urllib.parse.urlsplit(url)
    stamp, empty = now.strftime("%Y%m%dT%H%M%SZ"), hashlib.sha256(b"").hexdigest()
    headers |= {"Host": parts.netloc, "x-amz-content-sha256": empty, "x-amz-date": stamp}
    if variables.get("AWS_SESSION_TOKEN"):
        headers["x-amz-security-token"] = variables["AWS_SESSION_TOKEN"]
    lines = sorted((name.lower(), value.strip()) for name, value in headers.items())
    names = ";".join(name for name, _ in lines)
    canonical = "".join(f"{name}:{value}\n" for name, value in lines)
    request = f"GET\n{parts.path}\n{parts.query}\n{canonical}\n{names}\n{empty}"
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret}".encode()
    for word in scope.split("/"):
        key = hmac.digest(key, word.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    credential = f"Credential={access}/{scope},SignedHeaders={names},Signature={signature}"
    headers["Authorization"] = f"AWS4-HMAC-SHA256 {credential}"
    return headers


def _read_tags(folder: Path) -> dict[str, str]:
    try:
        return dict(json.loads((folder / _TAGS).read_text()))
    except (OSError, ValueError):
        return {}
