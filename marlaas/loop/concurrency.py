"""Waiting for several things at once, without leaving any behind."""

import asyncio
from collections.abc import Coroutine, Sequence
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
