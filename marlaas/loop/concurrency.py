"""Waiting for several things at once, without leaving any behind; and long computations."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

T = TypeVar("T")


async def all_or_none(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Return every task's result; when one fails, end the others first, then raise its error.

    Unlike `asyncio.gather` nothing runs on behind a failure, and unlike a task group the error
    comes as it is, so that a caller can treat `WorkerLost` as one thing.
    """
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def to_its_end(coroutine: Coroutine[object, object, T]) -> T:
    """Await what must not be given up halfway: a cancelled caller still waits for it to end."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # whoever was to hear of it has left
        raise


LARGE = 1 << 16
"""Numbers that are looked at beside everybody else's work."""


async def beside_the_loop(num_numbers: int, function: Callable[[], T]) -> T:
    """Return what a function of arrays gives. It computes in a thread if they are large, so that
    nobody else waits for it."""
    return await asyncio.to_thread(function) if num_numbers > LARGE else function()


class Bell:
    """Those who wait for one thing to happen: `wait`* -> `ring`, any number of times.

    Whoever waits looks again afterwards: a bell says that something happened, not what.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        """Return whether anybody waits."""
        return bool(self._waiters)

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            _wake(waiter)

    async def wait(self, timeout_s: float) -> None:
        """Return when the bell rings, or after so long."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
