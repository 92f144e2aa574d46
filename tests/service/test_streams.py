"""Events as a page and as a stream: in order, without gaps, behind where one was, and only one's
own."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn

from marlaas import runtime
from marlaas.errors import NotFound, QuotaExceeded, Unauthorized
from marlaas.service.server import bind
from marlaas.service.streams import RING_EVENTS
from marlaas.store.db import Store
from marlaas.types import EventKind, TenantId
from tests.service.bench import SETTINGS, Bench, bench

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def served(service: Bench) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the app on a real socket: a stream in memory would be held back to its end."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(service.app, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve(sockets=[listener]))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    limits = httpx.Limits(max_connections=None)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10, limits=limits) as http:
            yield http
    finally:
        service.parts.hub.close()
        server.should_exit = True
        await serving


class Listener:
    """Reads one stream."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.num_beats = 0

    async def next(self) -> dict:
        """Return the next event; beats are counted."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(10):
            async for line in self._lines:
                if line.startswith(": beat"):
                    self.num_beats += 1
                elif not line and "data" in fields:
                    event = json.loads(fields["data"])
                    assert (fields["id"], fields["event"]) == (str(event["seq"]), event["kind"])
                    return event
                elif line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
        raise StopAsyncIteration

    async def take(self, count: int) -> list[dict]:
        return [await self.next() for _ in range(count)]


@asynccontextmanager
async def listening(
    http: httpx.AsyncClient, service: Bench, path: str = "/v1/events", *, who: str = "acme",
    **headers: str,
) -> AsyncIterator[Listener]:  # fmt: skip
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    asked = {**service.headers(who), "Accept": "text/event-stream", **headers}
    async with http.stream("GET", path, headers=asked) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Listener(response)


async def say(service: Bench, text: str, *, tenant: str = "acme", job: str = "a") -> None:
    await service.store.call(Store.add_event, TenantId(tenant), job, EventKind.LOG, {"text": text})


def said(events: list[dict]) -> list[str]:
    return [event["data"]["text"] for event in events]


async def until_streams(service: Bench, count: int) -> None:
    async with asyncio.timeout(10):
        while service.parts.hub.num_streams != count:
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------------------------------------


async def test_a_page_goes_on_behind_the_last_event(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        for number in range(5):
            await say(service, str(number))
        first = await service.get("/v1/events?limit=3")
        assert (said(first["events"]), first["next"]) == (["0", "1", "2"], 3)
        second = await service.get(f"/v1/events?after={first['next']}")
        assert (said(second["events"]), second["next"]) == (["3", "4"], 5)
        last = await service.get("/v1/events?after=5")
        assert (last["events"], last["next"]) == ([], 5)


async def test_events_of_a_job_arrive_as_they_happen_and_end_with_it(tmp_path: Path) -> None:
    async with bench(tmp_path) as service, served(service) as http:
        await service.submit()
        async with listening(http, service, "/v1/jobs/sums/events?after=0") as listener:
            events = [await listener.next()]
            while events[-1]["data"].get("state") != "done":
                events.append(await listener.next())
        kinds = [event["kind"] for event in events]
        assert kinds.count("step") == 3
        assert kinds.count("evaluation") == 2
        page = await service.get("/v1/jobs/sums/events")
        assert [event["seq"] for event in events] == [event["seq"] for event in page["events"]]


async def test_a_stream_resumes_behind_the_last_event_without_gap_or_repetition(
    tmp_path: Path,
) -> None:
    """Also when more happened meanwhile than is kept at hand."""
    async with bench(tmp_path) as service, served(service) as http:
        async with listening(http, service, Last_Event_ID="0") as listener:
            await say(service, "first")
            assert said(await listener.take(1)) == ["first"]
        missed = RING_EVENTS + 300
        async with listening(http, service):  # another one keeps the channel open
            for number in range(missed):
                await say(service, str(number))
            async with listening(http, service, Last_Event_ID="1") as listener:
                assert said(await listener.take(missed)) == [str(n) for n in range(missed)]
                await say(service, "new")
                assert said(await listener.take(1)) == ["new"]


async def test_a_stream_without_a_place_begins_with_what_comes(tmp_path: Path) -> None:
    async with bench(tmp_path) as service, served(service) as http:
        await say(service, "old")
        async with listening(http, service) as listener:
            await until_streams(service, 1)
            await say(service, "new")
            assert said(await listener.take(1)) == ["new"]


async def test_a_stream_hears_its_own_job_and_tenant_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as service, served(service) as http:
        await service.submit(name="a")
        await service.ended("a")
        async with listening(http, service, "/v1/jobs/a/events") as listener:
            await until_streams(service, 1)
            await say(service, "of birch", tenant="birch", job="a")
            await say(service, "of b", job="b")
            await say(service, "of a")
            assert said(await listener.take(1)) == ["of a"]


async def test_a_quiet_stream_beats(tmp_path: Path) -> None:
    settings = replace(SETTINGS, heartbeat_s=0.05)
    async with (
        bench(tmp_path, settings=settings) as service,
        served(service) as http,
        listening(http, service) as listener,
    ):
        await asyncio.sleep(0.3)
        await say(service, "x")
        await listener.next()
        assert listener.num_beats >= 2


async def test_streams_end_with_their_key_and_free_what_they_held(tmp_path: Path) -> None:
    async with bench(tmp_path) as service, served(service) as http:
        async with listening(http, service) as mine, listening(http, service, who="birch") as other:
            await until_streams(service, 2)
            key_id = (await service.get("/v1/whoami"))["key_id"]
            await service.call("DELETE", f"/v1/tenants/acme/keys/{key_id}", who="operator")
            with pytest.raises(StopAsyncIteration):
                await mine.next()
            await say(service, "x", tenant="birch")
            assert said(await other.take(1)) == ["x"]
        await until_streams(service, 0)
        assert service.parts.hub._channels == {}


async def test_too_many_streams_are_refused(tmp_path: Path) -> None:
    settings = replace(SETTINGS, max_streams=1)
    async with (
        bench(tmp_path, settings=settings) as service,
        served(service) as http,
        listening(http, service),
    ):
        headers = {**service.headers(), "Accept": "text/event-stream"}
        refused = await http.get("/v1/events", headers=headers)
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)


async def test_one_tenant_cannot_hold_every_stream(tmp_path: Path) -> None:
    async with bench(tmp_path, settings=replace(SETTINGS, max_streams=8)) as service:
        hub = service.parts.hub
        acme, birch = await service.store.call(Store.tenants)
        opened = await asyncio.gather(
            *(hub.open(acme, key_id="k", job=None, after=None) for _ in range(5)),
            return_exceptions=True,
        )
        streams = [stream for stream in opened if not isinstance(stream, Exception)]
        assert len(streams) == 2
        assert all(isinstance(one, QuotaExceeded) for one in opened if one not in streams)
        streams.append(await hub.open(birch, key_id="k", job=None, after=None))
        for stream in streams:
            hub.leave(stream)


async def test_a_wrong_last_event_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        headers = {"Accept": "text/event-stream", "Last-Event-ID": "abc"}
        assert (await service.call("GET", "/v1/events", headers=headers)).status_code == 422


async def test_logs_are_log_and_notice_events_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as service:
        await service.submit()
        await service.ended("sums")
        await say(service, "printed", job="sums")
        page = await service.get("/v1/jobs/sums/logs")
        assert said(page["events"]) == ["printed"]
        assert (await service.get(f"/v1/jobs/sums/logs?after={page['next']}"))["events"] == []


@pytest.mark.slow
async def test_many_idle_streams_are_cheap(tmp_path: Path) -> None:
    """Client and server share this process, so the bounds hold for both sides together."""
    count = 400
    settings = replace(SETTINGS, heartbeat_s=15.0)
    async with bench(tmp_path, settings=settings) as service, served(service) as http:
        before_bytes = runtime.rss_bytes()
        async with asyncio.TaskGroup() as group:
            heard: list[str] = []

            async def listen() -> None:
                async with listening(http, service) as listener:
                    heard.extend(said(await listener.take(1)))

            for _ in range(count):
                group.create_task(listen())
            await until_streams(service, count)
            cpu_s = runtime.cpu_s()
            await asyncio.sleep(1.0)
            assert runtime.cpu_s() - cpu_s < 0.3
            assert (runtime.rss_bytes() - before_bytes) / count < 300_000
            await say(service, "to all")
        assert heard == ["to all"] * count


async def test_a_stream_does_not_open_with_a_key_that_was_revoked_meanwhile(tmp_path: Path) -> None:
    async with bench(tmp_path, is_running=False) as service:
        hub = service.parts.hub
        key_id = (await service.get("/v1/whoami"))["key_id"]
        tenant = await service.store.call(Store.tenant, TenantId("acme"))
        opening = asyncio.create_task(hub.open(tenant, key_id=key_id, job=None, after=None))
        await asyncio.sleep(0)
        hub.end(key_id=key_id)
        with pytest.raises(Unauthorized):
            await opening
        assert hub.num_streams == 0


async def test_a_stream_that_opens_while_its_tenant_goes_does_not_hear_the_next_one(
    tmp_path: Path,
) -> None:
    async with bench(tmp_path) as service:
        tenant = await service.store.call(Store.tenant, TenantId("acme"))
        path = "/v1/tenants/acme"
        await service.call("DELETE", path, who="operator")
        with pytest.raises(NotFound):
            await service.parts.hub.open(tenant, key_id="k", job=None, after=None)
        await service.call("POST", "/v1/tenants", who="operator", json={"tenant": "acme"})
        with pytest.raises(NotFound):
            await service.parts.hub.open(tenant, key_id="k", job=None, after=None)
        assert service.parts.hub.num_streams == 0
