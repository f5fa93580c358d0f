"""The text side of a model with an adapter: an adapter's folder may bring a tokenizer and a chat template of its own.

What it does not bring is the model's. A tokenizer that is the model's own is not kept twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from penstock.text.loader import own_templates, read_tokenizer, special_tokens
from penstock.text.text_model import TextModel

TOKENIZER = "tokenizer.json"
FILES = (TOKENIZER, "tokenizer_config.json", "chat_template.jinja", "chat_template.json")
"""What of an adapter's folder counts here."""
Stamp = tuple[tuple[int, int], ...]
_KEPT = 64
"""Adapters with texts of their own that are kept in memory."""


def adapter_text(folder: Path, base: TextModel, base_folder: Path | None = None) -> TextModel:
    """The text side of `base` with the adapter in `folder`; `base` itself where that brings nothing of its own."""
    brought = (folder / TOKENIZER).exists() and not _same(folder, base_folder)
    templates = own_templates(folder)
    if templates == {"default": base.template_source}:
        templates = {}
    if not brought and not templates:
        return base
    return base.adapted(read_tokenizer(folder) if brought else None, templates, special_tokens(folder))


def _same(folder: Path, other: Path | None) -> bool:
    """Whether both have the same tokenizer file."""
    if other is None or not (other / TOKENIZER).is_file():
        return False
    return (folder / TOKENIZER).read_bytes() == (other / TOKENIZER).read_bytes()


class AdapterTexts:
    """The texts of a model's adapters, read again when their files change. Thread-safe."""

    def __init__(self, base: TextModel, base_folder: Path | None, find: Callable[[str], Path | None]) -> None:
        """`find`: the folder of an adapter's source, None where it is not on this machine."""
        self.base = base
        self._base_folder = base_folder
        self._find = find
        self._known: dict[Path, tuple[Stamp, TextModel]] = {}
        self._lock = threading.Lock()

    def of(self, source: str) -> TextModel:
        """Reads files the first time."""
        folder = self._find(source)
        if folder is None:
            return self.base
        stamp = _stamp(folder)
        if not any(size for size, _ in stamp):
            return self.base
        with self._lock:
            known = self._known.get(folder)
            if known is None or known[0] != stamp:
                known = stamp, adapter_text(folder, self.base, self._base_folder)
                self._known.pop(folder, None)
                self._known[folder] = known
                while len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
            return known[1]


def _stamp(folder: Path) -> Stamp:
    """Changes when a file does."""
    found = []
    for name in FILES:
        try:
            stat = (folder / name).stat()
        except OSError:
            found.append((0, 0))
        else:
            found.append((stat.st_size, stat.st_mtime_ns))
    return tuple(found)
