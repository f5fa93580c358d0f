"""Models from a Hugging Face hub, through `huggingface_hub`.

Only the files that an engine needs are downloaded. Each is written to `NAME.part` and resumed from where it stopped, in
this attempt or a later one (the library's own `hf_hub_download` starts over in a new process); it gets its name once
its size and the hash that the hub announces for it agree. `HF_ENDPOINT` and `HF_TOKEN` apply.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import SourceError
from penstock.sources.model_cache import Progress, Slot, require_space

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.hf_api import RepoSibling

DEFAULT_ENDPOINT = "https://huggingface.co"
TIMEOUT_S = 15.0
ATTEMPTS = 5
"""Consecutive attempts that bring nothing new before a download is given up."""
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q6_K", "Q8_0", "BF16", "F16")
"""Which GGUF file to take from a repository of several, when none is named."""

_SMALL = re.compile(
    r"config\.json|adapter_config\.json|generation_config\.json|tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|chat_template\.(json|jinja)|LICEN[CS]E.*|NOTICE.*"
    r"|\w+\.py"
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


def fetch_repository(
    source: HubSource,
    slot: Slot,
    label: str,
    progress: Progress | None,
    *,
    weights: bool = True,
    pickled: bool = False,
) -> None:
    """Fill the slot from a repository. Call with the slot's lock held. Earlier partial files are resumed."""
    client = _HubClient(source)
    commit, listing = client.listing()
    files = choose_files(listing, source, weights=weights, pickled=pickled)
    slot.partial.mkdir(parents=True, exist_ok=True)
    _forget_other_commit(slot.partial, commit)
    present = sum(file.stat().st_size for file in slot.partial.iterdir() if file.is_file())
    require_space(slot.partial, sum(file.size or 0 for file in files) - present)
    for file in files:
        if not (slot.partial / file.name).exists():
            client.download(commit, file, slot.partial, progress)
    (slot.partial / _COMMIT).unlink()
    wanted = {file.name for file in files}
    for stray in slot.partial.iterdir():
        if stray.name not in wanted:
            stray.unlink()
    slot.publish(f"{label} ({commit})")


def fetch_file(source: HubSource, name: str, folder: Path) -> Path:
    """One small file of a repository, written to `folder`."""
    client = _HubClient(source)
    commit, listing = client.listing()
    for file in listing:
        if file.path == name:
            client.download(commit, file, folder, None)
            return folder / name
    raise SourceError(f"hf:{source.repository} has no {name}; fetch the model with `penstock pull`, then give its path")


_COMMIT = ".commit"


def _forget_other_commit(folder: Path, commit: str) -> None:
    """Parts of two revisions must not be joined: start over when the repository has moved on."""
    mark = folder / _COMMIT
    if not mark.exists() or mark.read_text() != commit:
        shutil.rmtree(folder)
        folder.mkdir()
        mark.write_text(commit)


def choose_files(
    listing: list[RemoteFile], source: HubSource, *, weights: bool = True, pickled: bool = False
) -> list[RemoteFile]:
    """The files worth fetching: safetensors with their configuration, or one GGUF file, which is all in one. `pickled`:
    without those also `pytorch_model.bin`, as some heads of drafters are published."""
    top = [file for file in listing if "/" not in file.path]
    small = [file for file in top if _SMALL.fullmatch(file.name)]
    tensors = [file for file in top if file.name.endswith((".safetensors", ".safetensors.index.json"))]
    if any(file.name == "model.safetensors.index.json" or file.name == "model.safetensors" for file in tensors):
        tensors = [file for file in tensors if file.name.startswith("model")]
    ggufs = [file for file in listing if file.name.lower().endswith(".gguf")]
    if pickled and not tensors and not ggufs:
        tensors = [file for file in top if file.name == "pytorch_model.bin"]
    if tensors and source.choice is None:
        return [*small, *tensors] if weights else small
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


class _HubClient:
    """One repository of a hub."""

    def __init__(self, source: HubSource) -> None:
        self.source = source
        self.endpoint = os.environ.get("HF_ENDPOINT", DEFAULT_ENDPOINT).rstrip("/")

    def listing(self) -> tuple[str, list[RemoteFile]]:
        """The commit that the revision stands for, and its files."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

        source = self.source
        try:
            info = HfApi(self.endpoint, library_name="penstock").model_info(
                source.repository, revision=source.revision, timeout=TIMEOUT_S, files_metadata=True
            )
            if info.sha is None or info.siblings is None:
                raise KeyError("sha and siblings")
            return info.sha, [_remote_file(sibling) for sibling in info.siblings]
        except HfHubHTTPError as error:
            raise self._refused(error) from error
        except (OSError, httpx.HTTPError) as error:
            raise self._unreachable(error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{self.endpoint} gave no usable file list for hf:{source.repository}") from error

    def download(self, commit: str, file: RemoteFile, folder: Path, progress: Progress | None) -> None:
        """Fetch one file, resuming a part that is there already."""
        part = folder / f"{file.name}.part"
        for _ in range(2):
            if part.exists() and file.size is not None and part.stat().st_size > file.size:
                part.unlink()
            self._complete(commit, file, part, progress)
            if _intact(part, file, progress):
                part.rename(folder / file.name)
                return
            part.unlink()
        raise SourceError(f"{file.name} of hf:{self.source.repository} arrived damaged twice; try again later")

    def _complete(self, commit: str, file: RemoteFile, part: Path, progress: Progress | None) -> None:
        """Append what `part` lacks. The library resumes most cut connections; resets and server errors are retried
        here, until `ATTEMPTS` in a row brought nothing new."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers, httpx  # type: ignore[attr-defined]

        url = hf_hub_url(self.source.repository, file.path, revision=commit, endpoint=self.endpoint)
        headers = build_hf_headers(library_name="penstock")
        failures = 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            try:
                with part.open("ab") as out:
                    http_get(
                        url,
                        out,
                        resume_size=before,
                        headers=headers,
                        expected_size=file.size,
                        displayed_filename=file.name,
                        tqdm_class=_progress_bar(file, progress),
                    )
                return
            except HfHubHTTPError as error:
                problem = self._refused(error)
                if error.response.status_code < 500:
                    raise problem from error
            except httpx.HTTPError as error:
                problem = self._unreachable(error)
            except ValueError as error:  # larger than the hub sends over plain HTTP
                raise SourceError(f"{file.name} of hf:{self.source.repository} cannot be fetched: {error}") from error
            except OSError as error:
                if error.errno is not None:  # an error of the disk
                    raise
                return  # not as long as announced: `_intact` finds it damaged
            failures = 0 if part.stat().st_size > before else failures + 1
            if failures >= ATTEMPTS:
                raise problem
            time.sleep(0.2 * 2**failures if failures else 0.05)

    def _refused(self, error: HfHubHTTPError) -> SourceError:
        name, status = f"hf:{self.source.repository}", error.response.status_code
        if status in (401, 403):
            advice = "its terms may need accepting, and HF_TOKEN must then hold a token of that account"
            return SourceError(f"{self.endpoint} refuses access to {name} (HTTP {status}): {advice}")
        if status == 404:
            revision = self.source.revision
            return SourceError(f"{name} at revision {revision!r} does not exist on {self.endpoint} (HTTP 404)")
        return SourceError(f"{self.endpoint} answered HTTP {status} for {name}; try again later")

    def _unreachable(self, error: Exception) -> SourceError:
        return SourceError(
            f"hf:{self.source.repository} cannot be fetched: no answer from {self.endpoint} ({error}). Check the "
            f"network or proxy, set HF_ENDPOINT to a mirror, or give a local path or an alias from a package index"
        )


def _progress_bar(file: RemoteFile, progress: Progress | None) -> Any:
    """A class that the library uses as a tqdm bar, and that reports to `progress` instead of drawing."""

    class Bar:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.done = initial

        def update(self, count: int) -> None:
            self.done += count
            if progress is not None:
                progress(f"downloading {file.name}", self.done, file.size)

        def __enter__(self) -> Bar:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            pass

    return Bar


def _remote_file(sibling: RepoSibling) -> RemoteFile:
    if sibling.lfs is not None:
        return RemoteFile(sibling.rfilename, sibling.lfs.size, f"sha256:{sibling.lfs.sha256}")
    return RemoteFile(sibling.rfilename, sibling.size, f"git:{sibling.blob_id}" if sibling.blob_id else None)


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
