"""Nobody is let in by accident: an address that others can reach needs keys."""

from __future__ import annotations

from penstock.errors import ConfigError
from penstock.identity.store import IdentityStore
from penstock.protocol.address import is_loopback
from penstock.storage import open_database


async def check_exposure(host: str, store_url: str) -> None:
    """Refuse to listen on `host` when other machines can reach it and there is no key."""
    if is_loopback(host):
        return
    database = await open_database(store_url)
    try:
        store = IdentityStore(database)
        await store.prepare()
        if await store.has_keys():
            return
    finally:
        await database.close()
    raise ConfigError(
        f"other machines can reach {host}, and there is no API key yet, so anybody could use this server; "
        "make one with `penstock keys create`, or listen on 127.0.0.1"
    )
