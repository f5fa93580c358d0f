"""The configuration of a model on a hub, without its weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from penstock.errors import SourceError
from penstock.sources.hub import fetch_file
from penstock.sources.resolve import parse_hub

CONFIG = "config.json"


def hub_config(source: str) -> Any:
    """What `config.json` of `hf:ORG/NAME[@REVISION]` holds."""
    parsed = parse_hub(source)
    with tempfile.TemporaryDirectory() as folder:
        file = fetch_file(parsed, CONFIG, Path(folder))
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SourceError(f"{CONFIG} of hf:{parsed.repository} is not JSON: {error}") from error
