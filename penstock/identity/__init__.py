"""Tenants, users and API keys, and how a key is resolved to a caller."""

from penstock.identity.entities import OPEN_CALLER, SCOPES, ApiKey, Caller, Scope, Tenant
from penstock.identity.keyring import KeyRing
from penstock.identity.store import IdentityStore

__all__ = ["OPEN_CALLER", "SCOPES", "ApiKey", "Caller", "IdentityStore", "KeyRing", "Scope", "Tenant"]
