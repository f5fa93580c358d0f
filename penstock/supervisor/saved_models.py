"""The file of models loaded at run time (`server.loaded_models`), for the next start.

It belongs to one server, like its configuration, and holds each model's description as it was sent. It is replaced
atomically, so a reader always finds a complete file.
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
    """Model descriptions by name. Without a path nothing is saved."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._models: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            try:
                self._models = _decoder.decode(path.read_bytes())
            except (OSError, msgspec.MsgspecError) as error:
                log.error(
                    "saved models cannot be read; they are not served", extra={"path": str(path), "why": str(error)}
                )

    @property
    def models(self) -> list[dict[str, Any]]:
        return list(self._models.values())

    def add(self, description: Mapping[str, Any], name: str) -> None:
        self._models[name] = dict(description)
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
            log.error(
                "saved models cannot be written; the next start will miss some",
                extra={"path": str(self._path), "why": str(error)},
            )
