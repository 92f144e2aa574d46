"""Events as they happen, to any number of listeners (server-sent events).

    store commits ─► Store.on_event (its thread) ─► Hub.wake ─► Channel of that tenant
                                                                  │ reads what is new, once
                                                                  ▼
                                       ring of the newest events, already encoded
                                         ▲ cursor   ▲ cursor   ▲ cursor        (streams)

- Nobody polls: a stream waits for its channel, and the channel for the store's wake-up.
- An event is read and encoded once, however many listen. A stream is a cursor into the ring: one
  that is slow, or resumes far back, reads pages from the store until it has caught up, and holds
  one page at most. So thousands of idle streams cost a task and a timer each.
- A stream resumes behind `Last-Event-ID`: sequence numbers have no gaps, so nothing is missed and
  nothing comes twice.
- A key that is revoked, and a tenant that goes, end their streams at once.
"""

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import islice

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from marlaas.errors import QuotaExceeded, Unauthorized
from marlaas.service.wire.jobs import EventInfo
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import Event, Tenant, TenantId

_LOG = logging.getLogger(__name__)

RING_EVENTS = 512
"""Newest events of a tenant kept encoded: what a stream that was away for seconds needs."""

PAGE_EVENTS = 200

TENANT_SHARE = 4
"""One tenant may have a part of all streams: one in so many."""

FULL_RETRY_S = 10.0
"""When there may be room for another stream."""

RETRY_MS = 2000
"""How long a client waits before it comes back; the first line of a stream says so."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One event, ready to be sent."""

    seq: int
    job: str
    data: bytes

    @classmethod
    def of(cls, event: Event) -> "Frame":
        body = json.dumps(EventInfo.of(event).model_dump(), separators=(",", ":"))
        text = f"id: {event.seq}\nevent: {event.kind.value}\ndata: {body}\n\n"
        return cls(event.seq, event.job, text.encode())


@dataclass(eq=False, slots=True)
class Stream:
    """One listener: opened -> read until it ends -> left."""

    tenant_id: TenantId
    key_id: str
    job: str | None
    """None listens to all jobs."""
    cursor: int = 0
    """Sequence number of the newest event that it was sent, or that is not for it."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_ended: bool = False

    def end(self) -> None:
        self.is_ended = True
        self.news.set()

    async def has_news(self, timeout_s: float) -> bool:
        """Wait for news; return False if there are none for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        except TimeoutError:
            return False
        return True


class Channel:
    """The events of one tenant, read once for all its streams: idle -> pumping -> idle."""

    def __init__(self, tenant_id: TenantId, store: AsyncStore, newest: int) -> None:
        self._tenant_id = tenant_id
        self._store = store
        self._ring: deque[Frame] = deque(maxlen=RING_EVENTS)
        self._newest = newest
        self._is_behind = False
        self._pumping: asyncio.Task[None] | None = None
        self.streams: set[Stream] = set()

    def wake(self) -> None:
        """The store has something new."""
        self._is_behind = True
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.create_task(self._pump(), name=f"events of {self._tenant_id}")
            self._pumping.add_done_callback(self._check)

    async def after(self, cursor: int) -> list[Frame]:
        """Return what comes behind a cursor, one page at most; empty if nothing is new."""
        if cursor >= self._newest:
            return []
        if self._ring and self._ring[0].seq <= cursor + 1:
            skip = cursor + 1 - self._ring[0].seq
            return list(islice(self._ring, skip, skip + PAGE_EVENTS))
        return await self._read(cursor)

    async def _pump(self) -> None:
        """Read what is new until nothing is, and let the streams look."""
        while self._is_behind:
            self._is_behind = False
            while frames := await self._read(self._newest):
                self._ring.extend(frames)
                self._newest = frames[-1].seq
                for stream in self.streams:
                    stream.news.set()

    def _check(self, pumping: asyncio.Task[None]) -> None:
        """Without the store there are no events: end the streams, whose clients come back behind
        what they have."""
        if not pumping.cancelled() and (error := pumping.exception()) is not None:
            _LOG.error("events cannot be read", extra={"error": type(error).__name__})
            self.close()

    async def _read(self, cursor: int) -> list[Frame]:
        events = await self._store.call(
            Store.events, self._tenant_id, after=cursor, limit=PAGE_EVENTS
        )
        return [Frame.of(event) for event in events]

    def close(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
        for stream in self.streams:
            stream.end()


class Hub:
    """All streams of the service: constructed -> `start` in the event loop -> `close`."""

    def __init__(
        self, store: AsyncStore, *, heartbeat_s: float = 15.0, max_streams: int = 10_000
    ) -> None:
        self._store = store
        self._heartbeat_s = heartbeat_s
        self._max_streams = max_streams
        self._channels: dict[TenantId, Channel] = {}
        self._is_closed = False
        self._revoked: set[str] = set()
        """Keys whose streams were ended."""
        self.num_streams = 0

    def start(self) -> None:
        """Begin to hear of the store's commits; call it where the event loop runs."""
        loop = asyncio.get_running_loop()

        def on_event(tenant_id: TenantId) -> None:
            # From the store's thread, which may outlive the loop by a commit.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self.wake, tenant_id)

        self._store.store.on_event = on_event

    def wake(self, tenant_id: TenantId) -> None:
        """A commit wrote events of this tenant."""
        channel = self._channels.get(tenant_id)
        if channel is not None:
            channel.wake()

    async def open(
        self, tenant: Tenant, *, key_id: str, job: str | None, after: int | None
    ) -> Stream:
        """Return a new stream; without `after` it begins with what comes next.

        Raises:
            NotFound: the tenant was purged while its stream opened.
            QuotaExceeded: too many are open, of the tenant or of all, or the service ends.
            Unauthorized: the key was revoked while its stream opened.
        """
        tenant_id = tenant.tenant_id
        self._check_room(tenant_id)
        stream = Stream(tenant_id, key_id, job)
        newest = await self._store.call(_newest, tenant)
        if key_id in self._revoked:
            raise Unauthorized("this key was revoked")
        self._check_room(tenant_id)  # others may have opened meanwhile
        stream.cursor = newest if after is None else min(after, newest)
        channel = self._channels.get(tenant_id)
        if channel is None:
            channel = self._channels[tenant_id] = Channel(tenant_id, self._store, newest)
        channel.streams.add(stream)
        self.num_streams += 1
        # What was committed before the channel stood woke nobody.
        channel.wake()
        return stream

    def _check_room(self, tenant_id: TenantId) -> None:
        if self._is_closed or self.num_streams >= self._max_streams:
            raise QuotaExceeded(
                f"{self.num_streams} event streams are open, as many as there may be", FULL_RETRY_S
            )
        channel = self._channels.get(tenant_id)
        most = max(1, self._max_streams // TENANT_SHARE)
        if channel is not None and len(channel.streams) >= most:
            raise QuotaExceeded(
                f"{most} event streams of this tenant are open, as many as it may have",
                FULL_RETRY_S,
            )

    async def frames(self, stream: Stream) -> AsyncIterator[bytes]:
        """Yield what to send on a stream until it ends."""
        channel = self._channels[stream.tenant_id]
        yield f"retry: {RETRY_MS}\n\n".encode()
        while not (stream.is_ended or self._is_closed):
            stream.news.clear()
            frames = await channel.after(stream.cursor)
            if frames:
                stream.cursor = frames[-1].seq
                mine = b"".join(f.data for f in frames if stream.job in (None, f.job))
                if mine:
                    yield mine
            elif not await stream.has_news(self._heartbeat_s):
                yield b": beat\n\n"

    def leave(self, stream: Stream) -> None:
        """The listener is gone. The last one of a tenant takes the channel along."""
        self.num_streams -= 1
        channel = self._channels[stream.tenant_id]
        channel.streams.discard(stream)
        if not channel.streams:
            channel.close()
            del self._channels[stream.tenant_id]

    def end(self, *, tenant_id: TenantId | None = None, key_id: str | None = None) -> None:
        """End the streams of a tenant, or those that a key opened."""
        if key_id is not None:
            self._revoked.add(key_id)
        for channel in self._channels.values():
            for stream in channel.streams:
                if stream.tenant_id == tenant_id or stream.key_id == key_id:
                    stream.end()

    def close(self) -> None:
        """End every stream; no new one opens."""
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()


def _newest(store: Store, tenant: Tenant) -> int:
    store.check_tenant(tenant.tenant_id, created_s=tenant.created_s)
    return store.last_event(tenant.tenant_id)


class EventResponse(Response):
    """Sends a stream's frames until it ends or its listener goes away."""

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, stream: Stream) -> None:
        # A proxy that collects before it passes on would hold events back.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._hub = hub
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        listening = asyncio.create_task(self._until_gone(receive), name="listener")
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for frame in self._hub.frames(self._stream):
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            listening.cancel()
            self._hub.leave(self._stream)

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.end()
