"""What is said of jobs that wait and jobs that run."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from marlaas import runtime
from marlaas.loop.usage import UNLIMITED
from marlaas.types import JobState, JobStatus, Tenant
from tests.loop.test_jobs import Service, job, quotas


def test_waiting_jobs_know_why_their_place_and_about_when(tmp_path: Path) -> None:
    specs = [job(f"j{i}", tenant=f"t{i}", steps=40, eval_prompts=0) for i in range(4)]
    started_s: dict[str, float] = {}

    async def script(service: Service) -> None:
        def status(index: int) -> JobStatus:
            return service.controller.status(f"t{index}", f"j{index}")

        await service.submit(*specs)
        await asyncio.sleep(0.0)
        assert [status(i).place for i in range(4)] == [None, 1, 2, 3]
        assert status(1).waits_for == "the server runs 1 jobs, as many as it may"
        assert status(1).starts_in_s is None, "nothing was measured yet"
        await service.until(lambda: service.step(specs[0]) == 20)
        now_s = runtime.now_s()
        guesses = [status(i) for i in range(4)]
        assert guesses[0].place is None and guesses[0].starts_in_s is None
        assert guesses[0].waits_for == ""
        for spec in specs:
            await service.until(lambda spec=spec: service.state(spec) is not JobState.QUEUED)
            started_s[spec.name] = runtime.now_s() - now_s
        await service.until(lambda: service.is_done(*specs))
        end_s = runtime.now_s() - now_s
        for index in (1, 2, 3):
            assert guesses[index].starts_in_s == pytest.approx(started_s[f"j{index}"], rel=0.6)
        assert guesses[3].ends_in_s == pytest.approx(end_s, rel=0.6)
        assert guesses[0].ends_in_s == pytest.approx(started_s["j1"], rel=0.3)
        assert guesses[0].device_s > 0

    Service(tmp_path, script, max_running_jobs=1)


def test_a_job_that_its_tenants_quota_holds_back_says_so(tmp_path: Path) -> None:
    specs = [job("runs", steps=30), job("waits"), job("never", tenant="nobody")]

    async def script(service: Service) -> None:
        service.controller.tenants_changed(
            [
                Tenant(tenant_id="acme", quotas=quotas(max_running_jobs=1)),
                Tenant(tenant_id="nobody", quotas=quotas(max_running_jobs=0)),
            ]
        )
        await service.submit(*specs)
        await service.until(lambda: service.step(specs[0]) == 20)
        waits = service.controller.status("acme", "waits")
        assert waits.waits_for == "the tenant's quota is 1 running jobs"
        assert waits.starts_in_s == pytest.approx(10.0, abs=10.0)
        never = service.controller.status("nobody", "never")
        assert never.starts_in_s is None and never.waits_for.startswith("the tenant's quota is 0")

    Service(tmp_path, script)


def test_nobody_foretells_the_end_of_a_job_that_stands_still(tmp_path: Path) -> None:
    spent, other = job("spent", steps=500), job("other", tenant="other")
    behind = job("behind", tenant="spare")

    async def script(service: Service) -> None:
        tenant = Tenant(tenant_id="acme", quotas=quotas(tokens_a_day=3000))
        service.controller.tenants_changed([tenant])
        await service.submit(spent)
        await service.until(lambda: service.step(spent) >= 3)
        assert service.controller.status("acme", "spent").ends_in_s is not None
        await asyncio.sleep(600.0)
        await service.submit(behind, replace(spent, name="next"), other)
        status = service.controller.status("acme", "spent")
        assert "used up" in status.waits_for and status.ends_in_s is None
        assert service.controller.status("spare", "behind").starts_in_s is None
        service.controller.tenants_changed([replace(tenant, quotas=UNLIMITED)])
        await asyncio.sleep(5.0)
        assert service.controller.status("acme", "spent").ends_in_s is not None
        assert service.controller.status("spare", "behind").starts_in_s is not None

    Service(tmp_path, script, max_running_jobs=1)


def test_a_job_whose_tool_hangs_has_no_end_in_sight(tmp_path: Path) -> None:
    spec = job(steps=3, env={"tool_s": 1e5}, eval_prompts=0)

    async def script(service: Service) -> None:
        await service.submit(spec)
        await service.until(lambda: bool(service.recorder.notices))
        status = service.controller.status("acme", "say-y")
        assert status.waits_for and status.ends_in_s is None

    Service(tmp_path, script)


def test_jobs_that_are_not_active_have_nothing_to_say(tmp_path: Path) -> None:
    async def script(service: Service) -> None:
        assert service.controller.status("acme", "nobody") == JobStatus()
        await service.submit(job())
        await service.controller.pause("acme", "say-y")
        assert service.controller.status("acme", "say-y") == JobStatus()

    Service(tmp_path, script)
