"""The store for an event loop: its calls run one after another on a thread of their own.

    await store.call(Store.commit_step, tenant_id, job, record, dropped={})

- A database that is locked, or a disk that hangs, holds up who waits for it and nobody else.
- Calls keep the order in which they were made, so one that is awaited later sees earlier ones.
- A cancelled caller still waits for its call: what was written is never in doubt.
- Files that nobody needs any more are deleted on a second thread: a step does not wait for it.
- Without a thread (simulation under virtual time) a call is made where it stands.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, ParamSpec, TypeVar

from marlaas.store.db import Store
from marlaas.store.files import Files

P = ParamSpec("P")
T = TypeVar("T")


class AsyncStore:
    """One store and the thread that uses it: constructed -> call* -> closed."""

    def __init__(self, store: Store, *, is_threaded: bool = True) -> None:
        self.store = store
        """For whoever has no event loop; never use it while calls may be under way."""
        self._thread = ThreadPoolExecutor(1, "store") if is_threaded else None
        self._deleting = ThreadPoolExecutor(1, "store-files") if is_threaded else None
        store.files.delete_on(self._deleting)

    @property
    def files(self) -> Files:
        """Where the files of jobs lie; asking for a path needs no call."""
        return self.store.files

    async def call(
        self, function: Callable[Concatenate[Store, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Return what `function(store, *args, **kwargs)` returns, or raise what it raises."""
        if self._thread is None:
            return function(self.store, *args, **kwargs)
        calling = asyncio.wrap_future(self._thread.submit(function, self.store, *args, **kwargs))
        try:
            return await asyncio.shield(calling)
        except asyncio.CancelledError:
            await asyncio.wait([calling])
            raise

    async def close(self) -> None:
        """Wait for calls and deletions under way, then close the database."""
        if self._thread is None or self._deleting is None:
            self.store.close()
            return
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.store.close)
        await loop.run_in_executor(self._deleting, self.store.files.delete_on, None)
        self._thread.shutdown()
        self._deleting.shutdown()
