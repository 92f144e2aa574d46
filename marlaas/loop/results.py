"""What came of requests, kept in memory until nobody needs it any more, and who is told.

    opened, room reserved ─► finished ─► read* ─► dropped ─► forgotten
                                └──► told to whoever follows the feed that it belongs to

- Room is bounded by tenant: what open requests may bring at most and what is kept, together. What
  was read goes for newcomers, oldest first; what was not is kept for its time, and new requests are
  refused meanwhile. So nothing is computed twice because nobody had time to fetch it.
- A request that was dropped is still known for a minute: the same one that comes late is not
  executed again.
- Events of a feed have numbers that only grow, also from one process to the next: its start is in
  them. Who shows one of an earlier process is known by that.
- Nobody polls: a result and a feed have bells.
"""

import asyncio
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from marlaas import runtime
from marlaas.errors import Expired, InvalidRequest, QuotaExceeded
from marlaas.loop.concurrency import Bell
from marlaas.types import TenantId

T = TypeVar("T")

HELD_BYTES = 1000
"""What a request takes beside its result."""

TOMB_S = 60.0
"""How long a dropped request is still known."""

SWEEP_S = 30.0
"""How often memory is looked through while nothing happens."""

NUMBER_BITS = 32
"""Of an event's number within its process; above are the seconds when that began."""

EPOCH_0_S = 1_577_836_800
"""2020: counted from here, a process's beginning and the numbers below fit 62 bits until 2054."""

FEED_KEPT_S = 24 * 3600.0
"""How long a feed that has nothing to say remembers how far it was told."""

MAX_FEEDS = 1024
"""Feeds of one tenant with nothing to say that are remembered, the last used ones: the number of a
feed is a client's to choose."""

FeedKey = tuple[TenantId, str, int]
"""Tenant, sampler, clone."""


@dataclass(slots=True, eq=False)
class Feed:
    """What came to its end for one follower."""

    newest: int
    """Number of its newest event."""
    used_s: float
    events: "dict[int, Held]" = field(default_factory=dict)
    """By number, oldest first; without those that were dropped."""
    num_open: int = 0
    bell: Bell = field(default_factory=Bell)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is lost with it, but how far it was told."""
        return not (self.events or self.num_open or self.bell)


@dataclass(slots=True, eq=False)
class Held(Generic[T]):
    """One request: open -> finished -> dropped."""

    tenant_id: TenantId
    request_id: str
    feed_key: FeedKey
    digest: bytes
    """Of what was asked for."""
    num_bytes: int
    """Room that it takes: at most, while it is open."""
    outcome: T | None = None
    is_failed: bool = False
    finished_s: float = 0.0
    number: int = 0
    """Of its event."""
    is_open: bool = True
    bell: Bell | None = None
    """Where somebody waits."""

    @property
    def is_dropped(self) -> bool:
        return not self.is_open and self.outcome is None


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant's requests take."""

    num_bytes: int = 0
    read: "OrderedDict[Held, None]" = field(default_factory=OrderedDict)
    """Finished, and told to the client: the first read first."""


class Results(Generic[T]):
    """Requests of all tenants: `open -> finish -> read* -> drop`.

    results = Results(kept_s=3600.0, max_bytes=1 << 27, retry_after_s=1.0)
    held = results.open("acme", ("acme", sampler_id, 0), request_id, digest, num_bytes=9000)
    results.finish(held, outcome, num_bytes=700)
    outcome = await results.outcome(held, timeout_s=25.0)
    results.drop(held)
    """

    def __init__(self, *, kept_s: float, max_bytes: int, retry_after_s: float) -> None:
        self._kept_s = kept_s
        self._max_bytes = max_bytes
        self._retry_after_s = retry_after_s
        self._held: dict[tuple[TenantId, str], Held[T]] = {}
        self._accounts: dict[TenantId, Account] = {}
        self._feeds: dict[TenantId, OrderedDict[FeedKey, Feed]] = {}
        """Of each tenant, the longest unused first."""
        self._finished: OrderedDict[Held[T], None] = OrderedDict()
        """Oldest first."""
        self._tombs: OrderedDict[Held[T], float] = OrderedDict()
        """When each was dropped, oldest first."""
        self._sweeping: asyncio.TimerHandle | None = None
        self.began_s = runtime.wall_time_s()
        self._epoch = max(0, int(self.began_s) - EPOCH_0_S)

    def __len__(self) -> int:
        """Return how many requests are known."""
        return len(self._held)

    def num_bytes(self, tenant_id: TenantId) -> int:
        """Return the room that a tenant's requests take."""
        account = self._accounts.get(tenant_id)
        return account.num_bytes if account else 0

    # The life of a request ------------------------------------------------------------------

    def find(self, tenant_id: TenantId, request_id: str) -> Held[T] | None:
        return self._held.get((tenant_id, request_id))

    def open(
        self, feed_key: FeedKey, place: int, request_id: str, digest: bytes, *, num_bytes: int
    ) -> Held[T]:
        """Take in a request whose result takes at most so much; `place` is how many of its feed the
        client says to have come before.

        Raises:
            InvalidRequest: it could never be kept.
            QuotaExceeded: results that nobody fetched, or open requests, take too much.
        """
        self._sweep()
        tenant_id = feed_key[0]
        num_bytes += HELD_BYTES
        if num_bytes > self._max_bytes:
            raise InvalidRequest(
                f"the result may take {num_bytes} bytes; expected at most {self._max_bytes}: ask "
                "for fewer samples or tokens at once"
            )
        account = self._accounts.setdefault(tenant_id, Account())
        while account.num_bytes + num_bytes > self._max_bytes and account.read:
            self.drop(next(iter(account.read)))
        if account.num_bytes + num_bytes > self._max_bytes:
            raise QuotaExceeded(
                f"results that wait to be fetched and requests under way may take "
                f"{account.num_bytes} bytes; expected at most {self._max_bytes} with this one's "
                f"{num_bytes}",
                self._retry_after_s,
            )
        account.num_bytes += num_bytes
        held: Held[T] = Held(tenant_id, request_id, feed_key, digest, num_bytes)
        self._held[tenant_id, request_id] = held
        self._feed(feed_key, place).num_open += 1
        return held

    def finish(self, held: Held[T], outcome: T, *, num_bytes: int, is_failed: bool) -> None:
        """Keep what came of a request, and tell who waits for it."""
        assert held.is_open
        feed = self._close(held)
        held.outcome, held.is_failed, held.finished_s = outcome, is_failed, runtime.now_s()
        self._resize(held, num_bytes + HELD_BYTES)
        self._finished[held] = None
        feed.newest += 1
        held.number = feed.newest
        feed.events[held.number] = held
        feed.bell.ring()
        self._sweep()

    async def outcome(self, held: Held[T], timeout_s: float) -> T | None:
        """Return what came of a request; None if that takes longer.

        Raises:
            Expired: it was dropped.
        """
        if held.is_open:
            held.bell = held.bell or Bell()
            await held.bell.wait(timeout_s)
        if held.is_dropped:
            raise Expired(f"the result of {held.request_id} is not kept any more: ask anew")
        if held.outcome is not None and held in self._finished:
            account = self._accounts[held.tenant_id]
            account.read.setdefault(held)
        return held.outcome

    def drop(self, held: Held[T]) -> None:
        """Let go of a result: its client has it, or wants none."""
        if held.is_dropped:
            return
        if held.is_open:
            self._close(held)
        held.outcome = None
        self._finished.pop(held, None)
        self._accounts[held.tenant_id].read.pop(held, None)
        self._resize(held, HELD_BYTES)
        self._tombs[held] = runtime.now_s()
        feed = self._feeds.get(held.tenant_id, {}).get(held.feed_key)
        if feed is not None:
            feed.events.pop(held.number, None)

    def forget(self, held: Held[T]) -> None:
        """Know nothing of a request any more."""
        self.drop(held)
        self._tombs.pop(held, None)
        del self._held[held.tenant_id, held.request_id]
        self._resize(held, 0)

    # Feeds ----------------------------------------------------------------------------------

    async def events(
        self, feed_key: FeedKey, cursor: int, timeout_s: float
    ) -> tuple[list[Held[T]], int]:
        """Return what came to its end behind a cursor, in order, and the new cursor; wait for it if
        there is nothing."""
        feed = self._feed(feed_key, self.num_told(cursor))
        if cursor > feed.newest or self.is_earlier(cursor):
            cursor = 0
        behind = _behind(feed, cursor)
        if not behind and timeout_s > 0:
            await feed.bell.wait(timeout_s)
            behind = _behind(feed, cursor)
        return behind, feed.newest

    def is_earlier(self, cursor: int) -> bool:
        """Return whether a cursor is of an earlier process, or nobody's yet."""
        return cursor >> NUMBER_BITS != self._epoch

    def num_told(self, cursor: int) -> int:
        """Return how many events of a feed there were, roughly, when its client got a cursor."""
        return cursor & ((1 << NUMBER_BITS) - 1)

    def _feed(self, feed_key: FeedKey, place: int) -> Feed:
        """Return a feed. One that was forgotten goes on behind what it may have told before."""
        feeds = self._feeds.setdefault(feed_key[0], OrderedDict())
        feed = feeds.get(feed_key)
        if feed is None:
            if len(feeds) >= MAX_FEEDS:
                self._forget_quiet(feeds)
            newest = (self._epoch << NUMBER_BITS) + place
            feed = feeds[feed_key] = Feed(newest, runtime.now_s())
        feed.used_s = runtime.now_s()
        feeds.move_to_end(feed_key)
        return feed

    def _forget_quiet(self, feeds: "OrderedDict[FeedKey, Feed]") -> None:
        """Make room for a feed. Those that have something to say are as many as requests."""
        for key, feed in feeds.items():
            if feed.is_quiet:
                del feeds[key]
                break

    # Memory ---------------------------------------------------------------------------------

    def _close(self, held: Held[T]) -> Feed:
        held.is_open = False
        if held.bell is not None:
            held.bell.ring()
            held.bell = None
        feed = self._feeds[held.tenant_id][held.feed_key]
        feed.num_open -= 1
        return feed

    def _resize(self, held: Held[T], num_bytes: int) -> None:
        account = self._accounts[held.tenant_id]
        account.num_bytes += num_bytes - held.num_bytes
        held.num_bytes = num_bytes
        if not account.num_bytes:
            del self._accounts[held.tenant_id]

    def _sweep(self) -> None:
        """Forget what is too old; look again later while there is something that will be."""
        now_s = runtime.now_s()
        while self._finished:
            held = next(iter(self._finished))
            if held.finished_s + self._kept_s > now_s:
                break
            self.forget(held)
        while self._tombs:
            held, dropped_s = next(iter(self._tombs.items()))
            if dropped_s + TOMB_S > now_s:
                break
            self.forget(held)
        if self._sweeping is None and (self._finished or self._tombs or self._feeds):
            loop = asyncio.get_running_loop()
            self._sweeping = loop.call_later(SWEEP_S, self._sweep_again)

    def _sweep_again(self) -> None:
        self._sweeping = None
        idle_s = runtime.now_s() - FEED_KEPT_S
        for tenant_id, feeds in list(self._feeds.items()):
            for key, feed in list(feeds.items()):
                if feed.used_s < idle_s and feed.is_quiet:
                    del feeds[key]
            if not feeds:
                del self._feeds[tenant_id]
        self._sweep()

    def close(self) -> None:
        """Let go of all."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        for held in list(self._held.values()):
            self.forget(held)


def _behind(feed: Feed, cursor: int) -> list[Held]:
    """Return the requests whose events have numbers over a cursor, in order."""
    newer = itertools.takewhile(lambda number: number > cursor, reversed(feed.events))
    return [feed.events[number] for number in newer][::-1]
