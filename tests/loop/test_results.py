"""Results in memory: how long, how many, who is told, what a later process makes of old cursors."""

import asyncio
from collections.abc import Coroutine

import pytest

from marlaas import runtime
from marlaas.errors import Expired, InvalidRequest, QuotaExceeded
from marlaas.loop.results import (
    FEED_KEPT_S,
    HELD_BYTES,
    MAX_FEEDS,
    TOMB_S,
    FeedKey,
    Held,
    Results,
)

FEED: FeedKey = ("acme", "s-1:sample:0", 0)
NOW_S = 1.8e9


def run(scenario: Coroutine[object, object, None], epoch_s: float = NOW_S) -> None:
    runtime.run_virtual(scenario, epoch_s=epoch_s)


def results(*, kept_s: float = 1000.0, max_bytes: int = 10**6) -> Results[str]:
    return Results(kept_s=kept_s, max_bytes=max_bytes, retry_after_s=1.0)


def opened(at: Results[str], seq: int, num_bytes: int = 100, feed: FeedKey = FEED) -> Held[str]:
    return at.open(feed, seq, f"request {seq}", b"", num_bytes=num_bytes)


def finished(at: Results[str], seq: int, num_bytes: int = 100, feed: FeedKey = FEED) -> Held[str]:
    held = opened(at, seq, num_bytes, feed)
    at.finish(held, f"outcome {seq}", num_bytes=num_bytes, is_failed=False)
    return held


def test_whoever_waits_is_woken_at_once_and_may_read_again() -> None:
    async def scenario() -> None:
        at = results()
        held = opened(at, 0)
        readers = [asyncio.create_task(at.outcome(held, 50.0)) for _ in range(3)]
        assert await at.outcome(held, 10.0) is None
        began_s = runtime.now_s()
        at.finish(held, "done", num_bytes=10, is_failed=False)
        assert await asyncio.gather(*readers) == ["done"] * 3
        assert await at.outcome(held, 50.0) == "done"
        assert runtime.now_s() == began_s

    run(scenario())


def test_what_was_read_makes_room_oldest_first_and_what_was_not_stays() -> None:
    async def scenario() -> None:
        at = results(max_bytes=5 * (HELD_BYTES + 100_000))
        held = [finished(at, seq, 100_000) for seq in range(5)]
        for one in (held[3], held[1]):
            assert await at.outcome(one, 0.0) == f"outcome {held.index(one)}"
        opened(at, 5, 50_000)
        assert [one.is_dropped for one in held] == [False, False, False, True, False]
        opened(at, 6, 140_000)
        assert [one.is_dropped for one in held] == [False, True, False, True, False]
        with pytest.raises(QuotaExceeded, match="wait to be fetched") as refusal:
            opened(at, 7, 100_000)
        assert refusal.value.retry_after_s == 1.0
        opened(at, 7, 100_000, ("birch", "s-2:sample:0", 0))
        with pytest.raises(InvalidRequest, match="fewer samples"):
            opened(at, 8, 10**6)
        assert [await at.outcome(held[seq], 0.0) for seq in (0, 2, 4)] == [
            "outcome 0",
            "outcome 2",
            "outcome 4",
        ]

    run(scenario())


def test_nothing_is_left_of_what_is_over() -> None:
    async def scenario() -> None:
        at = results(kept_s=300.0)
        held, acknowledged, given_up = finished(at, 0), finished(at, 1), opened(at, 2)
        at.drop(acknowledged)
        waiting = asyncio.create_task(at.outcome(given_up, 1e3))
        await asyncio.sleep(0)
        at.drop(given_up)
        with pytest.raises(Expired):
            await waiting
        assert at.find("acme", "request 1") is acknowledged, "it may come another time"
        await asyncio.sleep(TOMB_S + 60.0)
        assert at.find("acme", "request 1") is None
        assert await at.outcome(held, 0.0) == "outcome 0"
        await asyncio.sleep(300.0)
        with pytest.raises(Expired):
            await at.outcome(held, 0.0)
        assert len(at) == 0
        assert at.num_bytes("acme") == 0
        assert at._accounts == {} and not at._finished and not at._tombs
        await asyncio.sleep(FEED_KEPT_S + 60.0)
        assert at._feeds == {}

    run(scenario())


def test_room_is_what_is_open_at_most_and_then_what_came() -> None:
    async def scenario() -> None:
        at = results()
        held = opened(at, 0, 50_000)
        assert at.num_bytes("acme") == HELD_BYTES + 50_000
        at.finish(held, "x", num_bytes=70, is_failed=True)
        assert at.num_bytes("acme") == HELD_BYTES + 70
        at.forget(held)
        assert at.num_bytes("acme") == 0

    run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_a_follower_hears_of_every_request_once_however_they_interleave(seed: int) -> None:
    rng = runtime.rng("followers", seed)

    async def scenario() -> None:
        at = results()
        heard: list[str] = []

        async def follow() -> None:
            cursor = 0
            while len(heard) < 200:
                events, newest = await at.events(FEED, cursor, 1e3)
                assert newest >= cursor
                if rng.random() < 0.2:
                    continue  # the answer was lost on its way
                cursor = newest
                heard.extend(one.request_id for one in events)
                for one in events:
                    if rng.random() < 0.5:
                        at.drop(one)
                await asyncio.sleep(float(rng.exponential(0.02)) if rng.random() < 0.5 else 0.0)

        async def sample(seq: int) -> None:
            await asyncio.sleep(float(rng.uniform(0, 0.5)))
            held = opened(at, seq)
            await asyncio.sleep(float(rng.exponential(0.1)))
            at.finish(held, "x", num_bytes=1, is_failed=False)

        following = asyncio.create_task(follow())
        await asyncio.gather(*(sample(seq) for seq in range(200)))
        async with asyncio.timeout(30.0):
            await following
        assert sorted(heard) == sorted(f"request {seq}" for seq in range(200))

    run(scenario())


def test_a_forgotten_feed_goes_on_behind_what_it_had_told() -> None:
    async def scenario() -> None:
        at = results(kept_s=100.0)
        for seq in range(10):
            finished(at, seq)
        events, cursor = await at.events(FEED, 0, 0.0)
        assert len(events) == 10
        await asyncio.sleep(FEED_KEPT_S + 200.0)
        assert at._feeds == {}
        new = finished(at, 10)
        assert (await at.events(FEED, cursor, 0.0))[0] == [new]

    run(scenario())


def test_feeds_of_numbers_that_a_client_makes_up_are_bounded_and_cost_no_other() -> None:
    async def scenario() -> None:
        at = results()
        at.finish(opened(at, 0), "outcome", num_bytes=100, is_failed=False)
        theirs: FeedKey = ("other", "s-2:sample:0", 0)
        await at.events(theirs, 0, 0.0)
        for clone in range(1, 2 * MAX_FEEDS):
            await at.events(("acme", "s-1:sample:0", clone), 0, 0.0)
        assert len(at._feeds["acme"]) == MAX_FEEDS and theirs in at._feeds["other"]
        assert [held.outcome for held in (await at.events(FEED, 0, 0.0))[0]] == ["outcome"]

    run(scenario())


def test_a_cursor_of_another_process_is_known_and_hides_nothing() -> None:
    cursors: list[int] = []

    async def first() -> None:
        at = results()
        for seq in range(500):
            finished(at, seq)
        cursors.append((await at.events(FEED, 0, 0.0))[1])
        assert not at.is_earlier(cursors[0]) and at.is_earlier(0)
        assert at.num_told(cursors[0]) == 500

    async def later() -> None:
        at = results()
        assert at.is_earlier(cursors[0])
        new = finished(at, 501)
        events, cursor = await at.events(FEED, cursors[0], 0.0)
        assert events == [new]
        assert cursor != cursors[0] and not at.is_earlier(cursor)
        assert await at.events(FEED, cursor, 0.0) == ([], cursor)
        assert cursor < 1 << 62

    run(first())
    run(later(), NOW_S + 60.0)
    run(later(), NOW_S - 60.0)  # the clock went back
