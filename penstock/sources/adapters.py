"""Resolves an adapter's source to a local folder: a path, `hf:ORG/NAME` or `s3://BUCKET/PREFIX`."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.adapters.spec import CONFIG, WEIGHTS
from penstock.errors import SourceError


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


def check_adapter(source: str) -> None:
    """Raises for a folder that does not exist; what can be fetched is not looked up."""
    if not source.startswith(("hf:", "s3://")) and not Path(source).expanduser().is_dir():
        raise SourceError(
            f"there is no adapter folder {source!r}; give a folder with {CONFIG} and {WEIGHTS}, hf:ORG/NAME or "
            "s3://BUCKET/PREFIX"
        )
