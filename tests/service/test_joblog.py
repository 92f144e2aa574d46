"""What tenants' code prints becomes events, however much it prints; and turns come one by one."""

import asyncio
from pathlib import Path

import pytest

from marlaas.service import joblog
from marlaas.service.joblog import MAX_CHARS, MAX_EVENT_CHARS, MAX_LINES, JobLogs
from marlaas.service.limits import Turns
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import JobSpec, TenantId

pytestmark = pytest.mark.asyncio
SPEC = JobSpec(tenant=TenantId("acme"), name="sums", env={})


async def test_a_flood_of_lines_is_a_few_events_that_say_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joblog, "PAUSE_S", 0.05)
    store = AsyncStore(Store.open(tmp_path))
    await store.call(Store.add_job, SPEC.tenant, SPEC)
    logs = JobLogs(store)
    log = logs.of(SPEC)
    for number in range(1000):
        log(f"line {number}")
    await asyncio.sleep(0.3)
    log("later")
    await asyncio.sleep(0.2)
    await logs.close()
    events = await store.call(Store.events, SPEC.tenant, job="sums")
    texts = [str(event.data["text"]) for event in events if event.kind == "log"]
    await store.close()
    assert texts[-1] == "later"
    assert len(texts) <= 3
    lines = "\n".join(texts).splitlines()
    assert f"({1000 - MAX_LINES} earlier lines were left out)" in lines
    assert "line 999" in lines


async def test_turns_come_one_by_one_for_a_name_and_side_by_side_for_others() -> None:
    turns = Turns()
    order: list[str] = []

    async def use(name: str, label: str) -> None:
        async with turns.of(name):
            order.append(f"{label} in")
            await asyncio.sleep(0.01)
            order.append(f"{label} out")

    await asyncio.gather(use("a", "a1"), use("a", "a2"), use("b", "b"))
    assert order.index("a1 out") < order.index("a2 in")
    assert order.index("b in") < order.index("a1 out")
    assert turns._locks == {}


async def test_an_event_holds_the_newest_lines_that_fit(tmp_path: Path) -> None:
    store = AsyncStore(Store.open(tmp_path))
    await store.call(Store.add_job, SPEC.tenant, SPEC)
    logs = JobLogs(store)
    log = logs.of(SPEC)
    for number in range(MAX_LINES):
        log(f"{number:02d} " + "x" * MAX_CHARS)
    await asyncio.sleep(0.1)
    await logs.close()
    events = await store.call(Store.events, SPEC.tenant, job="sums")
    await store.close()
    (text,) = [str(event.data["text"]) for event in events if event.kind == "log"]
    assert len(text) <= MAX_EVENT_CHARS + 100
    first, *lines = text.splitlines()
    assert first == f"({MAX_LINES - len(lines)} earlier lines were left out)"
    assert lines[-1].startswith(f"{MAX_LINES - 1} ")
