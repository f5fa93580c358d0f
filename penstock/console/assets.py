"""The console's files: its own, and the libraries that the browser loads with them.

Names are looked up in a table built at startup, so a path from a request never becomes a path on disk. A file is read
once, off the event loop, and kept with its ETag and its compressed form.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from penstock.console import libraries

_OWN = Path(__file__).parent / "static"
_COMPRESSED = {".js", ".css", ".html", ".svg"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    compressed: bytes | None
    media_type: str
    tag: str


class Assets:
    """Every file of the console by its path below `/console/`."""

    def __init__(self) -> None:
        self._files = {str(path.relative_to(_OWN)): path for path in _OWN.rglob("*") if path.is_file()}
        library = libraries.folder()
        self._files |= {f"lib/{path.relative_to(library)}": path for path in library.rglob("*") if path.is_file()}
        self._read: dict[str, Asset] = {}

    @property
    def names(self) -> list[str]:
        return sorted(self._files)

    async def get(self, name: str) -> Asset | None:
        path = self._files.get(name)
        if path is None:
            return None
        asset = self._read.get(name)
        if asset is None:
            asset = self._read[name] = await asyncio.to_thread(_load, path)
        return asset


def _load(path: Path) -> Asset:
    body = path.read_bytes()
    media_type = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0] or "text/plain"
    if media_type.startswith("text/"):
        media_type += "; charset=utf-8"
    compressed = gzip.compress(body, 6, mtime=0) if path.suffix in _COMPRESSED and len(body) > 1024 else None
    return Asset(body, compressed, media_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
