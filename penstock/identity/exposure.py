"""Refuses to expose a server without keys: an address that other machines can reach needs one, and so does a server
that has had keys."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.identity.store import IdentityStore
from penstock.protocol.address import is_loopback
from penstock.storage import open_database


async def check_exposure(host: str, store_url: str) -> bool:
    """Whether clients need a key. ConfigError when there is none and other machines can reach `host`, or there were
    keys before."""
    database = await open_database(store_url)
    try:
        store = IdentityStore(database)
        await store.prepare()
        has_keys = await store.has_keys()
        if has_keys or is_loopback(host):
            return has_keys
    finally:
        await database.close()
    raise ConfigError(
        f"other machines can reach {host}, and there is no API key yet, so anyone could use this server; "
        "create one with `penstock keys create`, or listen on 127.0.0.1"
    )
