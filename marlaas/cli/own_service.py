"""A service for one command: it starts in this process, is used over HTTP, and drains at the end.

    start ──► hand over the jobs ──► show their events until none is queued or running ──► drain
                                        cancelled ───────────────────────────────────────────▲

What runs is what `marlaas serve` runs, on a loopback port. Its key is made before and revoked
afterwards, so that a run folder can be resumed, and served, any number of times.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path

from marlaas import runtime
from marlaas.cli import display
from marlaas.cli.feed import Feed
from marlaas.cli.submit import Submission, hand_over
from marlaas.client import Client
from marlaas.config import ServeSettings
from marlaas.errors import Conflict
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.controller import Mode
from marlaas.store.db import Store
from marlaas.types import OPERATOR, Quotas, Role, WorkerStats

DRAIN_S = 3600.0
"""A run that is stopped ends its steps, however long they take; a second signal ends it at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Where the time of a run went."""

    makespan_s: float
    """From the first job's hand-over to the last one's end; start-up excluded."""
    workers: list[WorkerStats]


async def run_jobs(
    submission: Submission, settings: ServeSettings, mode: Mode, shown: display.Lines
) -> RunFigures:
    """Run jobs to their end on a service of their own; one whose folder has them goes on.

    Cancelling stops cleanly: steps that run are finished and kept.

    Raises:
        InvalidRequest: base, placement or jobs cannot run here.
    """
    async with _started(settings, mode) as (client, serving):
        began_s = runtime.now_s()
        tenants = {str(spec.tenant): client.acting_for(spec.tenant) for spec in submission.specs}
        await asyncio.to_thread(_hand_over, submission, client, tenants)
        feed = Feed(shown)
        try:
            for tenant, acting in tenants.items():
                feed.follow(tenant, acting, with_ended=True)
            feed.watch_workers(client)
            while not feed.is_over and not serving.done():
                feed.drain(0)
                await asyncio.sleep(display.REFRESH_S)
        finally:
            feed.close()
        if serving.done():
            await serving
            raise AssertionError("a service that nobody ended does not end without an error")
        machine = await asyncio.to_thread(client.machine)
        return RunFigures(makespan_s=runtime.now_s() - began_s, workers=machine.workers)


def _hand_over(submission: Submission, client: Client, tenants: dict[str, Client]) -> None:
    """Make the tenants of the jobs, without limits, and hand over what is not there yet."""
    no_limits = {field.name: None for field in fields(Quotas)}
    for tenant in tenants:
        with suppress(Conflict):
            client.tenants.create(tenant, weight=1.0, **no_limits)
    _take_all(hand_over(submission, tenants, client))


def _take_all(rows: Iterable[object]) -> None:
    for _ in rows:
        pass


@asynccontextmanager
async def _started(
    settings: ServeSettings, mode: Mode
) -> AsyncIterator[tuple[Client, "asyncio.Task[None]"]]:
    """Serve as long as the block runs; yield an operator's client and the task that serves."""
    from marlaas import launch  # faulty jobs are refused before the engines' side is loaded

    folder = Path(settings.folder)
    key_id, secret = _make_key(folder)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    is_over = asyncio.Event()
    serving = asyncio.create_task(
        launch.serve(
            settings,
            mode=mode,
            say=lambda _: None,
            opened=lambda url, _: listening.set_result(url),
            until=is_over.wait,
            stats_every_s=launch.STATS_EVERY_S,
        )
    )
    try:
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        with Client(listening.result(), secret) as client:
            yield client, serving
    finally:
        is_over.set()
        if not listening.done():
            serving.cancel()
        try:
            # A signal may come while it drains already; the engines' processes are waited for.
            await to_its_end(_end_of(serving))
        finally:
            _revoke_key(folder, key_id)


async def _end_of(serving: "asyncio.Task[None]") -> None:
    """Wait until nothing of a service runs any more.

    Raises:
        Exception: what it ended with, the cause of whatever else was seen of it.
    """
    (end,) = await asyncio.gather(serving, return_exceptions=True)
    if isinstance(end, Exception):
        raise end


def _make_key(folder: Path) -> tuple[str, str]:
    """Return the id of a new operator's key, and the key."""
    store = Store.open(folder)
    try:
        key, secret = store.add_key(OPERATOR, role=Role.OPERATOR, label="marlaas run")
    finally:
        store.close()
    return key.key_id, secret


def _revoke_key(folder: Path, key_id: str) -> None:
    store = Store.open(folder)
    try:
        store.revoke_key(OPERATOR, key_id)
    finally:
        store.close()
