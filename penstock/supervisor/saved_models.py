"""A file of the models that were loaded while the server ran, for the next start.

It belongs to one server, like its configuration, and holds models as they were described. It is replaced as a whole, so
that it is complete whenever it is read.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("penstock.supervisor")

_decoder = msgspec.json.Decoder(dict[str, dict[str, Any]])


class SavedModels:
    """By name. Without a path nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._models: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            try:
                self._models = _decoder.decode(path.read_bytes())
            except (OSError, msgspec.MsgspecError) as error:
                log.error("%s: models that were loaded before cannot be read: %s", path, error)

    @property
    def models(self) -> list[dict[str, Any]]:
        return list(self._models.values())

    def add(self, described: Mapping[str, Any], name: str) -> None:
        self._models[name] = dict(described)
        self._write()

    def remove(self, name: str) -> None:
        if self._models.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        beside = self._path.with_name(f".{self._path.name}.new")
        try:
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(self._models)))
            os.replace(beside, self._path)
        except OSError as error:
            log.error("%s: the next start will not know of all models: %s", self._path, error)
