"""The configuration of a model on a hub, without its weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.errors import SourceError
from penstock.sources.hub import HubSource, fetch_file
from penstock.sources.resolve import cached, parse_hub

CONFIG = "config.json"


def hub_config(source: str) -> Any:
    """What `config.json` of `hf:ORG/NAME[@REVISION]` holds; of a model that is in the cache, without the network."""
    parsed = parse_hub(source)
    here = cached(source)
    if here is not None and (here / CONFIG).is_file():
        return _read(here / CONFIG, parsed)
    with tempfile.TemporaryDirectory() as folder:
        return _read(fetch_file(parsed, CONFIG, Path(folder)), parsed)


def _read(file: Path, source: HubSource) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{CONFIG} of hf:{source.repository} is not JSON: {error}") from error
