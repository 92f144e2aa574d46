"""Usage of samples, added up for a moment and written to the store in one go.

    add* ─► (half a second) ─► one call a tenant ─► add* ...

A sample takes a worker some milliseconds, and a transaction of its own would take the store as
long. What was used is counted against the day's quota at once (`Tenants.use`); what a killed server
had not written yet, it never counts. While the store cannot write, the sums wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from marlaas.errors import MarlaasError, StoreUnavailable
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import TenantId, Usage

logger = logging.getLogger(__name__)

WRITE_EVERY_S = 0.5
"""Usage is behind by no more than this, and a busy server writes no more often."""


class Ledger:
    """The sums that are not written yet: `add`* -> `close`.

    ledger = Ledger(store)
    ledger.add("acme", "", Usage(served_tokens=40, device_s=0.2))
    await ledger.close()
    """

    def __init__(self, store: AsyncStore, after: Callable[[], Awaitable[None]]) -> None:
        """`after` is called behind every writing: what else is to be done now and then."""
        self._store = store
        self._after = after
        self._sums: dict[tuple[TenantId, str], Usage] = {}
        self._writing: asyncio.Task[None] | None = None

    def add(self, tenant_id: TenantId, job: str, usage: Usage) -> None:
        """Count what was used by versions of a job; `""` is what belongs to none."""
        before = self._sums.get((tenant_id, job))
        self._sums[tenant_id, job] = usage if before is None else before + usage
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_soon(), name="usage of samples")

    async def close(self) -> None:
        """Write what is left."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self._write()

    async def _write_soon(self) -> None:
        try:
            while self._sums:
                await asyncio.sleep(WRITE_EVERY_S)
                await self._write()
                await self._after()
        finally:
            self._writing = None

    async def _write(self) -> None:
        for tenant_id, job in list(self._sums):
            usage = self._sums.pop((tenant_id, job))
            try:
                await self._store.call(Store.add_usage, tenant_id, job, usage)
            except StoreUnavailable as error:
                logger.warning("usage of %s is written later: %s", tenant_id, error)
                self._sums[tenant_id, job] = self._sums.get((tenant_id, job), Usage()) + usage
            except MarlaasError as error:
                logger.warning("usage of %s cannot be written: %s", tenant_id, error)
