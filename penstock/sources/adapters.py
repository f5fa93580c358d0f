"""Resolves an adapter's source to a local folder: a path, `hf:ORG/NAME` or `s3://BUCKET/PREFIX`."""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.engine.adapters.folder import changes_outputs, default_rank, stored_keys, virtual_tokens
from penstock.engine.adapters.spec import CONFIG, WEIGHTS, AdapterSpec
from penstock.errors import SourceError

if TYPE_CHECKING:
    from penstock.sources.model_cache import Slot

log = logging.getLogger("penstock.engine")

_LOOKUP_S = 20.0
"""How long starting may wait for the configurations of adapters that are elsewhere."""
_LOOKUPS = 8
TEXT_FILES = (CONFIG, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""What a gateway reads of an adapter."""
_MOST_TEXT_BYTES = 128 << 20
"""Of each of them; none that can be read is larger."""
_TEXT_S = 60
"""How long one of them may take."""
_ASK_AGAIN_S = 30.0
_MOST_ASKED = 4096


def resolve_adapter(source: str) -> Path:
    """The adapter's folder, downloaded if it is missing. A hub repository is taken from the cache once it is there; a
    bucket is always checked for changes."""
    from penstock.sources.model_cache import Slot, cache_dir
    from penstock.sources.object_store import fetch_files
    from penstock.sources.resolve import cache_key, resolve

    if source.startswith("s3://"):
        return fetch_files(source, (CONFIG, WEIGHTS), Slot(cache_dir(), cache_key(source)))
    check_adapter(source)
    return resolve(source)


def adapter_folder(source: str) -> Path | None:
    """The folder with the adapter's tokenizer and chat template, if it is on this machine: nothing is fetched."""
    from penstock.sources.resolve import cached

    if not source:
        return None
    if not _is_remote(source):
        folder: Path | None = Path(source).expanduser()
    else:
        folder = None if source.startswith("s3://") else cached(source)
        if folder is None:
            slot = _text_slot(source)
            folder = slot.folder if slot.complete() else None
    return folder if folder is not None and folder.is_dir() else None


def _text_slot(source: str) -> Slot:
    from penstock.sources.model_cache import Slot, cache_dir
    from penstock.sources.resolve import cache_key

    return Slot(cache_dir(), f"{cache_key(source)}-text")


class TextFetcher:
    """Fetches tokenizers and chat templates of adapters that are elsewhere, for gateways, which need no weights. Those
    of a hub once; a bucket is asked again now and then. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._lock = threading.Lock()

    def due(self, source: str) -> Callable[[], None] | None:
        """What fetches the files of an adapter, which may take a while; None: there is nothing to fetch, or it was
        handed out a moment ago."""
        if not _is_remote(source):
            return None
        with self._lock:
            now = self._clock()
            if now < self._asked.get(source, -math.inf) + _ASK_AGAIN_S:
                return None
            self._asked.pop(source, None)
            self._asked[source] = now
            while len(self._asked) > _MOST_ASKED:
                self._asked.pop(next(iter(self._asked)))
        try:
            there = not source.startswith("s3://") and adapter_folder(source) is not None
        except SourceError:  # it names no repository: whoever looks for the folder is told
            return None
        return None if there else partial(self._fetch, source)

    def _fetch(self, source: str) -> None:
        from penstock.sources.object_store import fetch_files
        from penstock.sources.resolve import resolve

        try:
            if source.startswith("s3://"):
                slot = _text_slot(source)
                fetch_files(source, TEXT_FILES, slot, optional=True, limit_s=_TEXT_S, most_bytes=_MOST_TEXT_BYTES)
            else:
                resolve(source, weights=False)
        except Exception as error:  # whatever a store answers: requests wait for this
            log.warning("the tokenizer of adapter %s cannot be fetched (%s): what is here is used", source, error)


def check_adapter(source: str) -> None:
    """Raises for a folder that does not exist; what can be fetched is not looked up."""
    if not _is_remote(source) and not Path(source).expanduser().is_dir():
        raise SourceError(
            f"there is no adapter folder {source!r}; give a folder with {CONFIG} and {WEIGHTS}, hf:ORG/NAME or "
            "s3://BUCKET/PREFIX"
        )


@dataclass(frozen=True, slots=True)
class Needs:
    """What slots are made for."""

    rank: int
    """`adapter_rank` when none is configured: the largest rank of the listed adapters."""
    vectors: bool
    """`adapter_vectors` when it is not configured: whether one of them changes single outputs or norms."""
    elsewhere: tuple[tuple[int, int], ...] = ()
    """See `EngineConfig.adapters_elsewhere`."""

    @classmethod
    def of(cls, folders: Sequence[Path], fetched: Sequence[Path] = ()) -> Needs:
        """`fetched`: with the configurations of those that are elsewhere."""
        every = [*folders, *fetched]
        elsewhere = tuple((virtual_tokens(one), stored_keys(one)) for one in fetched)
        return cls(default_rank(every), any(map(changes_outputs, every)), elsewhere)


def needs_of_listed(specs: Sequence[AdapterSpec]) -> Needs:
    """What these adapters need. Of those that are elsewhere only the configuration is fetched, and one that cannot be
    fetched now does not count."""
    folders = [Path(spec.source).expanduser() for spec in specs if not _is_remote(spec.source)]
    remote = [spec for spec in specs if _is_remote(spec.source)]
    if not remote:
        return Needs.of(folders)
    with tempfile.TemporaryDirectory(prefix="penstock-adapters-", ignore_cleanup_errors=True) as scratch:
        pool = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="adapter configurations")
        lookups = {
            pool.submit(_fetch_config, spec.source, Path(scratch) / str(number)): spec
            for number, spec in enumerate(remote)
        }
        fetched: list[Path] = []
        done, late = wait_for(lookups, timeout=_LOOKUP_S)
        pool.shutdown(wait=False, cancel_futures=True)
        problems = {lookups[lookup].name: "no answer in time" for lookup in late}
        for lookup in done:
            error = lookup.exception()
            if error is None:
                fetched.append(lookup.result())
            else:
                problems[lookups[lookup].name] = str(error)
        needs = Needs.of(folders, fetched)
    for name, problem in problems.items():
        log.warning(
            "the rank of adapter %s is not known (%s): slots are made for rank %d, or adapter_rank; set that, "
            "adapter_vectors and adapter_tokens if it needs more",
            name, problem, needs.rank,
        )  # fmt: skip
    return needs


def _fetch_config(source: str, scratch: Path) -> Path:
    """A folder with the adapter's configuration."""
    from penstock.sources.hub import fetch_file
    from penstock.sources.model_cache import Slot
    from penstock.sources.object_store import fetch_files
    from penstock.sources.resolve import cache_key, cached, parse_hub

    if source.startswith("s3://"):
        return fetch_files(source, (CONFIG,), Slot(scratch, cache_key(source)))
    folder = cached(source)
    if folder is None:
        scratch.mkdir()
        folder = fetch_file(parse_hub(source), CONFIG, scratch).parent
    return folder


def _is_remote(source: str) -> bool:
    return source.startswith(("hf:", "s3://"))
