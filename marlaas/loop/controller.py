"""The conductor: three stages that never wait for each other, for every job of every tenant.

    store ──► admit ──► ROLLOUT + ENVIRONMENT ──► buffer ──► TRAIN ──► commit ──► publish ──┐
                ▲                                                                          │
                └──────────────────── new version, free slots ─────────────────────────────┘

    | stage   | takes                        | gives                        | may wait for       |
    |---------|------------------------------|------------------------------|--------------------|
    | admit   | jobs that could open a group | a group plan                 | room on a worker   |
    | rollout | a group plan                 | a finished group, stored     | device and tools   |
    | train   | P groups within the bound    | the outcome of a step        | groups of that job |
    | publish | an outcome                   | a durable, then live version | the store          |

- A job moves when *its* event fires: a turn returned, a group finished, a version published. Nobody
  polls, and no stage waits for another job's stage.
- Durable before visible: a group is stored before it is trained on, a step before it is published.
- Which jobs run at all is `loop/jobs.py`'s to say; what a tenant has used up, `loop/usage.py`'s.
- Four fates: a bad request fails its job, a bad rollout is recorded on its trajectory, a lost
  worker's work is done again, a broken invariant ends the process, and the store brings all back.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Concatenate, ParamSpec, TypeVar

from marlaas.envs.base import Family
from marlaas.envs.latency import with_latency
from marlaas.errors import (
    Conflict,
    EnvironmentFailure,
    FailureKind,
    InvalidRequest,
    MarlaasError,
    WorkerLost,
)
from marlaas.loop import algorithms
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.evaluation import Evaluation, is_due
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.job import Job
from marlaas.loop.jobs import Lifecycle, Request, Roster, first_message, job_id_of
from marlaas.loop.judging import Judging
from marlaas.loop.patience import PatientStore
from marlaas.loop.policies import Home, Placement, Policy, Station, VisitingPolicy, Worker
from marlaas.loop.rollout import ChatTokenizer, GroupPlan, GroupRollout
from marlaas.loop.status import StatusBoard
from marlaas.loop.training import Outcome, train
from marlaas.loop.usage import Tenants, sampled_tokens, trained_tokens, why_full
from marlaas.loop.verdicts import had_verdict
from marlaas.loop.watchdog import BOUNDS_S, Stage, Watchdog, WatchedFamily
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store, StoredJob
from marlaas.types import (
    EventKind,
    Generator,
    Group,
    JobId,
    JobObserver,
    JobSpec,
    JobState,
    JobStatus,
    Notice,
    StepRecord,
    Tenant,
    TenantId,
    Usage,
)

StageListener = Callable[[JobSpec, str, str, float, str], None]
"""Hears of every stage of a job that is over: the job, the stage, its worker, when it began on the
event loop's clock, and what it was in words."""

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_LOST_STARTS = 2
"""Times that a job's sandbox may die while it starts, as any process may, before the job fails."""

MAX_ATTEMPTS = 6
"""Attempts at one step, each of which loses the worker, before its job is given up: the step may be
what ends the workers, and they have other tenants."""


class Mode(StrEnum):
    """How jobs share the machine."""

    ASYNC = "async"
    """All at once; sampling and training overlap within `max_staleness`."""
    LOCKSTEP = "lockstep"
    """The old way, for comparison: one job after another; sample, wait for all, train, publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """The operator's settings of the loop."""

    weights: Mapping[TenantId, float] = field(default_factory=dict)
    """Share of the machine per tenant, relative to the others; 1 if not named."""
    gap_bound: float = 1e-3
    """Most |train - sampling logprob| under one version; in fp32 measured gaps lie below 1e-4."""
    max_running_jobs: int = 64
    """Jobs that have a policy on a worker at one time; the others are queued."""
    bounds_s: Mapping[Stage, float] = field(default_factory=lambda: BOUNDS_S)
    """How long one wait of a stage may take before the watchdog reports it."""
    watch_every_s: float = 1.0


class Controller:
    """Runs jobs: constructed -> `run` (to the end of all) or `serve` (until `stop`) -> over.

    A controller on a store with unfinished jobs goes on with them. Verbs may be called at any time
    and may be repeated.

        controller = Controller(store, workers, tokenizer, make_family=make_family)
        await controller.submit(spec)
        await controller.run()
        store.job("acme", "sums").state             # JobState.DONE
    """

    def __init__(  # noqa: PLR0913, what it is made of
        self,
        store: AsyncStore,
        workers: Sequence[Worker],
        tokenizer: ChatTokenizer,
        *,
        make_family: Callable[[JobSpec], Family],
        observer: JobObserver | None = None,
        on_stage: StageListener | None = None,
        mode: Mode = Mode.ASYNC,
        settings: LoopSettings | None = None,
    ) -> None:
        self._settings = settings or LoopSettings()
        self._store = PatientStore(store)
        self._tenants = Tenants(self._settings.weights)
        self._wake = asyncio.Event()
        self._placement = Placement(workers, self._tenants.weights, on_room=self._note_room)
        self._tokenizer = tokenizer
        self._make_family = make_family
        self._observers = [observer] if observer else []
        self._on_stage = on_stage
        self._mode = mode
        self._jobs: dict[JobId, Job] = {}
        """Those that have a place, and those that are visited."""
        self._watchdog = Watchdog(
            self._report,
            bounds_s=self._settings.bounds_s,
            period_s=self._settings.watch_every_s,
            may_rest=self._may_rest,
            on_over=self._note_stage if on_stage else None,
        )
        max_running = 1 if mode is Mode.LOCKSTEP else self._settings.max_running_jobs
        self._roster = Roster(max_running, self._tenants)
        self._lifecycle = Lifecycle(
            self._store, self._roster, self._tenants, live=self._live, tell=self._tell_state
        )
        self._judging = Judging(
            store,
            self._roster,
            self._jobs,
            self._tenants,
            start=self._start_evaluation,
            visit=self._visit,
            on_visit_over=self._lifecycle.start_waiting,
        )
        self._board = StatusBoard(
            self._roster, self._jobs, self._placement, self._tenants, self._watchdog
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._is_stopping = False

    @property
    def placement(self) -> Placement:
        """The stations, for guests that compete with jobs (see `loop/serving.py`)."""
        return self._placement

    @property
    def tenants(self) -> Tenants:
        """Quotas in force and what was used today, for guests too."""
        return self._tenants

    # Verbs, see `loop/jobs.py` --------------------------------------------------------------

    async def submit(
        self,
        spec: JobSpec,
        *,
        idempotency_key: str = "",
        body_digest: str = "",
        owner: Tenant | None = None,
    ) -> StoredJob:
        """Accept a job; it starts as soon as there is a place for it.

        `owner` is the tenant as it was when the request came, without a service none; `body_digest`
        is of the request, for `Store.spec_of_key`.

        Raises:
            NotFound: `owner` was purged meanwhile.
            InvalidRequest: its algorithm or environment cannot be made, its trajectories may become
                longer than memory trains, or it is forked from something that is not there.
            Conflict: the tenant has another job of that name, or used the key for another one.
            QuotaExceeded: the tenant has too many queued jobs.
        """
        algorithms.resolve(spec.algorithm)
        family = self._make_family(spec)
        if problem := self._placement.length_problem(spec, family.max_turns):
            raise InvalidRequest(problem)
        request = Request(idempotency_key=idempotency_key, body_digest=body_digest, owner=owner)
        return await self._lifecycle.submit(spec, request)

    async def pause(
        self, tenant_id: TenantId, name: str, reason: str = "paused by the tenant"
    ) -> StoredJob:
        """Stop a job so that it can be resumed; return once it holds nothing on a worker."""
        return await self._lifecycle.pause(tenant_id, name, reason)

    async def resume(self, tenant_id: TenantId, name: str) -> StoredJob:
        """Queue a job again that was paused, held or failed."""
        return await self._lifecycle.resume(tenant_id, name)

    async def cancel(
        self, tenant_id: TenantId, name: str, reason: str = "cancelled by the tenant"
    ) -> StoredJob:
        """Stop a job for good; return once it holds nothing on a worker."""
        return await self._lifecycle.cancel(tenant_id, name, reason)

    async def delete(self, tenant_id: TenantId, name: str) -> None:
        """Delete all that is stored of a job that is neither active nor being judged."""
        if self._judging.is_visited(job_id_of(tenant_id, name)):
            raise Conflict(f"a version of job {name!r} is being judged; ask again later")
        await self._lifecycle.delete(tenant_id, name)

    async def purge_tenant(self, tenant_id: TenantId) -> None:
        """Delete a tenant with everything of it.

        Raises:
            NotFound: there is none of that name.
            Conflict: a job of it is queued or running, or is being judged.
        """
        if visited := self._judging.visited_of(tenant_id):
            raise Conflict(f"a version of {visited[0]!r} is being judged; ask again later")
        await self._store.inner.call(Store.purge_tenant, tenant_id)
        self._tenants.forget_use(tenant_id)

    async def evaluate(self, tenant_id: TenantId, name: str, version: int) -> None:
        """Begin to judge a kept version, unless it was or is being judged; training goes on.

        Raises:
            NotFound: no such job, or the version is not kept.
            Conflict: the job is just starting or ending, or the server does not run.
            InvalidRequest: the job has no held-out prompts.
            QuotaExceeded: too many jobs that do not run are being judged.
        """
        await self._judging.ask(tenant_id, name, version)

    def status(self, tenant_id: TenantId, name: str) -> JobStatus:
        """Return what a job waits for, its place, and when it is expected to start and end."""
        return self._board.status(job_id_of(tenant_id, name))

    def tenants_changed(self, tenants: Iterable[Tenant]) -> None:
        """Let new weights and quotas of these tenants apply at once."""
        changed = list(tenants)
        self._tenants.change(changed)
        for station in self._placement.stations:
            station.queue.reweigh()
        self._lifecycle.quotas_changed([tenant.tenant_id for tenant in changed])
        self._wake_all()

    @property
    def lag_s(self) -> float:
        """How long the event loop was held up when that was last measured."""
        return self._watchdog.lag_s

    # Running ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run every unfinished job of the store to its end, or until `stop`."""
        await self._run(self._lifecycle.idle)

    async def serve(self) -> None:
        """Run jobs as they come, until `stop`."""
        await self._run(self._lifecycle.stopped)

    def stop(self) -> None:
        """Let running steps end and `run` or `serve` return; nothing that was finished is lost."""
        self._is_stopping = True
        self._store.give_up()
        self._lifecycle.stop()
        for job in self._jobs.values():
            job.buffer.close()
            for evaluation in job.judging:
                evaluation.cancel()

    async def _run(self, is_over: Callable[[], Awaitable[None]]) -> None:
        """Run stages and jobs until `is_over` returns and all that still runs has ended."""
        try:
            async with asyncio.TaskGroup() as stages:
                helpers = [
                    stages.create_task(self._admit()),
                    stages.create_task(self._watchdog.run()),
                ]
                async with asyncio.TaskGroup() as self._tasks:
                    self._judging.begin(self._tasks)
                    await self._lifecycle.begin(self._tasks)
                    await is_over()
                    self._lifecycle.finish()
                    self._judging.finish()
                for helper in helpers:
                    helper.cancel()
        finally:
            self._tasks = None
            self._tenants.stop()

    # Stages -----------------------------------------------------------------------------------

    async def _admit(self) -> None:
        """While a worker has room, open a group of the job whose turn it is there."""
        while not self._is_stopping:
            self._wake.clear()
            for station in self._placement.stations:
                while station.load.has_room and (job_id := station.queue.next()) is not None:
                    if job_id in station.guests:
                        station.guests[job_id]()
                    else:
                        self._open_group(self._jobs[job_id], station)
            await self._wake.wait()

    async def _roll_out(
        self, job: Job, plan: GroupPlan, generator: Generator, estimate_s: float
    ) -> None:
        """Sample a group, hand it to the buffer or its evaluation, settle what it cost."""
        rollout = GroupRollout(job.spec, job.family, self._tokenizer, plan)
        job.rollouts[plan] = rollout
        try:
            await self._note_open(job, plan)
            group = await rollout.run(generator)
        except WorkerLost:
            await job.policy.recover()
            self._let_go(job, [plan.index] if plan.is_training else [])
            job.give_back(plan)
        else:
            cost_s = job.policy.station.settle(
                job.spec, group, estimate_s, is_training=plan.is_training
            )
            job.meter.add_device_s(cost_s)
            await self._hand_over(job, plan, group)
        finally:
            del job.rollouts[plan]
        self._ready(job)

    async def _train(self, job: Job) -> None:
        """Take groups within the staleness bound, make a step of them, publish it; to the last."""
        while not self._is_stopping:
            if self._waits_for_verdicts(job):
                await job.all_judged()
            if job.is_trained:
                return
            groups = await job.buffer.take(deadline_s=job.spec.straggler_deadline_s, cut=job.cut)
            if groups is None:
                return
            record = await self._step(job, groups)
            await self._publish(job, record)
            job.check_progress(record, groups)
            self._check_caps(job)

    async def _publish(self, job: Job, record: StepRecord) -> None:
        """Let new rollouts, and an evaluation if one is due, use a committed step."""
        with self._watchdog.watch(job.spec, Stage.PUBLISH, f"version {record.step} goes live"):
            await job.policy.publish(record.step)
        job.buffer.publish(record.step)
        job.note_step()
        job.policy.station.expect(job.spec, job.least_s)
        self._ready(job)
        self._tell(lambda observer: observer.step_done(job.spec, record))
        if is_due(job.spec, record.step):
            self._start_evaluation(job, record.step)
        job.spawn_tidying(self._tidy(job))

    async def _tidy(self, job: Job) -> None:
        """Keep the newest adapter as a folder and free what only older versions needed.

        The next step is computed meanwhile, and committed afterwards.
        """
        await job.policy.keep_adapter()
        await job.policy.retire(job.buffer.oldest_needed_version())
        await job.policy.station.learn_rates()
        await self._add_usage(job)
        await self._check_storage(job)

    async def _evaluate(self, job: Job, evaluation: Evaluation) -> None:
        """Judge a version on held-out prompts while training goes on."""
        try:
            await evaluation.done.wait()
            record = evaluation.record(job.elapsed_s)
            usage = evaluation.usage()
            await self._record(job.spec, Store.add_evaluation, record, usage=usage)
            self._tenants.use(job.spec.tenant, tokens=usage.evaluated_tokens)
            job.note(record)
        finally:
            del job.evaluations[evaluation.version]
            job.policy.let_go(evaluation.version)
        self._tell(lambda observer: observer.eval_done(job.spec, record))

    # The life of a job ------------------------------------------------------------------------

    async def _live(self, spec: JobSpec) -> bool:
        """Run a job that has a place; return False if it was stopped before its end."""
        if self._is_stopping:
            return False
        if self._mode is Mode.LOCKSTEP:
            spec = replace(spec, max_staleness=0)
        with self._watchdog.running(spec):
            await self._record(spec, Store.set_job_state, JobState.RUNNING)
            self._tell_state(spec, JobState.RUNNING, "")
            return await self._train_to_its_end(spec)

    async def _train_to_its_end(self, spec: JobSpec) -> bool:
        async with asyncio.TaskGroup() as tasks:
            policy = Policy(
                spec, self._placement, self._store,
                watch=self._watchdog.watch, on_room=self._note_room,
            )  # fmt: skip
            job = self._place(spec, tasks, policy)
            try:
                await self._open(job)
                await self._train(job)
                await self._check_verdicts(job)
                await job.all_tidied()
                await self._judge_last(job)
                return job.is_trained and not await self._missing_evaluations(job)
            finally:
                if (seat := self._roster.get(spec.job_id)) is not None:
                    seat.is_closing = True
                await self._close(job)

    def _place(self, spec: JobSpec, tasks: asyncio.TaskGroup, policy: Policy) -> Job:
        """Give a job its environment and a station."""
        family = with_latency(self._make_family(spec), spec.latency, spec.seed)
        job = Job(spec, WatchedFamily(family, spec, self._watchdog.watch), policy, tasks)
        self._placement.assign(spec, TokenCounts.guess(spec, family.max_turns))
        self._jobs[spec.job_id] = job
        return job

    async def _open(self, job: Job) -> None:
        """Set a job where the store left it: environment up, policy live, evaluations under way."""
        await job.restore(self._store)
        await self._tenants.learn_today(self._store, job.spec.tenant)
        for group in job.buffer.finished:
            self._note_group(job, group)
        await _start(job.family)
        missing = await self._missing_evaluations(job)
        for version in missing:
            job.policy.hold(version)
        await job.policy.start(job.buffer.oldest_needed_version())
        job.is_open = True
        for version in missing:
            job.policy.let_go(version)
            self._start_evaluation(job, version)
        self._ready(job)

    async def _check_verdicts(self, job: Job) -> None:
        """Refuse to call a job done that made all its steps and never had a verdict.

        Raises:
            EnvironmentFailure: it is one.
        """
        if job.buffer.version < job.spec.steps or job.verdicts.has_trained:
            return
        tenant_id, name = job.spec.tenant, job.spec.name
        records = await self._store.call(Store.steps, tenant_id, name)
        if any(had_verdict(record) for record in records):
            return
        rows = [
            await self._store.call(Store.group, tenant_id, name, index)
            for index in records[-1].group_indices
        ]
        raise job.without_verdict("in any step", [row.group for row in rows if row.group])

    async def _judge_last(self, job: Job) -> None:
        """Wait for all evaluations; a job that stopped early has its last version judged too."""
        if job.is_trained:
            job.cancel_training_rollouts()
            for version in await self._missing_evaluations(job):
                self._start_evaluation(job, version)
        await job.all_judged()

    async def _close(self, job: Job) -> None:
        """Free everything that a job holds outside the store."""
        job.is_open = False
        job.policy.station.queue.forget(job.spec)
        # Last in, first out, each whatever became of the one before: sandboxes outlive no job.
        async with AsyncExitStack() as closing:
            closing.callback(self._leave, job)
            closing.push_async_callback(self._add_usage, job)
            closing.push_async_callback(lambda: to_its_end(job.family.stop()))
            closing.push_async_callback(job.policy.remove)
            closing.callback(self._ready_tenant, job.spec.tenant)
            closing.callback(self._tenants.let_go_of_all, job.spec)
            await job.cancel_tasks()

    def _leave(self, job: Job) -> None:
        self._placement.release(job.spec)
        del self._jobs[job.spec.job_id]

    async def _visit(self, spec: JobSpec, version: int) -> None:
        """Load one version of a job that does not run, judge it, unload it. What goes wrong is
        told to the tenant."""
        policy = VisitingPolicy(
            spec, self._placement, self._store, version,
            watch=self._watchdog.watch, on_room=self._note_room,
        )  # fmt: skip
        try:
            with self._watchdog.running(spec):
                await self._judge_to_its_end(spec, policy)
        except* MarlaasError as errors:
            await self._judging.say_not_judged(spec, version, first_message(errors))

    async def _judge_to_its_end(self, spec: JobSpec, policy: Policy) -> None:
        async with asyncio.TaskGroup() as tasks:
            job = self._place(spec, tasks, policy)
            try:
                await job.restore(self._store)
                await self._tenants.learn_today(self._store, spec.tenant)
                job.buffer.close()
                await _start(job.family)
                await job.policy.start(policy.version)
                job.is_open = True
                if policy.version not in job.judged:
                    self._start_evaluation(job, policy.version)
                await job.all_judged()
            finally:
                await self._close(job)

    async def _missing_evaluations(self, job: Job) -> set[int]:
        """Return the versions that are due to be judged, are not about to be, and can be."""
        rows = await self._store.call(Store.versions, job.spec.tenant, job.spec.name)
        spec, newest = job.spec, job.buffer.version
        kept = {row.version for row in rows if row.has_adapter}
        due = {version for version in kept | {0, newest} if is_due(spec, version)}
        if job.is_satisfied:
            due.add(newest)
        return due - job.judged - job.evaluations.keys()

    def _waits_for_verdicts(self, job: Job) -> bool:
        """Return whether evaluations come before the next step: in the old way, and where a seed
        must decide at which step a job is good enough to stop."""
        decides = job.spec.is_seeded and job.spec.stop_at_success > 0
        return decides or self._mode is Mode.LOCKSTEP

    # Small parts of the stages ----------------------------------------------------------------

    def _ready(self, job: Job) -> None:
        """A job may be able to open a group: let it compete."""
        if job.is_open:
            job.policy.station.queue.add(job.spec)
            self._wake.set()

    def _open_group(self, job: Job, station: Station) -> None:
        """Open what a job opens next and charge it; one with nothing to open leaves the queue, as
        does one whose tenant has no room for it today.

        Slot, charge and places are taken at once, so that nothing else can take them meanwhile;
        the store hears of it as the rollout's first act.
        """
        tenant_id = job.spec.tenant
        has_no_room = bool(self._tenants.why_spent(tenant_id, job.next_tokens))
        if has_no_room:
            self._tenants.at_day_end(self._wake_all)
        can_open = job.is_open and not self._tenants.why_spent(tenant_id)
        # Held-out prompts are few: they need no room, only a day that is not used up.
        plan = job.next_plan(may_train=not has_no_room) if can_open else None
        if plan is None:
            station.queue.discard(job.spec)
            return
        if plan.is_training:
            may_take = job.meter.group_tokens(job.family.max_turns)
            self._tenants.hold_sampling(job.spec, plan.index, may_take)
        estimate_s = station.charge(job.spec, plan.size)
        generator = job.policy.generator(plan.size)  # its places are reserved from here on
        task = job.spawn_rollout(plan, self._roll_out(job, plan, generator, estimate_s))
        task.add_done_callback(lambda _: generator.close())

    async def _note_open(self, job: Job, plan: GroupPlan) -> None:
        """Record a training group before it is sampled."""
        if plan.is_training:
            await self._record(job.spec, Store.open_group, plan.index, version=plan.version)

    async def _hand_over(self, job: Job, plan: GroupPlan, group: Group) -> None:
        """Give a finished group to whoever asked for it; training groups are stored first.

        What environments failed of goes to the tenant's log.
        """
        if plan.is_training:
            await self._record(job.spec, Store.finish_group, group)
        if failures := job.verdicts.add(group, is_training=plan.is_training):
            data = {"text": "\n".join(failures)}
            await self._record(job.spec, Store.add_event, EventKind.LOG, data)
        job.verdicts.check_timeouts()
        if not plan.is_training:
            job.judge(group)
            return
        job.buffer.finish(group)
        job.note_tools(group)
        self._tell(lambda observer: observer.group_done(job.spec, group))
        self._note_group(job, group)
        self._count(job, sampled_tokens(group))
        self._ready_tenant(job.spec.tenant)
        self._check_caps(job)

    async def _step(self, job: Job, groups: list[Group]) -> StepRecord:
        """Train on groups until a worker lives through it, and make the step durable.

        Raises:
            WorkerLost: none does; the step itself may be what ends them.
        """
        for attempt in range(MAX_ATTEMPTS):
            await asyncio.sleep(job.wait_before_attempt_s(attempt))
            home = job.policy.home
            try:
                with self._watchdog.watch(job.spec, Stage.TRAIN, f"{home[0]} makes a step"):
                    outcome = await train(
                        job.policy, job.spec, job.algorithm, groups,
                        gap_bound=self._settings.gap_bound,
                    )  # fmt: skip
                await job.all_tidied()
                return await self._commit(job, groups, outcome, home)
            except WorkerLost:
                await job.policy.recover()
        step = job.policy.version + 1
        raise WorkerLost(f"workers were lost in all of {MAX_ATTEMPTS} attempts at step {step}")

    async def _commit(
        self, job: Job, groups: list[Group], outcome: Outcome, home: Home
    ) -> StepRecord:
        """Make a step durable in one transaction, before anyone can see it.

        Raises:
            WorkerLost: the version that it made is not at `home` any more; nothing was written.
        """
        record = StepRecord(
            step=outcome.result.version,
            group_indices=tuple(group.index for group in groups),
            adapter_hash=outcome.result.adapter_hash,
            is_vetoed=outcome.is_vetoed,
            is_empty=outcome.is_empty,
            metrics=outcome.metrics,
            elapsed_s=job.elapsed_s,
        )
        with self._watchdog.watch(job.spec, Stage.STORE, "a step is written"):
            await self._store.call_while(
                lambda: job.policy.check_home(home),
                Store.commit_step, job.spec.tenant, job.spec.name, record, dropped=outcome.dropped,
            )  # fmt: skip
        self._count(job, trained_tokens(groups, outcome.dropped))
        self._let_go(job, record.group_indices)
        return record

    def _start_evaluation(self, job: Job, version: int) -> None:
        if self._is_stopping:
            return
        job.policy.hold(version)
        evaluation = Evaluation(version, job.spec.eval_prompts)
        job.add_evaluation(evaluation)
        job.spawn_evaluation(self._evaluate(job, evaluation))
        self._ready(job)

    def _count(self, job: Job, tokens: int) -> None:
        """Count tokens that are in the store."""
        job.meter.add_tokens(tokens)
        self._tenants.use(job.spec.tenant, tokens=tokens)

    def _note_group(self, job: Job, group: Group) -> None:
        """A group waits for its step: what that will train on is known, and spoken for."""
        to_train = trained_tokens([group], {})
        job.meter.note_group(sampled_tokens(group) + to_train)
        self._tenants.hold_training(job.spec, group.index, to_train)

    def _let_go(self, job: Job, indices: Iterable[int]) -> None:
        """Groups take no more tokens than are counted: others may have room now."""
        self._tenants.let_go(job.spec, indices)
        self._ready_tenant(job.spec.tenant)

    def _ready_tenant(self, tenant_id: TenantId) -> None:
        """What a tenant's groups in flight hold has changed: let its jobs compete."""
        if self._tenants.quotas(tenant_id).tokens_a_day is not None:
            for job in self._jobs.values():
                if job.spec.tenant == tenant_id:
                    self._ready(job)

    def _may_rest(self, spec: JobSpec) -> bool:
        """Return whether a job stands still because its tenant has no room for it today."""
        job = self._jobs.get(spec.job_id)
        return bool(self._tenants.why_spent(spec.tenant, job.next_tokens if job else 0))

    def _check_caps(self, job: Job) -> None:
        """Pause a job that has reached its cap and is not at its end."""
        cap = job.meter.why_capped()
        if cap and not job.is_trained:
            self._lifecycle.stop_soon(job.spec, JobState.PAUSED, cap)

    async def _check_storage(self, job: Job) -> None:
        """Pause a job that is not at its end and whose tenant has no storage left."""
        limit = self._tenants.quotas(job.spec.tenant).stored_bytes
        if limit is None or job.is_trained:
            return
        used = await self._store.call(Store.stored_bytes, job.spec.tenant)
        if full := why_full(used, limit):
            self._lifecycle.stop_soon(job.spec, JobState.PAUSED, full)

    async def _add_usage(self, job: Job) -> None:
        """Write down what a job used beside tokens since this was done last."""
        usage = job.meter.reading(sandbox_cpu_s=job.family.cpu_s())
        if usage != Usage():
            self._tenants.use(job.spec.tenant, sandbox_cpu_s=usage.sandbox_cpu_s)
            await self._record(job.spec, Store.add_usage, usage, entry=job.meter.entry)

    def _note_room(self) -> None:
        """A worker may have room: look again if somebody waits for it."""
        if any(station.queue.has_waiting for station in self._placement.stations):
            self._wake.set()

    def _wake_all(self) -> None:
        """Quotas leave more than before, or a day has begun: whoever can, opens a group."""
        for job in self._jobs.values():
            self._ready(job)

    async def _record(
        self,
        spec: JobSpec,
        function: Callable[Concatenate[Store, TenantId, str, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Write something of a job down, however long the store takes."""
        with self._watchdog.watch(spec, Stage.STORE, "the store is to answer"):
            return await self._store.call(function, spec.tenant, spec.name, *args, **kwargs)

    def _tell_state(self, spec: JobSpec, state: JobState, reason: str) -> None:
        self._tell(lambda observer: observer.job_state(spec, state, reason))

    def _report(self, spec: JobSpec, notice: Notice) -> None:
        """Tell everybody what holds a job up, or no longer does."""
        logger.warning(
            "%s: %s: %s (%.0f s)", spec.job_id, notice.stage, notice.cause, notice.since_s
        )
        self._tell(lambda observer: observer.notice(spec, notice))
        if self._tasks is not None:
            self._tasks.create_task(self._write_notice(spec, notice))

    async def _write_notice(self, spec: JobSpec, notice: Notice) -> None:
        data = {"stage": notice.stage, "cause": notice.cause, "since_s": notice.since_s}
        with suppress(MarlaasError):  # the log has it; a store in trouble must not make more
            await self._store.inner.call(
                Store.add_event, spec.tenant, spec.name, EventKind.NOTICE, data
            )

    def _note_stage(self, spec: JobSpec, stage: Stage, what: str, began_s: float) -> None:
        """Tell whoever traces the stages of one that is over."""
        job = self._jobs.get(spec.job_id)
        if job is not None and self._on_stage is not None:
            self._on_stage(spec, stage.value, job.policy.station.worker.name, began_s, what)

    def _tell(self, notify: Callable[[JobObserver], None]) -> None:
        for observer in self._observers:
            notify(observer)


async def _start(family: Family) -> None:
    """Start a job's environment, again if its sandbox dies meanwhile."""
    for _ in range(MAX_LOST_STARTS):
        try:
            return await family.start()
        except EnvironmentFailure as failure:
            if failure.kind is not FailureKind.SANDBOX_LOST:
                raise
            logger.warning("starting again: %s", failure)
    await family.start()
