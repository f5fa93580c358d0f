"""The nouns of identity. A tenant owns users and keys; a tier, named in the configuration, says what it may do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.identity.allowance import NO_ALLOWANCE, Allowance

Scope = Literal["inference", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = ("inference", "admin", "metrics")
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Somebody who pays. `tier` empty: the configuration's default."""

    id: str
    name: str = ""
    tier: str = ""
    disabled: bool = False
    created_at: float = 0.0
    limits: Allowance = NO_ALLOWANCE
    """Instead of the tier's."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as it is stored and shown: never its secret."""

    id: str
    """The public part, with which every key begins: `psk_` and eight characters."""
    tenant: str
    user: str = ""
    """Whom it belongs to inside the tenant; empty for a key that several users share."""
    name: str = ""
    scopes: tuple[Scope, ...] = ("inference",)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    limits: Allowance = NO_ALLOWANCE
    """Besides its tenant's."""

    def usable(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whom a request is from, as far as the key tells."""

    tenant: str
    user: str = ""
    key: str = ""
    tier: str = ""
    scopes: frozenset[Scope] = field(default_factory=lambda: frozenset[Scope](("inference",)))
    limits: Allowance = NO_ALLOWANCE
    """Of the tenant, instead of its tier's."""
    key_limits: Allowance = NO_ALLOWANCE


OPEN_CALLER = Caller(DEFAULT_TENANT, scopes=frozenset(SCOPES))
"""Everybody, where there are no keys (loopback only)."""
