"""The model cache: one folder per fetched model, complete or absent.

A model is assembled in a `.partial` folder next to its final place and renamed when all files are complete and checked;
a manifest records the sizes, so a file that was cut short later is noticed too. A lock per model keeps two
processes from fetching the same thing at once; the kernel drops it when its holder dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SourceError

MANIFEST = "penstock.json"

Progress = Callable[[str, int, int | None], None]
"""Called as (what is happening, bytes done, bytes in all or None when unknown)."""


def cache_dir() -> Path:
    """`$PENSTOCK_CACHE`, or `~/.cache/penstock`."""
    configured = os.environ.get("PENSTOCK_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "penstock"


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one model in the cache."""

    root: Path
    key: str

    @property
    def folder(self) -> Path:
        return self.root / "models" / self.key

    @property
    def partial(self) -> Path:
        return self.root / "models" / f"{self.key}.partial"

    def complete(self) -> bool:
        """Whether every file of the manifest is there at its full size."""
        try:
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            sizes = dict(manifest["files"])
            return bool(sizes) and all((self.folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def publish(self, source: str) -> None:
        """Rename the partial folder to its final name. One that is there is gone for no longer than that takes. Call
        with the lock held."""
        files = sorted(file for file in self.partial.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(self.partial)): file.stat().st_size for file in files}
        manifest = self.partial / MANIFEST
        manifest.write_text(json.dumps({"source": source, "files": sizes}, indent=2) + "\n")
        for file in (*files, manifest):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        before = self.folder.with_name(f"{self.key}.before")
        shutil.rmtree(before, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(before)
        self.partial.rename(self.folder)
        shutil.rmtree(before, ignore_errors=True)

    @contextmanager
    def lock(self, progress: Progress | None = None) -> Iterator[None]:
        """Hold the model's lock; says so through `progress` while another process has it."""
        locks = self.root / "locks"
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            locks.mkdir(parents=True, exist_ok=True)
            handle = os.open(locks / f"{self.key}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SourceError(
                f"the model cache {self.root} cannot be written ({error}); set PENSTOCK_CACHE to a folder that can"
            ) from error
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if progress is not None:
                        progress("waiting for another process that is fetching this model", 0, None)
                    time.sleep(0.2)
            yield
        finally:
            os.close(handle)


def require_space(folder: Path, needed: int) -> None:
    """Refuse to start a download that the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise SourceError(
            f"{needed / 1e9:.1f} GB are needed in {folder} and {free / 1e9:.1f} GB are free; "
            f"make room or set PENSTOCK_CACHE to another disk"
        )
