"""What tenants' own code prints, as LOG events of its job: bounded, whatever it prints.

    log(text) ─► a few lines wait ─► one event with all of them ─► a pause ─► ...

A job that prints a line writes it at once; one that prints a thousand a second writes an event a
second with the newest lines, and says how many it left out.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from marlaas.errors import MarlaasError
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import EventKind, JobSpec

MAX_LINES = 50
"""Lines that wait to be written."""

MAX_CHARS = 5000
"""Of one line."""

MAX_EVENT_CHARS = 20_000
"""Of all lines of one event: pages and streams hold many events at once."""

PAUSE_S = 1.0
"""Between two events of one job."""


def newest(lines: Sequence[str]) -> list[str]:
    """Return the newest lines that fit one event, in their order."""
    ends = accumulate(len(line) for line in reversed(lines))
    num_kept = sum(end <= MAX_EVENT_CHARS for end in ends)
    return list(lines)[len(lines) - num_kept :]


class JobLogs:
    """Writes down what jobs print: `of` a job -> call* ; closed with the service."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._writing: set[asyncio.Task[None]] = set()

    def of(self, spec: JobSpec) -> Callable[[str], None]:
        """Return what a job's environment calls with each text; it never waits and never raises."""
        waiting: deque[str] = deque(maxlen=MAX_LINES)
        num_lost = 0
        writing: asyncio.Task[None] | None = None

        async def write() -> None:
            nonlocal num_lost
            while waiting:
                lines, lost = newest(waiting), num_lost + len(waiting)
                lost -= len(lines)
                waiting.clear()
                num_lost = 0
                left_out = [f"({lost} earlier lines were left out)"] if lost else []
                data = {"text": "\n".join([*left_out, *lines])}
                try:
                    await self._store.call(
                        Store.add_event, spec.tenant, spec.name, EventKind.LOG, data
                    )
                except MarlaasError:
                    # A store that takes nothing stops the job elsewhere; its prints may go.
                    return
                await asyncio.sleep(PAUSE_S)

        def log(text: str) -> None:
            nonlocal num_lost, writing
            if len(waiting) == MAX_LINES:
                num_lost += 1
            waiting.append(text[:MAX_CHARS])
            if writing is None or writing.done():
                writing = asyncio.ensure_future(write())
                self._writing.add(writing)
                writing.add_done_callback(self._writing.discard)

        return log

    async def close(self) -> None:
        """Stop writing."""
        for task in self._writing:
            task.cancel()
        await asyncio.gather(*self._writing, return_exceptions=True)
