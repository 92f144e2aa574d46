"""Who runs and who waits, and what verbs do to jobs: on fake workers under virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from marlaas import runtime
from marlaas.errors import (
    CapacityExceeded,
    Conflict,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
)
from marlaas.loop.controller import Controller, LoopSettings
from marlaas.loop.jobs import Roster, Seat
from marlaas.loop.usage import UNLIMITED, Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import GroupState, Store
from marlaas.types import EventKind, Fork, JobSpec, JobState, Quotas, Tenant
from tests.fakes import (
    ByteTokenizer,
    FakeWorker,
    Recorder,
    ScriptedFamily,
    SlowStore,
    Speed,
    family_of,
    job,
)

Script = Callable[["Service"], Coroutine[None, None, None]]


def quotas(**limits: object) -> Quotas:
    return replace(UNLIMITED, **limits)


class Service:
    """A controller that serves until its script is over, on a store that stays."""

    def __init__(
        self,
        root: Path,
        script: Script,
        *,
        worker: Callable[[], FakeWorker] = FakeWorker,
        store: Store | None = None,
        store_s: float = 0.0,
        epoch_s: float = 0.0,
        family: Callable[[JobSpec], object] = family_of,
        **settings: object,
    ) -> None:
        self.store = store or Store(root)
        self.recorder = Recorder()
        self._script, self._worker, self._store_s = script, worker, store_s
        self._family = family
        self._settings = LoopSettings(**settings)
        runtime.run_virtual(self._main(), epoch_s=epoch_s)

    async def _main(self) -> None:
        self.worker = self._worker()
        store = AsyncStore(self.store, is_threaded=False)
        if self._store_s:
            store = SlowStore(self.store, call_s=self._store_s, seed=0)
        self.controller = Controller(
            store, [self.worker], ByteTokenizer(), make_family=self._family,
            observer=self.recorder, settings=self._settings,
        )  # fmt: skip
        async with asyncio.timeout(1e7), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.controller.serve())
            await asyncio.sleep(0)
            await self._script(self)
            self.controller.stop()

    async def submit(self, *specs: JobSpec) -> None:
        for spec in specs:
            await self.controller.submit(spec)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, looking every now and then."""
        while not is_so():
            await asyncio.sleep(0.05)

    def state(self, spec: JobSpec) -> JobState:
        return self.store.job(spec.tenant, spec.name).state

    def step(self, spec: JobSpec) -> int:
        return self.store.job(spec.tenant, spec.name).step

    def is_done(self, *specs: JobSpec) -> bool:
        return all(self.state(spec) is JobState.DONE for spec in specs)

    def states(self, spec: JobSpec) -> list[str]:
        events = self.store.events(spec.tenant, job=spec.name)
        return [event.data["state"] for event in events if event.kind is EventKind.STATE]


# ---------------------------------------------------------------------------------------------
# Who starts next


def seat(name: str, number: int, **changes: object) -> Seat:
    tenant, _, rest = name.partition("-")
    return Seat(spec=JobSpec(tenant=tenant, name=rest, env={}), number=number, **changes)


def names(seats: list[Seat]) -> list[str]:
    return [f"{seat.spec.tenant}-{seat.spec.name}" for seat in seats]


def start_all(roster: Roster) -> list[str]:
    started = []
    while (seat := roster.next()) is not None:
        roster.start(seat)
        started.append(seat)
    return names(started)


def test_the_tenant_with_the_fewest_running_jobs_for_its_weight_starts_next() -> None:
    tenants = Tenants({"b": 2.0})
    roster = Roster(6, tenants)
    flood = [seat(f"a-{i}", i) for i in range(20)]
    for one in [*flood, *(seat(f"b-{i}", 20 + i) for i in range(20)), seat("c-0", 40)]:
        roster.add(one)
    expected = names(roster.queued())[:6]
    assert start_all(roster) == expected == ["a-0", "b-0", "c-0", "b-1", "a-1", "b-2"]


def test_a_tenants_quota_holds_its_jobs_back_and_nobody_elses() -> None:
    tenants = Tenants({})
    tenants.change([Tenant(tenant_id="a", quotas=quotas(max_running_jobs=1))])
    roster = Roster(64, tenants)
    for number, name in enumerate(["a-0", "a-1", "b-0", "b-1"]):
        roster.add(seat(name, number))
    assert start_all(roster) == ["a-0", "b-0", "b-1"]
    waiting = roster.get("a/1")
    assert roster.why_waits(waiting) == "the tenant's quota is 1 running jobs"
    assert roster.places() == {"a/1": 1}


def test_jobs_that_were_running_come_first() -> None:
    roster = Roster(2, Tenants({}))
    roster.add(seat("a-new", 1))
    roster.add(seat("b-old", 2, was_running=True))
    roster.add(seat("a-old", 3, was_running=True))
    assert start_all(roster) == ["b-old", "a-old"]


def test_a_blocked_job_lets_the_next_one_of_its_tenant_start() -> None:
    roster = Roster(64, Tenants({}))
    roster.add(seat("a-0", 0))
    roster.add(seat("a-1", 1))
    roster.block("a/0")
    assert start_all(roster) == ["a-1"]
    roster.unblock("a/0")
    assert start_all(roster) == ["a-0"]


# ---------------------------------------------------------------------------------------------
# Admission of jobs


def test_more_jobs_than_places_run_one_after_another(tmp_path: Path) -> None:
    specs = [job(f"j{i}", tenant=f"t{i % 2}") for i in range(6)]
    most_running = 0

    async def script(service: Service) -> None:
        nonlocal most_running
        await service.submit(*specs)
        while not service.is_done(*specs):
            rows = [service.state(spec) for spec in specs]
            most_running = max(most_running, rows.count(JobState.RUNNING))
            await asyncio.sleep(0.1)

    service = Service(tmp_path, script, max_running_jobs=2)
    assert most_running == 2
    assert all(service.states(spec) == ["queued", "running", "done"] for spec in specs)


def test_a_raised_quota_starts_jobs_at_once_and_a_lower_one_queues_the_youngest(
    tmp_path: Path,
) -> None:
    specs = [job(f"j{i}", steps=60) for i in range(3)]

    async def script(service: Service) -> None:
        def change(limit: int) -> None:
            tenant = Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=limit))
            service.controller.tenants_changed([tenant])

        change(1)
        await service.submit(*specs)
        await service.until(lambda: service.step(specs[0]) > 1)
        assert [service.state(spec) for spec in specs] == ["running", "queued", "queued"]
        change(3)
        await service.until(lambda: all(service.step(spec) > 1 for spec in specs))
        change(2)
        await service.until(lambda: service.state(specs[2]) is JobState.QUEUED)
        reason = service.store.job("acme", "j2").reason
        assert reason == "the tenant's quota is 2 running jobs now"
        await service.until(lambda: service.is_done(*specs))

    service = Service(tmp_path, script)
    assert service.states(specs[0]) == ["queued", "running", "done"]
    assert service.states(specs[2]) == ["queued", "running", "queued", "running", "done"]


def test_a_full_queue_refuses_new_jobs_and_takes_the_same_one_again(tmp_path: Path) -> None:
    async def script(service: Service) -> None:
        tenant = Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=1, max_queued_jobs=2))
        service.controller.tenants_changed([tenant])
        specs = [job(f"j{i}", steps=30) for i in range(3)]
        await service.submit(specs[0])
        await service.until(lambda: service.state(specs[0]) is JobState.RUNNING)
        await service.submit(*specs[1:])
        with pytest.raises(QuotaExceeded, match="2 jobs are queued") as refusal:
            await service.submit(job("j3"))
        assert refusal.value.retry_after_s > 0
        await service.submit(specs[2])
        assert len(service.store.jobs("acme")) == 3

    Service(tmp_path, script)


def test_the_same_key_again_is_the_same_job(tmp_path: Path) -> None:
    async def script(service: Service) -> None:
        first = await service.controller.submit(job(), idempotency_key="k")
        again = await service.controller.submit(job(), idempotency_key="k")
        assert first.spec == again.spec
        with pytest.raises(Conflict):
            await service.controller.submit(job("other"), idempotency_key="k")

    service = Service(tmp_path, script)
    assert len(service.store.jobs("acme")) == 1


# ---------------------------------------------------------------------------------------------
# Pause, resume, cancel


@pytest.mark.parametrize("store_s", [0.0, 0.02])
@pytest.mark.parametrize("at_s", [0.0, 0.01, 0.3, 1.0, 2.5])
def test_a_paused_job_holds_nothing_and_goes_on_where_it_was(
    tmp_path: Path, at_s: float, store_s: float
) -> None:
    spec = job(steps=12, env={"max_turns": 3, "tool_s": 0.3}, is_seeded=True)
    curves = []
    for part, is_paused in (("whole", False), ("paused", True)):

        async def script(service: Service, is_paused: bool = is_paused) -> None:
            await service.submit(spec)
            if is_paused:
                await asyncio.sleep(at_s)
                stored = await service.controller.pause("acme", "say-y")
                assert (stored.state, stored.reason) == ("paused", "paused by the tenant")
                assert service.worker.policies == {}
                assert service.worker.num_decoding == 0
                assert service.worker.kept_sequences == set()
                station = service.controller._placement.stations[0]
                assert (station.load.num_sampling, station.load.num_reserved) == (0, 0)
                step, finished = stored.step, service.store.groups("acme", "say-y")
                await asyncio.sleep(100.0)
                assert service.store.job("acme", "say-y").step == step
                assert len(service.store.groups("acme", "say-y")) == len(finished)
                assert (await service.controller.resume("acme", "say-y")).state == "queued"
            await service.until(lambda: service.is_done(spec))

        service = Service(tmp_path / part, script, store_s=store_s)
        records = service.store.steps("acme", "say-y")
        curves.append([(r.adapter_hash, r.group_indices) for r in records])
    assert curves[0] == curves[1]


def test_finished_groups_outlive_a_pause(tmp_path: Path) -> None:
    spec = job(steps=12)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.step(spec) == 3)
        await service.controller.pause("acme", "say-y")
        finished = service.store.groups("acme", "say-y", GroupState.FINISHED)
        before = [row.index for row in finished]
        assert before
        await service.controller.resume("acme", "say-y")
        await service.until(lambda: service.is_done(spec))
        heard = [group.index for _, group in service.recorder.groups]
        assert all(heard.count(index) == 1 for index in before)

    Service(tmp_path, script)


def test_verbs_may_be_repeated_and_impossible_ones_are_refused(tmp_path: Path) -> None:
    done, spec = job("done", steps=1), job(steps=50)

    async def script(service: Service) -> None:
        controller = service.controller
        await service.submit(done, spec)
        await service.until(lambda: service.is_done(done))
        for verb in (controller.pause, controller.resume, controller.cancel):
            with pytest.raises(Conflict, match="job 'done' is done"):
                await verb("acme", "done")
            with pytest.raises(NotFound):
                await verb("acme", "nobody")
            with pytest.raises(NotFound):
                await verb("other", "done")
        assert (await controller.resume("acme", "say-y")).state == "running"
        for _ in range(2):
            assert (await controller.pause("acme", "say-y")).state == "paused"
        await controller.resume("acme", "say-y")
        await controller.resume("acme", "say-y")
        for _ in range(2):
            assert (await controller.cancel("acme", "say-y")).state == "cancelled"
        with pytest.raises(Conflict, match="cancelled"):
            await controller.resume("acme", "say-y")

    service = Service(tmp_path, script)
    expected = ["queued", "running", "paused", "queued", "running", "cancelled"]
    assert service.states(spec) in (expected, [*expected[:4], "cancelled"])


def test_a_waiting_job_is_paused_and_cancelled_without_ever_starting(tmp_path: Path) -> None:
    specs = [job("runs", steps=30), job("waits"), job("goes")]

    async def script(service: Service) -> None:
        await service.submit(*specs)
        await service.controller.pause("acme", "waits", reason="not now")
        await service.controller.cancel("acme", "goes")
        await service.until(lambda: service.is_done(specs[0]))
        assert service.state(specs[1]) is JobState.PAUSED
        await service.controller.resume("acme", "waits")
        await service.until(lambda: service.is_done(specs[1]))

    service = Service(tmp_path, script, max_running_jobs=1)
    assert service.states(specs[1]) == ["queued", "paused", "queued", "running", "done"]
    assert service.states(specs[2]) == ["queued", "cancelled"]


def test_verbs_at_the_same_moment_come_one_after_another(tmp_path: Path) -> None:
    spec = job(steps=40)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await asyncio.sleep(1.0)
        verbs = service.controller
        await asyncio.gather(
            verbs.pause("acme", "say-y"), verbs.pause("acme", "say-y"),
            verbs.resume("acme", "say-y"), verbs.pause("acme", "say-y"),
            verbs.resume("acme", "say-y"),
        )  # fmt: skip
        await service.until(lambda: service.is_done(spec))

    states = Service(tmp_path, script, store_s=0.01).states(spec)
    assert states.count("paused") == 2 and states[-1] == "done"


def test_a_pause_does_not_wait_for_a_worker_that_hangs(tmp_path: Path) -> None:
    class Hanging(FakeWorker):
        async def forward_backward(self, *_: object) -> list:
            await asyncio.sleep(1e6)
            return []

    spec = job()

    async def script(service: Service) -> None:
        await service.submit(spec)
        await asyncio.sleep(10.0)
        began_s = runtime.now_s()
        await service.controller.pause("acme", "say-y")
        assert runtime.now_s() - began_s < 1.0

    Service(tmp_path, script, worker=Hanging)


@pytest.mark.parametrize("store_s", [0.01, 0.3])
def test_a_caller_that_leaves_does_not_leave_its_verb_half_done(
    tmp_path: Path, store_s: float
) -> None:
    spec = job(steps=12)

    async def script(service: Service) -> None:
        async def and_leave(verb: Coroutine) -> None:
            calling = asyncio.create_task(verb)
            await asyncio.sleep(store_s)
            calling.cancel()
            await asyncio.wait([calling])

        await and_leave(service.controller.submit(spec))
        await service.until(lambda: service.step(spec) > 1)
        await and_leave(service.controller.pause("acme", "say-y"))
        assert service.state(spec) is JobState.PAUSED
        await and_leave(service.controller.resume("acme", "say-y"))
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path, script, store_s=store_s)


@dataclass(frozen=True, kw_only=True)
class Sandboxed(ScriptedFamily):
    """Says when it was stopped."""

    stopped: list[str]

    async def stop(self) -> None:
        await asyncio.sleep(0.1)
        self.stopped.append(self.name)


def test_a_policy_that_cannot_be_removed_leaves_no_sandbox_behind(tmp_path: Path) -> None:
    class Stuck(FakeWorker):
        async def remove(self, policy_id: str) -> None:
            raise CapacityExceeded(f"{policy_id} stays")

    stopped: list[str] = []

    async def script(service: Service) -> None:
        await service.submit(job())
        await service.until(lambda: service.state(job()) is JobState.FAILED)

    Service(tmp_path, script, worker=Stuck, family=lambda _: Sandboxed(stopped=stopped))
    assert stopped == ["scripted"]


@pytest.mark.parametrize("after_s", [0.0, 0.05, 1.0, 1.05])
def test_a_server_that_is_cut_off_while_a_job_stops_leaves_no_sandbox(
    tmp_path: Path, after_s: float
) -> None:
    class Slow(FakeWorker):
        async def remove(self, policy_id: str) -> None:
            await asyncio.sleep(1.0)
            await super().remove(policy_id)

    stopped: list[str] = []

    async def main() -> None:
        controller = Controller(
            AsyncStore(Store(tmp_path), is_threaded=False), [Slow()], ByteTokenizer(),
            make_family=lambda _: Sandboxed(stopped=stopped),
        )  # fmt: skip
        serving = asyncio.create_task(controller.serve())
        await controller.submit(job(steps=1000))
        await asyncio.sleep(3.0)
        pausing = asyncio.create_task(controller.pause("acme", "say-y"))
        await asyncio.sleep(after_s)
        serving.cancel()
        await asyncio.wait([serving, pausing])

    runtime.run_virtual(main())
    assert stopped == ["scripted"]


def test_a_held_job_may_be_resumed(tmp_path: Path) -> None:
    spec = job(steps=3)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.state(spec) is JobState.HELD)
        service.worker.skew = 0.0
        await service.controller.resume("acme", "say-y")
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path, script, worker=lambda: FakeWorker(skew=0.1))


def test_a_deleted_job_leaves_nothing_and_its_name_is_free(tmp_path: Path) -> None:
    spec = job(steps=2)

    async def script(service: Service) -> None:
        await service.submit(spec)
        with pytest.raises(Conflict):
            await service.controller.delete("acme", "say-y")
        await service.until(lambda: service.is_done(spec))
        await service.controller.delete("acme", "say-y")
        assert service.store.jobs("acme") == []
        assert not service.store.files.job("acme", "say-y").exists()
        await service.submit(replace(spec, seed=9))
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path, script)


def test_a_new_server_goes_on_with_what_ran_first_and_queues_what_has_no_place(
    tmp_path: Path,
) -> None:
    specs = [job(f"j{i}", steps=40) for i in range(3)]
    waiting = job("waits")

    async def first(service: Service) -> None:
        await service.submit(*specs)
        await service.until(lambda: all(service.step(spec) > 2 for spec in specs))

    async def second(service: Service) -> None:
        await service.submit(waiting)
        await asyncio.sleep(0.1)
        states = [service.state(spec) for spec in (*specs, waiting)]
        assert states == ["running", "running", "queued", "queued"]
        assert "started anew" in service.store.job("acme", "j2").reason
        await service.until(lambda: service.is_done(*specs, waiting))

    Service(tmp_path, first)
    service = Service(tmp_path, second, max_running_jobs=2)
    assert service.states(specs[0]) == ["queued", "running", "done"]
    assert service.states(specs[2]) == ["queued", "running", "queued", "running", "done"]


def test_a_pause_while_the_server_begins_holds(tmp_path: Path) -> None:
    specs = [job(f"j{i}", steps=200) for i in range(6)]

    async def first(service: Service) -> None:
        await service.submit(*specs)
        await service.until(lambda: all(service.step(spec) > 0 for spec in specs))

    async def second(service: Service) -> None:
        await asyncio.gather(*(service.controller.pause("acme", spec.name) for spec in specs))
        await asyncio.sleep(10.0)
        assert {service.state(spec) for spec in specs} == {JobState.PAUSED}

    Service(tmp_path, first)
    Service(tmp_path, second, max_running_jobs=1, store_s=0.1)


# ---------------------------------------------------------------------------------------------
# Caps and quotas


def test_a_job_pauses_at_its_cap_and_cannot_be_resumed(tmp_path: Path) -> None:
    capped = job("tokens", steps=50, max_job_tokens=1000)
    slow = job("device", steps=50, max_device_s=2.0)

    async def script(service: Service) -> None:
        await service.submit(capped, slow)
        await service.until(lambda: service.state(capped) is JobState.PAUSED is service.state(slow))
        with pytest.raises(Conflict, match="its cap of 1000 tokens is reached; fork it"):
            await service.controller.resume("acme", "tokens")

    service = Service(tmp_path, script)
    stored = service.store.job("acme", "tokens")
    assert stored.reason == "its cap of 1000 tokens is reached"
    used = stored.usage.sampled_tokens + stored.usage.trained_tokens
    assert 1000 <= used < 2000, "what was in flight is all that comes on top"
    stored = service.store.job("acme", "device")
    assert stored.reason == "its cap of 2 device seconds is reached"
    assert 2.0 <= stored.device_s < 3.0


def test_a_job_that_reaches_its_cap_with_its_last_step_is_done(tmp_path: Path) -> None:
    async def whole(service: Service) -> None:
        await service.submit(job(is_seeded=True))
        await service.until(lambda: service.is_done(job()))

    usage = Service(tmp_path / "whole", whole).store.job("acme", "say-y").usage
    spec = job(is_seeded=True, max_job_tokens=usage.sampled_tokens + usage.trained_tokens)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path / "capped", script)


def test_a_tenant_that_has_used_up_its_day_waits_for_the_next_one(tmp_path: Path) -> None:
    spec, other = job(steps=30), job("other", tenant="other", steps=30)
    noon_s = 10.5 * 86400.0

    async def script(service: Service) -> None:
        tenant = Tenant(tenant_id="acme", quotas=quotas(tokens_a_day=3000))
        service.controller.tenants_changed([tenant])
        await service.submit(spec, other)
        await service.until(lambda: service.is_done(other))
        await asyncio.sleep(3600.0)
        assert service.state(spec) is JobState.RUNNING
        status = service.controller.status("acme", "say-y")
        assert "quota of 3000 tokens a day is used up" in status.waits_for
        step = service.step(spec)
        await asyncio.sleep(3600.0)
        assert service.step(spec) == step < 30
        await asyncio.sleep(43200.0 - 7200.0)
        await service.until(lambda: service.step(spec) > step)
        service.controller.tenants_changed([replace(tenant, quotas=UNLIMITED)])
        await service.until(lambda: service.is_done(spec))
        by_day = service.store.usage_by_day("acme", days=3)
        assert list(by_day) == ["1970-01-11", "1970-01-12"]
        first = by_day["1970-01-11"]
        assert 2500 < first.sampled_tokens + first.trained_tokens <= 3000
        assert service.recorder.notices == [], "a tenant at rest is no fault"

    Service(tmp_path, script, epoch_s=noon_s)


def test_what_was_used_today_counts_after_a_restart(tmp_path: Path) -> None:
    spec = job(steps=30)
    tenant = Tenant(tenant_id="acme", quotas=quotas(tokens_a_day=3000))

    async def first(service: Service) -> None:
        service.controller.tenants_changed([tenant])
        await service.submit(spec)
        await service.until(
            lambda: "used up" in service.controller.status("acme", "say-y").waits_for
        )

    async def second(service: Service) -> None:
        service.controller.tenants_changed([tenant])
        await asyncio.sleep(100.0)
        assert "used up" in service.controller.status("acme", "say-y").waits_for

    Service(tmp_path, first)
    usage = Service(tmp_path, second).store.usage("acme")
    assert 2500 < usage.sampled_tokens + usage.trained_tokens <= 3000


def test_a_quota_is_overshot_by_no_more_than_one_group(tmp_path: Path) -> None:
    specs = [job(f"j{index}", steps=50, eval_prompts=0) for index in range(3)]

    async def script(service: Service) -> None:
        tenant = Tenant(tenant_id="acme", quotas=quotas(tokens_a_day=1000))
        service.controller.tenants_changed([tenant])
        await service.submit(*specs)
        await asyncio.sleep(3600.0)
        for spec in specs:
            assert "used up" in service.controller.status("acme", spec.name).waits_for

    service = Service(tmp_path, script)
    usage = service.store.usage("acme")
    assert 600 < usage.sampled_tokens + usage.trained_tokens < 1000 + 250
    assert service.recorder.notices == []


def test_a_job_of_groups_larger_than_the_quota_makes_one_a_day(tmp_path: Path) -> None:
    spec = job(steps=1, prompts_per_step=2, eval_prompts=2)

    async def script(service: Service) -> None:
        tenant = Tenant(tenant_id="acme", quotas=quotas(tokens_a_day=20))
        service.controller.tenants_changed([tenant])
        await service.submit(spec)
        while not service.is_done(spec):
            await asyncio.sleep(3600.0)
        assert len(service.store.usage_by_day("acme")) in (2, 3)

    Service(tmp_path, script, watch_every_s=60.0)


def test_a_job_pauses_when_its_tenants_storage_is_full_and_goes_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    spec = job(steps=60)

    async def script(service: Service) -> None:
        limit = 60_000
        tenant = Tenant(tenant_id="acme", quotas=quotas(stored_bytes=limit))
        service.controller.tenants_changed([tenant])
        await service.submit(spec)
        await service.until(lambda: service.state(spec) is JobState.PAUSED)
        reason = service.store.job("acme", "say-y").reason
        assert f"of {limit} bytes are stored; delete jobs" in reason
        assert limit <= service.store.stored_bytes("acme") < 2 * limit
        with pytest.raises(QuotaExceeded, match="bytes are stored"):
            await service.controller.resume("acme", "say-y")
        service.controller.tenants_changed([replace(tenant, quotas=UNLIMITED)])
        await service.controller.resume("acme", "say-y")
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path, script)


def test_what_a_fork_keeps_is_stored_by_its_tenant(tmp_path: Path) -> None:
    async def script(service: Service) -> None:
        await service.submit(job())
        await service.until(lambda: service.is_done(job()))
        before = service.store.stored_bytes("acme")
        tenant = Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=0))
        service.controller.tenants_changed([tenant])
        await service.submit(job("fork", fork=Fork(job="say-y", version=5)))
        size = service.store.files.version("acme", "say-y", 5).adapter_bytes()
        assert size > 0
        assert size <= service.store.stored_bytes("acme") - before < size + 200
        await service.controller.cancel("acme", "fork")
        await service.controller.delete("acme", "fork")
        assert service.store.stored_bytes("acme") - before < 200

    Service(tmp_path, script)


def test_usage_is_what_the_stored_groups_hold(tmp_path: Path) -> None:
    spec = job(steps=4, eval_every=2, env={"max_turns": 2})

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.is_done(spec))
        assert service.controller.status("acme", "say-y").device_s == 0.0, "it is not active"

    service = Service(tmp_path, script)
    usage = service.store.job("acme", "say-y").usage
    rows = [row for row in service.store.groups("acme", "say-y") if row.group]
    sampled = sum(int(t.loss_mask.sum()) for row in rows for t in row.group.trajectories)
    assert usage.sampled_tokens == sampled
    assert usage.evaluated_tokens > 0 and usage.device_s > 0


# ---------------------------------------------------------------------------------------------
# Forks


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_fork_begins_where_the_other_job_was_and_needs_it_no_more(
    tmp_path: Path, with_optimizer: bool
) -> None:
    source = job("source", steps=6)
    fork = job("fork", steps=2, fork=Fork(job="source", version=6, with_optimizer=with_optimizer))

    async def script(service: Service) -> None:
        await service.submit(source)
        await service.until(lambda: service.is_done(source))
        expected = service.store.versions("acme", "source")[6].adapter_hash
        await service.submit(job("busy", steps=30))
        await service.submit(fork)
        assert service.state(fork) is JobState.QUEUED
        service.store.prune_adapters("acme", "source", set())
        await service.until(lambda: service.is_done(fork))
        versions = service.store.versions("acme", "fork")
        assert versions[0].adapter_hash == expected
        assert len({row.adapter_hash for row in versions}) == 3

    Service(tmp_path, script, max_running_jobs=1)


def test_a_fork_of_what_is_not_there_is_refused_with_what_is(tmp_path: Path) -> None:
    source = job("source", steps=6, keep_versions=1)

    def fork(version: int, **changes: object) -> JobSpec:
        forked = {key: changes.pop(key) for key in ("job", "with_optimizer") if key in changes}
        spec = job("fork", fork=Fork(**{"job": "source", "version": version, **forked}))
        return replace(spec, **changes)

    async def script(service: Service) -> None:
        await service.submit(source)
        await service.until(lambda: service.is_done(source))
        adapter = replace(source.adapter, rank=16)
        for spec, words in (
            (fork(0, job="nobody"), "no job 'nobody'"),
            (fork(3), r"version 3 of 'source' is not kept; kept are \[0, .*6\]"),
            (fork(0, with_optimizer=True), r"optimizer state of version 0 .* it is for \[6\]"),
            (fork(6, adapter=adapter), "adapter.rank: 16, but job 'source' has 8"),
            (fork(6, tenant="other"), "no job 'source'"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await service.submit(spec)
        assert len(service.store.jobs("acme")) == 1

    Service(tmp_path, script)


# ---------------------------------------------------------------------------------------------
# Evaluations that are asked for


def test_a_kept_version_is_judged_while_its_job_trains(tmp_path: Path) -> None:
    spec = job(steps=40, keep_versions=3)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.step(spec) >= 6)
        await service.controller.pause("acme", "say-y")
        version = service.step(spec) - 1
        await service.controller.resume("acme", "say-y")
        await service.until(lambda: service.step(spec) >= version + 2)
        for _ in range(2):
            await service.controller.evaluate("acme", "say-y", version)
        with pytest.raises(NotFound, match="version 1 of 'say-y' is not kept"):
            await service.controller.evaluate("acme", "say-y", 1)
        await service.until(lambda: len(service.store.evaluations("acme", "say-y")) == 2)
        assert service.step(spec) < 40
        await service.until(lambda: service.is_done(spec))
        await service.controller.evaluate("acme", "say-y", version)
        judged = [record.version for record in service.store.evaluations("acme", "say-y")]
        assert judged == [0, version, 40]

    Service(tmp_path, script)


def test_a_version_of_a_job_that_does_not_run_is_loaded_judged_and_unloaded(
    tmp_path: Path,
) -> None:
    spec = job(steps=6)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.is_done(spec))
        await service.controller.evaluate("acme", "say-y", 5)
        await service.controller.evaluate("acme", "say-y", 5)
        with pytest.raises(Conflict, match="another version"):
            await service.controller.evaluate("acme", "say-y", 4)
        with pytest.raises(Conflict, match="being judged"):
            await service.controller.delete("acme", "say-y")
        service.worker.kill()
        await service.until(lambda: len(service.store.evaluations("acme", "say-y")) == 3)
        await asyncio.sleep(1.0)
        assert service.worker.policies == {}
        assert service.is_done(spec)

    Service(tmp_path, script)


@pytest.mark.parametrize("is_running", [True, False])
def test_a_version_that_cannot_be_loaded_costs_its_job_nothing(
    tmp_path: Path, is_running: bool
) -> None:
    class Full(FakeWorker):
        async def load_version(self, *_: object) -> str:
            raise CapacityExceeded("no slot is free")

    spec = job(steps=40 if is_running else 4, max_staleness=0)

    async def script(service: Service) -> None:
        await service.submit(spec)
        if is_running:
            await service.until(lambda: service.step(spec) > 5)
        else:
            await service.until(lambda: service.is_done(spec))
        kept = [row.version for row in service.store.versions("acme", "say-y") if row.has_adapter]
        version = sorted(set(kept) - {0, service.step(spec)})[0]
        await service.controller.evaluate("acme", "say-y", version)
        await service.until(lambda: service.is_done(spec))
        await asyncio.sleep(1.0)
        assert not service.controller._judging.is_visited("acme/say-y")
        said = [e.data for e in service.store.events("acme") if e.kind is EventKind.LOG]
        assert said == [{"text": f"version {version} was not judged: no slot is free"}]

    Service(tmp_path, script, worker=Full)


def test_a_job_that_is_being_judged_starts_afterwards(tmp_path: Path) -> None:
    spec = job(steps=20, eval_prompts=100)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.step(spec) >= 3)
        await service.controller.pause("acme", "say-y")
        await service.controller.evaluate("acme", "say-y", service.step(spec))
        await service.controller.resume("acme", "say-y")
        assert service.controller.status("acme", "say-y").waits_for.startswith("an evaluation")
        await service.until(lambda: service.is_done(spec))

    Service(tmp_path, script)


def test_a_job_without_held_out_prompts_has_nothing_to_judge_with(tmp_path: Path) -> None:
    spec = job(steps=2, eval_prompts=0)

    async def script(service: Service) -> None:
        await service.submit(spec)
        with pytest.raises(InvalidRequest, match="eval_prompts is 0"):
            await service.controller.evaluate("acme", "say-y", 0)

    Service(tmp_path, script)


# ---------------------------------------------------------------------------------------------
# A store that is not available


class FlakyStore(Store):
    """Refuses writes while `is_full`."""

    is_full = False

    def _transaction(self):
        if self.is_full:
            raise StoreUnavailable("the disk is full")
        return super()._transaction()


@pytest.mark.parametrize("at_s", [0.0, 0.2, 0.9, 1.7])
def test_jobs_outlast_a_full_disk_and_verbs_say_so(tmp_path: Path, at_s: float) -> None:
    specs = [job("a", is_seeded=True), job("b", env={"tool_s": 0.4})]

    async def script(service: Service) -> None:
        await service.submit(*specs)
        await asyncio.sleep(at_s)
        store.is_full = True
        await asyncio.sleep(60.0)
        step = service.step(specs[0])
        with pytest.raises(StoreUnavailable):
            await service.submit(job("c"))
        assert service.step(specs[0]) == step
        notices = {notice.stage for notice in service.recorder.notices}
        assert "store" in notices
        store.is_full = False
        service.worker.kill()
        await service.until(lambda: service.is_done(*specs))

    store = FlakyStore(tmp_path)
    Service(tmp_path, script, store=store, worker=lambda: FakeWorker(speed=Speed(restart_s=0.5)))


def test_a_server_stops_although_its_disk_is_full_and_the_next_one_goes_on(tmp_path: Path) -> None:
    specs = [job("a", steps=20), job("b", env={"tool_s": 0.4}), job("c", eval_every=1)]

    async def first(service: Service) -> None:
        await service.submit(*specs)
        await service.until(lambda: service.step(specs[0]) > 2)
        store.is_full = True
        await asyncio.sleep(20.0)

    async def second(service: Service) -> None:
        await service.until(lambda: service.is_done(*specs))

    store = FlakyStore(tmp_path)
    assert Service(tmp_path, first, store=store).state(specs[0]) is JobState.RUNNING
    store.close()
    Service(tmp_path, second)


class UnreadableStore(Store):
    """Answers no question for a row while `is_gone`."""

    is_gone = False

    def _row(self, *args: object):
        if self.is_gone:
            raise StoreUnavailable("the server went away")
        return super()._row(*args)


def test_a_store_that_goes_while_a_job_is_queued_again_does_not_hinder_a_stop(
    tmp_path: Path,
) -> None:
    spec = job(steps=200)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: service.step(spec) > 1)
        tenant = Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=0))
        service.controller.tenants_changed([tenant])
        await service.until(lambda: service.state(spec) is JobState.QUEUED)
        store.is_gone = True

    store = UnreadableStore(tmp_path)
    Service(tmp_path, script, store=store, store_s=0.3)
    store.is_gone = False
    assert store.job("acme", "say-y").state is JobState.QUEUED


class ForgetfulStore(Store):
    """Loses its connection behind every other commit: what was written is, and nobody hears."""

    is_forgetful = True
    num_commits = 0

    @contextmanager
    def _transaction(self):
        with super()._transaction() as db:
            yield db
        self.num_commits += 1
        if self.is_forgetful and self.num_commits % 2:
            raise StoreUnavailable("the connection was lost behind the commit")


def test_a_connection_that_is_lost_behind_commits_doubles_and_ends_nothing(tmp_path: Path) -> None:
    spec = job(is_seeded=True, eval_every=2)

    async def script(service: Service) -> None:
        with suppress(StoreUnavailable):
            await service.submit(spec)
        await service.submit(spec)
        await service.until(lambda: service.is_done(spec))

    plain = Service(tmp_path / "plain", script)
    service = Service(tmp_path / "lost", script, store=ForgetfulStore(tmp_path / "lost"))
    used, once = (each.store.job("acme", "say-y").usage for each in (service, plain))
    assert replace(used, device_s=0.0) == replace(once, device_s=0.0)
    assert used.device_s < 1.5 * once.device_s, "rates that are learned later make it a little more"
    kinds = [event.kind for event in service.store.events("acme")]
    assert kinds == [event.kind for event in plain.store.events("acme")]


def test_verbs_whose_answer_was_lost_may_be_repeated(tmp_path: Path) -> None:
    spec = job(steps=1000)

    async def script(service: Service) -> None:
        async def until_heard(verb: Callable[[], Coroutine]) -> None:
            with pytest.raises(StoreUnavailable):
                await verb()
            store.is_forgetful = False
            await verb()
            store.is_forgetful = True
            store.num_commits = 0

        control = service.controller
        service.controller.tenants_changed(
            [Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=0))]
        )
        for verb in ("pause", "resume", "cancel"):
            if verb == "pause":
                await until_heard(lambda: control.submit(spec))
                assert control.status("acme", "say-y").place == 1
            await until_heard(lambda verb=verb: getattr(control, verb)("acme", "say-y"))
            assert control.status("acme", "say-y").place == (1 if verb == "resume" else None)

    store = ForgetfulStore(tmp_path)
    Service(tmp_path, script, store=store)
