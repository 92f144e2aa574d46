"""Waiting for several things at once, without leaving any behind."""

import asyncio
from collections.abc import Sequence
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
