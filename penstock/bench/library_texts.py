"""Text and code that every machine with Python has: its standard library, as windows of tokens.

Code are the modules themselves; text are the language reference that `help()` shows and the docstrings of the modules.
Some modules are held out, so that what is learned from the others can be measured on them.
"""

from __future__ import annotations

import ast
import pydoc_data.topics
import random
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

Encode = Callable[[str], list[int]]
Windows = npt.NDArray[np.int64]
HELD_OUT = frozenset({"argparse", "calendar", "configparser", "csv", "fractions", "heapq", "shlex", "statistics",
                      "string", "textwrap", "threading", "zipfile"})  # fmt: skip
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "pydoc_data",
            "turtledemo", "__pycache__"}  # fmt: skip
_LEAST_DOC = 200
"""Characters of a docstring worth reading."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Prompts: windows of tokens to continue."""

    train: Windows
    text: Windows
    """Held out; so is `code`."""
    code: Windows

    def write(self, path: Path) -> None:
        np.savez_compressed(path, train=self.train, text=self.text, code=self.code)


def read_corpus(path: Path) -> Corpus:
    """What `Corpus.write` has written."""
    try:
        with np.load(path) as found:
            return Corpus(*(found[name].astype(np.int64) for name in ("train", "text", "code")))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not a file of prompts: {error}") from error


def make_corpus(encode: Encode, *, files: Sequence[Path] = (), prompts: int = 8192, length: int = 96) -> Corpus:
    """From the standard library, or to learn from `files`; the held-out part is always the library's."""
    rng = random.Random(0)
    if files:
        learned = windows(encode, map(_read, files), length)
    else:
        parts = [windows(encode, texts, length) for texts in _texts(held=False)]
        learned = [window for part in parts for window in rng.sample(part, min(len(part), prompts // 2))]
    rng.shuffle(learned)
    held = held_out(encode, length)
    if not learned or not all(held):
        raise ConfigError(f"there is too little text for prompts of {length} tokens; give files or shorter prompts")
    return Corpus(*(np.array(part, np.int64) for part in (learned[:prompts], *held)))


def held_out(encode: Encode, length: int = 96) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of text and of code that `make_corpus` leaves for measuring."""
    rng = random.Random(1)
    text, code = (windows(encode, texts, length) for texts in _texts(held=True))
    return rng.sample(text, min(len(text), 64)), rng.sample(code, min(len(code), 64))


def _texts(*, held: bool) -> tuple[list[str], list[str]]:
    """Text and code, held out or not."""
    text, code = [], []
    for path in library():
        if (path.stem in HELD_OUT) == held:
            code.append(_read(path))
            text += docstrings(code[-1])
    topics = pydoc_data.topics.topics
    return text + [topics[name] for index, name in enumerate(sorted(topics)) if (index % 10 == 0) == held], code


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def library() -> list[Path]:
    """The modules of the standard library that are worth reading."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))


def docstrings(source: str) -> list[str]:
    """The longer ones of a module; none where it cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [doc for doc in found if doc and len(doc) >= _LEAST_DOC]


def windows(encode: Encode, texts: Iterable[str], length: int) -> list[list[int]]:
    """Parts of the texts, one after the other, each of `length` tokens."""
    found: list[list[int]] = []
    for text in texts:
        tokens = encode(text)
        found += [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)]
    return found
