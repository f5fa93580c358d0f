"""Fetching models from a Hugging Face hub over plain HTTP.

Only the files an engine needs are taken. Each is written to `NAME.part` and continued from where it stopped, in
this attempt or a later one; it gets its name once its size and the hash the hub gives for it agree. Honours
`HF_ENDPOINT` and `HF_TOKEN`.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.errors import SourceError
from penstock.sources.model_cache import Progress, Slot, require_space

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 15.0
ATTEMPTS = 5
"""Consecutive attempts that bring nothing new before a download is given up."""
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""Which GGUF file to take from a repository of several, when none is named."""

_SMALL = re.compile(
    r"config\.json|adapter_config\.json|generation_config\.json|tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template\.(json|jinja)|LICEN[CS]E.*|NOTICE.*"
)
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository at a revision; `choice` picks a GGUF file by name or quantization."""

    repository: str
    revision: str = "main"
    choice: str | None = None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository and what the hub says of it. `digest` is `algorithm:hex`."""

    path: str
    size: int | None
    digest: str | None

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name


def fetch_repository(source: HubSource, slot: Slot, label: str, progress: Progress | None) -> None:
    """Fill the slot from a repository. Call with the slot's lock held. Earlier partial files are continued."""
    client = _Client()
    commit, listing = client.listing(source)
    files = choose_files(listing, source)
    slot.partial.mkdir(parents=True, exist_ok=True)
    _forget_other_commit(slot.partial, commit)
    present = sum(file.stat().st_size for file in slot.partial.iterdir() if file.is_file())
    require_space(slot.partial, sum(file.size or 0 for file in files) - present)
    for file in files:
        if not (slot.partial / file.name).exists():
            client.download(source, commit, file, slot.partial, progress)
    (slot.partial / _COMMIT).unlink()
    wanted = {file.name for file in files}
    for stray in slot.partial.iterdir():
        if stray.name not in wanted:
            stray.unlink()
    slot.publish(f"{label} ({commit})")


_COMMIT = ".commit"


def _forget_other_commit(folder: Path, commit: str) -> None:
    """Parts of two revisions must not be joined: start over when the repository has moved on."""
    mark = folder / _COMMIT
    if not mark.exists() or mark.read_text() != commit:
        shutil.rmtree(folder)
        folder.mkdir()
        mark.write_text(commit)


def choose_files(listing: list[RemoteFile], source: HubSource) -> list[RemoteFile]:
    """The files worth fetching: safetensors with their configuration, or one GGUF file."""
    top = [file for file in listing if "/" not in file.path]
    small = [file for file in top if _SMALL.fullmatch(file.name)]
    tensors = [file for file in top if file.name.endswith((".safetensors", ".safetensors.index.json"))]
    if any(file.name == "model.safetensors.index.json" or file.name == "model.safetensors" for file in tensors):
        tensors = [file for file in tensors if file.name.startswith("model")]
    ggufs = [file for file in listing if file.name.lower().endswith(".gguf")]
    if tensors and source.choice is None:
        return [*small, *tensors]
    if not ggufs:
        what = f"no GGUF file for {source.choice!r}" if source.choice else "no safetensors or GGUF weights"
        raise SourceError(f"hf:{source.repository} has {what}; Penstock cannot run it")
    licence = [file for file in small if file.name.startswith(("LICEN", "NOTICE"))]
    return [*licence, _choose_gguf(ggufs, source)]


def _choose_gguf(ggufs: list[RemoteFile], source: HubSource) -> RemoteFile:
    whole = [file for file in ggufs if not re.search(r"-\d{5}-of-\d{5}", file.name) and "mmproj" not in file.name]
    wanted = (source.choice,) if source.choice else PREFERRED
    for choice in wanted:
        exact = [file for file in whole if choice in (file.path, file.name)]
        named = exact or [file for file in whole if re.search(rf"[-._]{re.escape(choice)}\.gguf$", file.name, re.I)]
        if len(named) == 1:
            return named[0]
    if len(whole) == 1 and source.choice is None:
        return whole[0]
    names = ", ".join(sorted(file.name for file in whole)) or "only files in several parts"
    raise SourceError(f"hf:{source.repository}: which GGUF file? Write hf:{source.repository}:NAME; it has {names}")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to storage hosts, without taking the token there."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            request.headers.pop("Authorization", None)
        return request


class _Client:
    """Requests to one hub."""

    def __init__(self) -> None:
        self.endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")
        self.token = os.environ.get("HF_TOKEN")
        self._opener = urllib.request.build_opener(_Redirects())

    def listing(self, source: HubSource) -> tuple[str, list[RemoteFile]]:
        """The commit a revision stands for, and its files."""
        revision = urllib.parse.quote(source.revision, safe="")
        url = f"{self.endpoint}/api/models/{source.repository}/revision/{revision}?blobs=true"
        try:
            with self._get(url, {}) as reply:
                answer = json.load(reply)
            files = [_remote_file(entry) for entry in answer["siblings"]]
            return str(answer["sha"]), files
        except urllib.error.HTTPError as error:
            raise self._refused(source, error) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(source, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{self.endpoint} gave no usable file list for hf:{source.repository}") from error

    def download(
        self, source: HubSource, commit: str, file: RemoteFile, folder: Path, progress: Progress | None
    ) -> None:
        """Fetch one file, continuing a part that is there already."""
        url = f"{self.endpoint}/{source.repository}/resolve/{commit}/{urllib.parse.quote(file.path)}"
        part = folder / f"{file.name}.part"
        failures, damaged = 0, False
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                if file.size is None or before < file.size:
                    self._continue(url, file, part, progress)
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    raise self._refused(source, error) from error
                cause: Exception = error
            except (OSError, http.client.HTTPException) as error:
                cause = error
            else:
                if _intact(part, file, progress):
                    part.rename(folder / file.name)
                    return
                part.unlink()
                if damaged:
                    raise SourceError(f"{file.name} of hf:{source.repository} arrived damaged twice; try again later")
                damaged = True
                continue
            grown = part.exists() and part.stat().st_size > before
            failures = 0 if grown else failures + 1
            if failures >= ATTEMPTS:
                raise self._unreachable(source, cause) from cause
            time.sleep(0.2 * 2**failures if failures else 0.05)

    def _continue(self, url: str, file: RemoteFile, part: Path, progress: Progress | None) -> None:
        done = part.stat().st_size if part.exists() else 0
        with self._get(url, {"Range": f"bytes={done}-"} if done else {}) as reply:
            if done and reply.status != 206:
                done = 0  # the server sends the whole file again
            with part.open("ab" if done else "wb") as out:
                while chunk := reply.read(_CHUNK):
                    out.write(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(f"downloading {file.name}", done, file.size)
        if file.size is not None and done < file.size:
            raise http.client.IncompleteRead(b"", file.size - done)

    def _get(self, url: str, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "penstock", **headers})
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _refused(self, source: HubSource, error: urllib.error.HTTPError) -> SourceError:
        name = f"hf:{source.repository}"
        if error.code in (401, 403):
            advice = "its terms may need accepting, and HF_TOKEN must then hold a token of that account"
            return SourceError(f"{self.endpoint} refuses access to {name} (HTTP {error.code}): {advice}")
        if error.code == 404:
            return SourceError(f"{name} at revision {source.revision!r} does not exist on {self.endpoint} (HTTP 404)")
        return SourceError(f"{self.endpoint} answered HTTP {error.code} for {name}; try again later")

    def _unreachable(self, source: HubSource, error: Exception) -> SourceError:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return SourceError(
            f"hf:{source.repository} cannot be fetched: no answer from {self.endpoint} ({reason}). Check the network "
            f"or proxy, set HF_ENDPOINT to a mirror, or give a local path or an alias from a package index"
        )


def _remote_file(entry: dict[str, Any]) -> RemoteFile:
    large = entry.get("lfs")
    if large:
        return RemoteFile(entry["rfilename"], large.get("size"), f"sha256:{large['sha256']}")
    blob = entry.get("blobId")
    return RemoteFile(entry["rfilename"], entry.get("size"), f"git:{blob}" if blob else None)


def _intact(part: Path, file: RemoteFile, progress: Progress | None) -> bool:
    """Whether the bytes are those the hub announced: large files by SHA-256, small ones by their git blob id."""
    size = part.stat().st_size
    if file.size is not None and size != file.size:
        return False
    if file.digest is None:
        return True
    algorithm, _, expected = file.digest.partition(":")
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with part.open("rb") as handle:
        while chunk := handle.read(8 * _CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(f"verifying {file.name}", handle.tell(), size)
    return digest.hexdigest() == expected
