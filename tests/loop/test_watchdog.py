"""What makes no progress is named, once, with its cause."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas import runtime
from marlaas.loop.watchdog import Stage, Watchdog
from marlaas.types import EventKind, JobSpec, Notice
from tests.fakes import FakeWorker, ScriptedFamily
from tests.loop.test_jobs import Service, job

SPEC = JobSpec(tenant="acme", name="sums", env={})


def watched(script: Callable[[Watchdog], object], **settings: object) -> list[Notice]:
    """Run a script beside a watchdog of one job; return what it reported."""
    notices: list[Notice] = []

    async def main() -> None:
        watchdog = Watchdog(lambda spec, notice: notices.append(notice), **settings)
        looking = asyncio.create_task(watchdog.run())
        with watchdog.running(SPEC):
            await script(watchdog)
        looking.cancel()

    runtime.run_virtual(main())
    return notices


def test_a_wait_past_its_bound_is_reported_once_and_once_more_when_it_is_over() -> None:
    async def script(watchdog: Watchdog) -> None:
        with watchdog.watch(SPEC, Stage.PUBLISH, "version 3 goes live"):
            await asyncio.sleep(59.0)
            assert watchdog.notices(SPEC.job_id) == []
            await asyncio.sleep(100.0)
            assert [notice.stage for notice in watchdog.notices(SPEC.job_id)] == ["publish"]
        await asyncio.sleep(1.5)
        assert watchdog.notices(SPEC.job_id) == []

    late, over = watched(script)
    assert (late.stage, late.tenant, late.job) == ("publish", "acme", "sums")
    assert late.cause == "version 3 goes live" and 60.0 < late.since_s < 62.0
    assert (over.stage, over.cause) == ("publish", "goes on again")


def test_the_oldest_of_many_waits_counts() -> None:
    async def script(watchdog: Watchdog) -> None:
        with watchdog.watch(SPEC, Stage.ENVIRONMENT, "this tool hangs"):
            for _ in range(13):
                with watchdog.watch(SPEC, Stage.ENVIRONMENT, "another one answers"):
                    await asyncio.sleep(10.0)

    notices = watched(script)
    assert [notice.cause for notice in notices] == ["this tool hangs"]


def test_bounds_are_the_operators() -> None:
    async def script(watchdog: Watchdog) -> None:
        with watchdog.watch(SPEC, Stage.TRAIN, "a step"):
            await asyncio.sleep(10.0)

    assert watched(script) == []
    assert len(watched(script, bounds_s={Stage.TRAIN: 5.0})) == 1


def test_a_job_of_which_nothing_is_in_progress_is_reported_unless_it_may_rest() -> None:
    async def script(watchdog: Watchdog) -> None:
        await asyncio.sleep(200.0)

    (notice,) = watched(script)
    assert notice.stage == "rollout" and notice.cause.startswith("nothing of it is in progress")
    assert watched(script, may_rest=lambda spec: True) == []


def test_how_late_the_event_loop_is_gets_measured() -> None:
    async def main() -> float:
        watchdog = Watchdog(lambda spec, notice: None, period_s=0.01)
        looking = asyncio.create_task(watchdog.run())
        await asyncio.sleep(0.02)
        time.sleep(0.2)
        await asyncio.sleep(0.02)
        looking.cancel()
        return watchdog.max_lag_s

    assert 0.1 < asyncio.run(main()) < 2.0


class HangingEnv:
    async def step(self, reply: str, *, is_last: bool) -> None:
        await asyncio.sleep(1e5)

    async def close(self) -> None:
        pass


class HangingFamily(ScriptedFamily):
    def make(self, prompt: object, num_envs: int) -> list[HangingEnv]:
        return [HangingEnv() for _ in range(num_envs)]


class Stuck(FakeWorker):
    """Hangs in one verb, for a while."""

    verb = ""

    async def generate(self, request: object) -> object:
        await self._hang("generate")
        return await super().generate(request)

    async def forward_backward(self, *arguments: object) -> list:
        await self._hang("forward_backward")
        return await super().forward_backward(*arguments)

    async def publish(self, *arguments: object) -> None:
        await self._hang("publish")
        await super().publish(*arguments)

    async def create(self, *arguments: object) -> str:
        await self._hang("create")
        return await super().create(*arguments)

    async def _hang(self, verb: str) -> None:
        if verb == self.verb:
            self.verb = ""
            await asyncio.sleep(1000.0)


@pytest.mark.parametrize(
    ("verb", "stage", "cause"),
    [
        ("generate", "rollout", "worker-0 samples a turn"),
        ("forward_backward", "train", "worker-0 makes a step"),
        ("publish", "publish", "version 1 goes live"),
        ("create", "worker", "worker-0 is to hold the policy"),
    ],
)
def test_a_stuck_stage_is_named_in_log_status_event_and_to_observers(
    tmp_path: Path, verb: str, stage: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec = job(max_staleness=0, straggler_deadline_s=1e6, eval_prompts=0)

    def worker() -> Stuck:
        stuck = Stuck()
        stuck.verb = verb
        return stuck

    async def script(service: Service) -> None:
        await service.submit(spec)
        await asyncio.sleep(500.0)
        waits_for = service.controller.status("acme", "say-y").waits_for
        assert waits_for.startswith(f"{stage}: {cause}, for ")
        await service.until(lambda: service.is_done(spec))
        assert service.controller.status("acme", "say-y").waits_for == ""

    service = Service(tmp_path, script, worker=worker)
    heard = [notice for notice in service.recorder.notices if notice.stage == stage]
    assert heard[0].cause == cause
    events = service.store.events("acme", job="say-y")
    written = [event.data for event in events if event.kind is EventKind.NOTICE]
    assert {"stage": stage, "cause": cause, "since_s": heard[0].since_s} in written
    assert f"acme/say-y: {stage}: {cause}" in caplog.text


def test_an_environment_that_hangs_is_named(tmp_path: Path) -> None:
    spec = job(steps=1)

    async def script(service: Service) -> None:
        service.controller._make_family = lambda spec: HangingFamily()
        await service.submit(replace(spec, name="hangs"))
        await asyncio.sleep(300.0)
        waits_for = service.controller.status("acme", "hangs").waits_for
        assert waits_for.startswith("environment: a tool or a verdict is to come back, for ")
        await service.controller.cancel("acme", "hangs")

    Service(tmp_path, script)
