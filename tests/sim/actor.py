"""Tenants, operators and fate in a simulation: they do what a plan says, and see to it that every
job ends. What must hold at once after an act is checked here; the rest in `checks.py`."""

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from marlaas.errors import Conflict, InvalidRequest, NotFound
from marlaas.loop.controller import Controller
from marlaas.loop.usage import UNLIMITED
from marlaas.types import Fork, JobSpec, JobState, Tenant

if TYPE_CHECKING:
    from tests.sim.simulation import Act, Outcome

MAX_POLL_S = 5000.0
FLOOD = 12
"""Jobs that come at once."""


class Actor:
    """Plays the acts that are left, then resumes or cancels until every job has ended."""

    def __init__(self, controller: Controller, outcome: "Outcome", acts: "deque[Act]") -> None:
        self._controller = controller
        self._outcome = outcome
        self._acts = acts

    async def play(self) -> None:
        """Play to the end, then stop the controller."""
        async with asyncio.TaskGroup() as beside:
            while self._acts:
                act = self._acts[0]
                await asyncio.sleep(act.after_s)
                doing = beside.create_task(self._do(act))
                if act.is_awaited:
                    await doing
                self._acts.popleft()
        await self._see_to_the_end()
        self._controller.stop()

    async def _do(self, act: "Act") -> None:
        """Do one act; what is refused, is refused with one of the errors that callers expect."""
        with suppress(Conflict, NotFound, InvalidRequest):
            await getattr(self, act.verb)(act)
        self.check_now()

    async def _see_to_the_end(self) -> None:
        wait_s = 1.0
        while left := [spec for spec in self._specs if not self._state(spec).is_terminal]:
            for spec in left:
                if self._state(spec) is JobState.PAUSED:
                    await self._resume_or_cancel(spec)
            self.check_now()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_POLL_S)

    async def _resume_or_cancel(self, spec: JobSpec) -> None:
        try:
            await self._controller.resume(spec.tenant, spec.name)
        except Conflict:
            await self._controller.cancel(spec.tenant, spec.name)

    # Verbs --------------------------------------------------------------------------------

    async def pause(self, act: "Act") -> None:
        spec = self._pick(act)
        stored = await self._controller.pause(spec.tenant, spec.name)
        assert stored.state is JobState.PAUSED
        self.check_holds_nothing(spec)

    async def resume(self, act: "Act") -> None:
        spec = self._pick(act)
        stored = await self._controller.resume(spec.tenant, spec.name)
        assert stored.state.is_active

    async def cancel(self, act: "Act") -> None:
        spec = self._pick(act)
        stored = await self._controller.cancel(spec.tenant, spec.name)
        assert stored.state is JobState.CANCELLED
        self.check_holds_nothing(spec)

    async def delete(self, act: "Act") -> None:
        spec = self._pick(act)
        await self._controller.delete(spec.tenant, spec.name)
        self._specs.remove(spec)

    async def flood(self, act: "Act") -> None:
        pattern = self._pick(act)
        for index in range(FLOOD):
            name = f"flood-{act.target}-{act.number}-{index}"
            await self._submit(
                replace(pattern, name=name, steps=1, fork=None, eval_prompts=1, eval_every=0)
            )

    async def fork(self, act: "Act") -> None:
        source = self._pick(act)
        step = self._outcome.store.job(source.tenant, source.name).step
        with_optimizer = act.number % 2 == 0
        version = step if with_optimizer or act.number % 3 == 0 else 0
        fork = Fork(job=source.name, version=version, with_optimizer=with_optimizer)
        name = f"fork-{act.target}-{act.number}"
        await self._submit(replace(source, name=name, fork=fork, max_job_tokens=0, max_device_s=0))

    async def evaluate(self, act: "Act") -> None:
        spec = self._pick(act)
        step = self._outcome.store.job(spec.tenant, spec.name).step
        version = 0 if act.number % 2 else max(0, step - act.number // 2)
        await self._controller.evaluate(spec.tenant, spec.name, version)

    async def quota(self, act: "Act") -> None:
        tenant_id = self._pick(act).tenant
        quotas = replace(UNLIMITED, max_running_jobs=1 + act.number % 3 if act.number else None)
        tenant = Tenant(tenant_id=tenant_id, weight=0.5 + act.number, quotas=quotas)
        self._outcome.tenants[tenant_id] = tenant
        self._controller.tenants_changed([tenant])

    async def lose_worker(self, act: "Act") -> None:
        workers = self._outcome.workers
        workers[act.target % len(workers)].kill()

    # Checks -------------------------------------------------------------------------------

    def check_now(self) -> None:
        """No tenant runs more jobs than its quota, nor the server more than its limit; all that
        wait have a place, and say why they wait."""
        roster = self._controller._roster
        staying = [seat for seat in roster.running() if seat.wish is None]
        assert roster.num_running == len(roster.running()) <= roster.max_running
        for tenant in self._outcome.tenants.values():
            quota = tenant.quotas.max_running_jobs
            count = sum(seat.spec.tenant == tenant.tenant_id for seat in staying)
            assert quota is None or count <= quota
        places = []
        for seat in roster.queued():
            status = self._controller.status(seat.spec.tenant, seat.spec.name)
            assert status.waits_for
            places.append(status.place)
        assert places == list(range(1, len(places) + 1))

    def check_holds_nothing(self, spec: JobSpec) -> None:
        """No worker holds anything of a job, and no queue knows it."""
        if self._controller._judging.is_visited(spec.job_id):
            return  # a version of it is being judged, as was asked for
        for worker in self._outcome.workers:
            assert spec.policy_id not in worker.policies
            assert not any(one.startswith(f"{spec.policy_id}/") for one in worker.kept_sequences)
        assert spec.job_id not in self._controller._jobs
        assert spec.job_id not in self._controller._placement._assigned

    # --------------------------------------------------------------------------------------

    @property
    def _specs(self) -> list[JobSpec]:
        return self._outcome.specs

    def _pick(self, act: "Act") -> JobSpec:
        if not self._specs:
            raise NotFound("every job was deleted")
        return self._specs[act.target % len(self._specs)]

    def _state(self, spec: JobSpec) -> JobState:
        return self._outcome.store.job(spec.tenant, spec.name).state

    async def _submit(self, spec: JobSpec) -> None:
        await self._controller.submit(spec)
        if spec not in self._specs:
            self._specs.append(spec)
