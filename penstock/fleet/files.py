"""Writes generated files into a folder, never over what someone has changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.errors import ConfigError


def write_files(files: Mapping[str, str], folder: Path, *, force: bool = False) -> list[Path]:
    """Writes each text to its path in `folder`; returns the paths. A file that is there with other contents is an error
    before anything is written, unless `force`."""
    paths = {folder / name: text for name, text in files.items()}
    if not force:
        changed = [path for path, text in paths.items() if path.exists() and path.read_text() != text]
        if changed:
            names = ", ".join(str(path) for path in changed)
            raise ConfigError(f"{names}: exists with other contents; use --force to replace it, or another --output")
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from error
    return list(paths)
