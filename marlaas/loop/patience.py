"""The store as the loop uses it: a call that the store cannot take now is made again until it can.

A full disk or a lost database holds the jobs up, seen by the watchdog, and ends none of them. Verbs
that somebody waits for use the store itself and hand its error on, and so does everybody once the
server is told to stop.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from marlaas.errors import StoreUnavailable
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 15.0
"""Waits between attempts double up to this."""


class PatientStore(AsyncStore):
    """An `AsyncStore` that waits for a store that is not available; nothing is half-written then.

    store = PatientStore(async_store)
    await store.call(Store.finish_group, "acme", "sums", group)
    """

    def __init__(self, store: AsyncStore) -> None:
        self.store = store.store
        self.inner = store
        """For calls whose error somebody waits for."""
        self._is_over = asyncio.Event()

    def give_up(self) -> None:
        """Wait no more: from now on a store that is not available is an error."""
        self._is_over.set()

    async def close(self) -> None:
        """Close the store that is behind."""
        await self.inner.close()

    async def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what the function returns, once the store takes the call."""
        return await self.call_while(lambda: None, function, *args, **kwargs)

    async def call_while(
        self,
        check: Callable[[], None],
        function: Callable[Concatenate[Store, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Do the same, but let `check` raise, right before every attempt, if it must not be made
        any more."""
        wait_s = FIRST_WAIT_S
        while True:
            check()
            try:
                return await self.inner.call(function, *args, **kwargs)
            except StoreUnavailable as error:
                if self._is_over.is_set():
                    raise
                logger.warning("trying again in %.1f s: %s", wait_s, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)
