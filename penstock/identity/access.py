"""What a caller may use: allow-lists of names and `*` patterns, by tier, tenant and key, and owners.

Invariant: each layer can only take away; a key never reaches more than its tenant, a tenant never more than its tier.
A list that is not set allows everything without another owner, an empty one nothing. What has an owner exists for
that tenant alone, and for tenants whose own list names it in full: a pattern never opens what belongs to others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.config.access import AllowConfig
from penstock.identity.options import Change, Options

Kind = Literal["model", "adapter", "remote", "collection", "tool"]
KINDS: tuple[Kind, ...] = ("model", "adapter", "remote", "collection", "tool")
Entry = Annotated[str, Meta(min_length=1, max_length=256)]
Entries = Annotated[tuple[Entry, ...], Meta(max_length=1000)]


class AllowList(Options, frozen=True):
    """What a tier, tenant or key may use, as it is configured and stored. None: not set; empty: nothing."""

    models: Entries | None = None
    """Models, encoders and routes, by name or alias; `adapters` and `remotes` that are not set follow it."""
    adapters: Entries | None = None
    remotes: Entries | None = None
    collections: Entries | None = None
    tools: Entries | None = None
    """Tool servers (`weather`) and single functions (`weather.forecast`)."""

    @classmethod
    def configured(cls, config: AllowConfig | None) -> AllowList:
        if config is None:
            return UNLIMITED
        return cls(config.models, config.adapters, config.remotes, config.collections, config.tools)


class AllowListChange(Change, frozen=True):
    """Without a list everything is allowed."""

    models: Entries | UnsetType | None = UNSET
    adapters: Entries | UnsetType | None = UNSET
    remotes: Entries | UnsetType | None = UNSET
    collections: Entries | UnsetType | None = UNSET
    tools: Entries | UnsetType | None = UNSET


UNLIMITED = AllowList()


class _Names:
    """The entries of one list, prepared for look-ups."""

    __slots__ = ("_patterns", "exact", "patterns")

    def __init__(self, entries: tuple[str, ...]) -> None:
        self.exact = frozenset(entry for entry in entries if "*" not in entry)
        self.patterns = tuple(entry for entry in entries if "*" in entry)
        self._patterns = [entry.split("*") for entry in self.patterns]

    def match(self, name: str) -> bool:
        return name in self.exact or any(_matches(parts, name) for parts in self._patterns)


def _matches(parts: list[str], name: str) -> bool:
    """Whether a name consists of these parts with anything between them, in time that grows with their lengths only."""
    first, *middle, last = parts
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


class _Layer:
    """The lists of a tier, a tenant or a key."""

    __slots__ = ("lists",)

    def __init__(self, lists: AllowList) -> None:
        given = (lists.models, lists.adapters, lists.remotes, lists.collections, lists.tools)
        self.lists: dict[Kind, _Names | None] = {
            kind: None if entries is None else _Names(entries) for kind, entries in zip(KINDS, given, strict=True)
        }

    def permits(self, kind: Kind, names: tuple[str, ...], *, own: bool) -> bool:
        known = self.lists[kind]
        if known is None and kind in ("adapter", "remote") and not own:
            known = self.lists["model"]  # both are named where a model is
        return known is None or any(map(known.match, names))

    def permits_part(self, kind: Kind, whole: str) -> bool:
        """Whether it lists `whole`, or in full something of it."""
        known = self.lists[kind]
        if known is None or known.match(whole):
            return True
        return any(name.startswith(f"{whole}.") for name in (*known.exact, *known.patterns))

    def names(self, kind: Kind, names: tuple[str, ...]) -> bool:
        """Whether it lists one of these in full."""
        known = self.lists[kind]
        return known is not None and not known.exact.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Access:
    """What one caller may use. `Access()` is limited by owners alone."""

    tenant: str = ""
    layers: tuple[_Layer, ...] = ()
    """Of the tier, the tenant and the key, as far as they limit anything."""
    own: _Layer | None = None
    """That of the tenant, which may name what others own."""

    @classmethod
    def of(
        cls, tenant: str, tier: AllowList = UNLIMITED, own: AllowList = UNLIMITED, key: AllowList = UNLIMITED
    ) -> Access:
        if tier == own == key == UNLIMITED:
            return cls(tenant)
        mine = None if own == UNLIMITED else _Layer(own)
        layers = (
            None if tier == UNLIMITED else _Layer(tier),
            mine,
            None if key == UNLIMITED else _Layer(key),
        )
        return cls(tenant, tuple(layer for layer in layers if layer is not None), mine)

    def allows(self, kind: Kind, name: str, owner: str = "", aliases: tuple[str, ...] = ()) -> bool:
        """Whether `name`, which `owner` owns (empty: nobody), exists for the caller. It is found under any of its
        names."""
        names = (name, *aliases) if aliases else (name,)
        mine = bool(owner) and owner == self.tenant
        if owner and not mine and (self.own is None or not self.own.names(kind, names)):
            return False
        return all(layer.permits(kind, names, own=mine) for layer in self.layers)

    def allows_part(self, kind: Kind, whole: str) -> bool:
        """Whether `whole` exists for the caller, or something of it, named `whole.PART`."""
        return all(layer.permits_part(kind, whole) for layer in self.layers)

    @property
    def limited(self) -> bool:
        """Whether any list is set."""
        return bool(self.layers)


ANY = Access()
