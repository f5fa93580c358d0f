"""Configuration keys: every reader declares which ones it honours, and a value that it cannot honour is refused.

The reference is the configuration class of the library that defines a format (transformers for `config.json`, peft for
adapters, ...). A key that changes what the reference computes is honoured or refused, never ignored. Keys are:

- read: the reader uses the value, or checks it itself;
- limited: some values are honoured, the others are refused;
- inert: the value does not change what a loaded model computes (training, names, token ids);
- any other key of the reference: honoured at the reference's default only, which is what running without it means.

A key that the reference does not have either cannot change what the reference computes; it is logged once. Where a
format grows by such keys (a newer version of its library), `strict` rules refuse those that switch something on.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from penstock.errors import CheckpointError

log = logging.getLogger(__name__)

_MOST_SHOWN = 20
"""Unknown keys that one line of the log names."""


class _Absent:
    def __repr__(self) -> str:
        return "leaving it out"


ABSENT = _Absent()
"""The default of a key that has none: the reference does something else as soon as it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRules:
    """What one reader does with the keys of one configuration."""

    reader: str
    """Who reads, in the plural, for messages: `llama models`."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """The keys that the reference knows, with the default of each."""
    read: Collection[str] = ()
    limited: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """The values that are honoured, by key."""
    inert: Collection[str] = ()
    strict: bool = False
    """Refuse a key that nobody knows if it is true, or a list or object that is not empty: it switches something on."""

    def knows(self, key: str) -> bool:
        return key in self.read or key in self.limited or key in self.inert or key in self.reference

    def check(self, given: Mapping[str, Any], where: str = "config.json") -> None:
        """CheckpointError for the first key whose value is not honoured. `where`: the file, or the key above."""
        unknown = []
        for key, value in given.items():
            if key in self.read or key in self.inert:
                continue
            if key in self.limited:
                honoured = self.limited[key]
            elif key in self.reference:
                honoured = (self.reference[key],)
            elif self.strict and (value is True or (isinstance(value, list | dict) and value)):
                raise CheckpointError(
                    f"{where}: {key:.80} is {_shown(value)}, a key that {self.reader} do not know; "
                    "what it changes cannot be applied"
                )
            else:
                unknown.append(f"{key if key.isprintable() else ascii(key):.80}")
                continue
            if not any(_same(value, choice) for choice in honoured):
                raise CheckpointError(
                    f"{where}: {key} is {_shown(value)}, which {self.reader} do not support; "
                    f"supported: {', '.join(_shown(choice) for choice in honoured)}"
                )
        if unknown:
            _report(self.reader, where, tuple(sorted(unknown)))


def _same(value: Any, other: Any) -> bool:
    """1 and 1.0 are the same, 1 and True are not."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: Any, longest: int = 100) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


@lru_cache(maxsize=256)
def _report(reader: str, where: str, keys: tuple[str, ...]) -> None:
    """Cached, so that each set of keys is reported once."""
    shown = ", ".join(keys[:_MOST_SHOWN]) + (f" and {len(keys) - _MOST_SHOWN} more" if len(keys) > _MOST_SHOWN else "")
    log.warning("%s: keys that %s and their reference do not know are ignored: %s", where, reader, shown)
