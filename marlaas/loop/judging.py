"""Evaluations that somebody asked for, beside those that a job's schedule brings.

    ask ─► the job runs:  its version is held, brought to life, judged while training goes on
        └► it does not:   a visit: the version alone is loaded, judged and unloaded again

A job that is visited does not start meanwhile: one policy is never twice on the workers.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress

from marlaas.errors import (
    Conflict,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
    WorkerLost,
)
from marlaas.loop.job import Job
from marlaas.loop.jobs import Roster
from marlaas.loop.usage import Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store, StoredJob
from marlaas.types import EventKind, JobId, JobSpec, TenantId

RETRY_S = 10.0
"""When a tenant that has too much judged may ask again."""


class Judging:
    """Takes requests between `begin` and `finish`; `start` and `visit` are the controller's.

    `start` puts a version among those that a running job judges, `visit` is the life of a visit.
    """

    def __init__(
        self,
        store: AsyncStore,
        roster: Roster,
        jobs: Mapping[JobId, Job],
        tenants: Tenants,
        *,
        start: Callable[[Job, int], None],
        visit: Callable[[JobSpec, int], Coroutine[None, None, None]],
        on_visit_over: Callable[[], None],
    ) -> None:
        self._store = store
        self._roster = roster
        self._jobs = jobs
        self._tenants = tenants
        self._start = start
        self._visit = visit
        self._on_visit_over = on_visit_over
        self._tasks: asyncio.TaskGroup | None = None
        self._visits: dict[JobId, int] = {}
        """Versions that are judged by visits."""

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def finish(self) -> None:
        self._tasks = None

    def is_visited(self, job_id: JobId) -> bool:
        """Return whether a version of a job that does not run is being judged."""
        return job_id in self._visits

    def visited_of(self, tenant_id: TenantId) -> list[JobId]:
        """Return the jobs of a tenant that do not run and of which a version is being judged."""
        return [job_id for job_id in self._visits if job_id.startswith(f"{tenant_id}/")]

    async def ask(self, tenant_id: TenantId, name: str, version: int) -> None:
        """See `Controller.evaluate`."""
        stored = await self._store.call(Store.job, tenant_id, name)
        if stored.spec.eval_prompts == 0:
            raise InvalidRequest(f"job {name!r} has no held-out prompts: eval_prompts is 0")
        judged = await self._store.call(Store.evaluations, tenant_id, name)
        if any(record.version == version for record in judged):
            return
        job = self._jobs.get(stored.spec.job_id)
        if self.is_visited(stored.spec.job_id):
            if self._visits[stored.spec.job_id] != version:
                raise Conflict(f"another version of job {name!r} is being judged; ask again later")
        elif job is not None:
            await self._judge_beside(job, version)
        else:
            await self._judge_apart(stored, version)

    async def _judge_beside(self, job: Job, version: int) -> None:
        if version in job.judged or version in job.evaluations:
            return
        job.policy.hold(version)  # from here on its adapter is not pruned
        try:
            await self._check_kept(job.spec, version)
            if not job.is_open:
                raise _in_between(job.spec)
        except BaseException:
            job.policy.let_go(version)
            raise
        job.spawn_evaluation(self._bring_and_judge(job, version))

    async def _bring_and_judge(self, job: Job, version: int) -> None:
        """Judge a version that is held, once it is live. A request that fails, fails alone."""
        try:
            await job.policy.bring(version)
            if version not in job.judged and version not in job.evaluations:
                self._start(job, version)
        except WorkerLost:
            raise
        except MarlaasError as error:
            await self.say_not_judged(job.spec, version, str(error))
        finally:
            job.policy.let_go(version)

    async def say_not_judged(self, spec: JobSpec, version: int, why: str) -> None:
        """Tell the tenant that a request came to nothing."""
        data = {"text": f"version {version} was not judged: {why}"}
        with suppress(StoreUnavailable):
            await self._store.call(Store.add_event, spec.tenant, spec.name, EventKind.LOG, data)

    async def _judge_apart(self, stored: StoredJob, version: int) -> None:
        spec = stored.spec
        seat = self._roster.get(spec.job_id)
        if seat is not None and seat.end is not None:
            raise _in_between(spec)
        self._check_places(spec.tenant)
        self._roster.block(spec.job_id)
        self._visits[spec.job_id] = version
        try:
            await self._check_kept(spec, version)
            if self._tasks is None:
                raise Conflict("the server does not run jobs now")
        except BaseException:
            self._end_visit(spec)
            raise
        self._tasks.create_task(self._run_visit(spec, version))

    def _check_places(self, tenant_id: TenantId) -> None:
        """Hold visits to the numbers that jobs are held to: they take as much of a worker.

        Raises:
            QuotaExceeded: as many versions are being judged as may be.
        """
        quota, most = self._tenants.quotas(tenant_id).max_running_jobs, self._roster.max_running
        if quota is not None and len(self.visited_of(tenant_id)) >= max(1, quota):
            raise QuotaExceeded(f"the tenant's quota is {quota} jobs, judged ones too", RETRY_S)
        if len(self._visits) >= most:
            raise QuotaExceeded(f"{most} versions are being judged, as many as may be", RETRY_S)

    async def _run_visit(self, spec: JobSpec, version: int) -> None:
        try:
            await self._visit(spec, version)
        finally:
            self._end_visit(spec)

    def _end_visit(self, spec: JobSpec) -> None:
        del self._visits[spec.job_id]
        self._roster.unblock(spec.job_id)
        self._on_visit_over()

    async def _check_kept(self, spec: JobSpec, version: int) -> None:
        rows = await self._store.call(Store.versions, spec.tenant, spec.name)
        kept = [row.version for row in rows if row.has_adapter]
        if version not in kept:
            raise NotFound(f"version {version} of {spec.name!r} is not kept; kept are {kept}")


def _in_between(spec: JobSpec) -> Conflict:
    return Conflict(f"job {spec.name!r} is just starting or ending; ask again in a moment")
