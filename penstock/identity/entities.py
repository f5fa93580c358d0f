"""The entities of identity. A tenant owns users and keys; its tier, defined in the configuration, sets its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.identity.access import ANY, UNLIMITED, Access, AllowList
from penstock.identity.allowance import NO_ALLOWANCE, Allowance
from penstock.identity.labels import NO_DEMAND, Demand

Scope = Literal["inference", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = ("inference", "admin", "metrics")
DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Tenant:
    """An organisation or person that is charged. `tier` empty: the configuration's default."""

    id: str
    name: str = ""
    tier: str = ""
    disabled: bool = False
    created_at: float = 0.0
    limits: Allowance = NO_ALLOWANCE
    """Replace the tier's limits."""
    require: Demand = NO_DEMAND
    """Labels that whatever gets its requests' data must have, in addition to the tier's demand."""
    allow: AllowList = UNLIMITED
    """What it may use of what its tier may use."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key without its secret, as it is stored and shown."""

    id: str
    """The public prefix of the key: `psk_` and eight characters."""
    tenant: str
    user: str = ""
    """The user inside the tenant; empty for a key that several users share."""
    name: str = ""
    scopes: tuple[Scope, ...] = ("inference",)
    created_at: float = 0.0
    expires_at: float | None = None
    revoked_at: float | None = None
    limits: Allowance = NO_ALLOWANCE
    """Apply in addition to the tenant's limits."""
    require: Demand = NO_DEMAND
    """In addition to the tenant's demand."""
    allow: AllowList = UNLIMITED
    """What it may use of what its tenant may use."""

    def usable(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as identified by its key."""

    tenant: str
    user: str = ""
    key: str = ""
    tier: str = ""
    scopes: frozenset[Scope] = field(default_factory=lambda: frozenset[Scope](("inference",)))
    limits: Allowance = NO_ALLOWANCE
    """The tenant's own limits, which replace those of its tier."""
    key_limits: Allowance = NO_ALLOWANCE
    demand: Demand = NO_DEMAND
    """What tenant and key demand; the tier's demand is in the configuration."""
    access: Access = ANY
    """What exists for the caller; see `penstock.identity.access`."""

    @property
    def only_user(self) -> str | None:
        """The only user of the tenant whose stored objects the caller may see; None: those of every user."""
        return self.user if self.user and "admin" not in self.scopes else None


OPEN_CALLER = Caller(DEFAULT_TENANT, scopes=frozenset(SCOPES), access=Access(DEFAULT_TENANT))
"""The caller of every request while there are no keys (loopback only)."""
