"""How many uploads are processed at once. Each is in memory meanwhile, so there are few, and a tenant gets only some of
them: its other uploads wait behind its own, not in front of everybody's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

AT_ONCE = 4
OF_A_TENANT = 2


@dataclass(slots=True)
class _Tenant:
    slots: asyncio.Semaphore
    users: int = field(default=0)


class UploadSlots:
    """Slots are taken once a body has arrived, so that slow senders hold none."""

    def __init__(self, at_once: int = AT_ONCE, of_a_tenant: int = OF_A_TENANT) -> None:
        self._all = asyncio.Semaphore(at_once)
        self._of_a_tenant = of_a_tenant
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncIterator[None]:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(asyncio.Semaphore(self._of_a_tenant))
        tenant.users += 1
        try:
            async with tenant.slots, self._all:
                yield
        finally:
            tenant.users -= 1
            if not tenant.users:
                del self._tenants[name]
