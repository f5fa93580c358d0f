"""The console's files: its own, and the parts of the UI library it uses, read from the installed package.

Names are looked up in a table built at startup, so a path from a request never becomes a path on disk. A file is read
once, off the event loop, and kept with its ETag and its compressed form.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.util
import mimetypes
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError

_OWN = Path(__file__).parent / "static"
_LIBRARY = "nicegui"
_TAKEN = {
    "lib/vue.js": "static/vue.esm-browser.prod.js",
    "lib/quasar.js": "static/quasar.umd.prod.js",
    "lib/quasar.css": "static/quasar.unimportant.prod.css",
    "lib/quasar.important.css": "static/quasar.important.prod.css",
    "lib/fonts.css": "static/fonts.css",
}
"""Files that the console loads, and their paths in the library."""
_TAKEN_FOLDERS = {"lib/fonts": "static/fonts", "lib/echarts": "elements/echart/dist"}
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
        library = library_folder()
        self._files |= {name: library / path for name, path in _TAKEN.items()}
        for name, folder in _TAKEN_FOLDERS.items():
            self._files |= {f"{name}/{path.name}": path for path in (library / folder).iterdir() if path.is_file()}
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


def library_folder() -> Path:
    """The folder of the installed UI library; the library is not imported."""
    found = importlib.util.find_spec(_LIBRARY)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"the console needs the package {_LIBRARY}; reinstall Penstock, or set server.console: false")
    return Path(found.submodule_search_locations[0])


def _load(path: Path) -> Asset:
    body = path.read_bytes()
    media_type = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0] or "text/plain"
    if media_type.startswith("text/"):
        media_type += "; charset=utf-8"
    compressed = gzip.compress(body, 6, mtime=0) if path.suffix in _COMPRESSED and len(body) > 1024 else None
    return Asset(body, compressed, media_type, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
