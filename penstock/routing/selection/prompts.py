"""Labelled prompts: the model size a person would choose for each. The built-in set, or a file of the same form.

Whether a prompt belongs to the test set depends on its hash, not on its position, so adding prompts never moves others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError

Size = Literal["small", "large"]


@dataclass(frozen=True, slots=True)
class Prompt:
    size: Size
    kind: str
    """Its style and, after an @, its language: `support@en`. In files of others, whatever they write."""
    text: str

    @property
    def style(self) -> str:
        return self.kind.partition("@")[0]

    @property
    def language(self) -> str:
        return self.kind.partition("@")[2] or "unknown"

    @property
    def for_testing(self) -> bool:
        return hashlib.blake2b(self.text.encode(), digest_size=1).digest()[0] % 3 == 0


def own_prompts() -> list[Prompt]:
    source = files("penstock.routing.selection") / "prompts.tsv"
    return parse(source.read_text(encoding="utf-8").splitlines(), "prompts.tsv")


def read_prompts(path: Path) -> list[Prompt]:
    try:
        return parse(path.read_text(encoding="utf-8").splitlines(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def parse(lines: Iterable[str], where: str) -> list[Prompt]:
    """Parses lines of `small|large TAB kind TAB prompt`; # begins a comment."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split("\t", 2)
        if len(parts) != 3 or parts[0] not in ("small", "large") or not parts[2].strip():
            raise ConfigError(f"{where}, line {number}: expected small or large, a kind and a prompt, tab-separated")
        found.append(Prompt("small" if parts[0] == "small" else "large", parts[1], parts[2]))
    if not found:
        raise ConfigError(f"{where} has no prompts")
    return found


def rated_prompts(path: Path) -> list[Prompt]:
    """Prompts from rated answers: a JSON object per line with `prompt`, `size` (of the model that answered) and
    `rating` (up, down). A bad rating of the small model means that the large one is needed; a bad rating of the large
    model says nothing about size."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            text, size, rating = str(row["prompt"]), row["size"], row["rating"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: expected prompt, size and rating ({error})") from error
        if size not in ("small", "large") or rating not in ("up", "down"):
            raise ConfigError(f"{path}, line {number}: size is small or large, rating up or down")
        if rating == "up" or size == "small":
            found.append(Prompt("large" if rating == "down" or size == "large" else "small", "rated", text))
    return found
