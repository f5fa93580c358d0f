"""Resolves an adapter's source to a local folder: a path, `hf:ORG/NAME` or `s3://BUCKET/PREFIX`."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from penstock.engine.adapters.spec import CONFIG, WEIGHTS, AdapterSpec, default_rank
from penstock.errors import SourceError

log = logging.getLogger("penstock.engine")

_LOOKUP_S = 20.0
"""How long starting may wait for the configurations of adapters that are elsewhere."""
_LOOKUPS = 8


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
    """The adapter's folder, if it is on this machine: nothing is fetched."""
    from penstock.sources.resolve import cached

    if not source or source.startswith("s3://"):
        return None  # of a bucket only configuration and weights are fetched
    folder = cached(source) if _is_remote(source) else Path(source).expanduser()
    return folder if folder is not None and folder.is_dir() else None


def check_adapter(source: str) -> None:
    """Raises for a folder that does not exist; what can be fetched is not looked up."""
    if not _is_remote(source) and not Path(source).expanduser().is_dir():
        raise SourceError(
            f"there is no adapter folder {source!r}; give a folder with {CONFIG} and {WEIGHTS}, hf:ORG/NAME or "
            "s3://BUCKET/PREFIX"
        )


def rank_of_listed(specs: Sequence[AdapterSpec]) -> int:
    """`adapter_rank` when none is configured: the largest rank of these adapters. Of those that are elsewhere only the
    configuration is fetched, and one that cannot be fetched now does not count."""
    folders = [Path(spec.source).expanduser() for spec in specs if not _is_remote(spec.source)]
    remote = [spec for spec in specs if _is_remote(spec.source)]
    if not remote:
        return default_rank(folders)
    with tempfile.TemporaryDirectory(prefix="penstock-adapters-", ignore_cleanup_errors=True) as scratch:
        pool = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="adapter configurations")
        lookups = {
            pool.submit(_fetch_config, spec.source, Path(scratch) / str(number)): spec
            for number, spec in enumerate(remote)
        }
        done, late = wait_for(lookups, timeout=_LOOKUP_S)
        pool.shutdown(wait=False, cancel_futures=True)
        problems = {lookups[lookup].name: "no answer in time" for lookup in late}
        for lookup in done:
            error = lookup.exception()
            if error is None:
                folders.append(lookup.result())
            else:
                problems[lookups[lookup].name] = str(error)
        rank = default_rank(folders)
    for name, problem in problems.items():
        log.warning(
            "the rank of adapter %s is not known (%s): slots are made for rank %d; set adapter_rank if it has more",
            name, problem, rank,
        )  # fmt: skip
    return rank


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
