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
- Four fates: a bad request fails its job, a bad rollout is recorded on its trajectory, a lost
  worker's work is done again, a broken invariant ends the process, and the store brings all back.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from enum import StrEnum

from marlaas.envs.base import Family
from marlaas.envs.latency import with_latency
from marlaas.errors import MarlaasError, PolicyDiverged, WorkerLost
from marlaas.loop import algorithms
from marlaas.loop.evaluation import Evaluation, is_due
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.job import Job
from marlaas.loop.policies import Placement, Policy, Station, Worker
from marlaas.loop.rollout import ChatTokenizer, GroupPlan, GroupRollout
from marlaas.loop.training import Outcome, train
from marlaas.store.db import Store
from marlaas.types import (
    Generator,
    Group,
    JobId,
    JobObserver,
    JobSpec,
    JobState,
    StepRecord,
    TenantId,
)

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


class Controller:
    """Runs jobs: constructed -> `run` -> every job terminal, or `stop`ped at step boundaries.

    A controller on a store with unfinished jobs goes on with them.

        controller = Controller(store, workers, tokenizer, make_family=make_family)
        controller.submit(spec)
        await controller.run()
        store.job("acme", "sums").state             # JobState.DONE
    """

    def __init__(
        self,
        store: Store,
        workers: Sequence[Worker],
        tokenizer: ChatTokenizer,
        *,
        make_family: Callable[[JobSpec], Family],
        observer: JobObserver | None = None,
        mode: Mode = Mode.ASYNC,
        settings: LoopSettings | None = None,
    ) -> None:
        self._store = store
        self._settings = settings or LoopSettings()
        self._wake = asyncio.Event()
        self._placement = Placement(workers, self._settings.weights, on_room=self._wake.set)
        self._tokenizer = tokenizer
        self._make_family = make_family
        self._observers = [observer] if observer else []
        self._mode = mode
        self._turn = asyncio.Semaphore(1) if mode is Mode.LOCKSTEP else nullcontext()
        self._jobs: dict[JobId, Job] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._is_stopping = False

    @property
    def placement(self) -> Placement:
        """The stations, for guests that compete with jobs (see `loop/serving.py`)."""
        return self._placement

    def submit(self, spec: JobSpec) -> None:
        """Accept a job; it starts at once if the controller runs.

        Raises:
            InvalidRequest: its algorithm or environment cannot be made.
            Conflict: the tenant has another job of that name.
        """
        algorithms.resolve(spec.algorithm)
        self._make_family(spec)
        if self._store.add_job(spec.tenant, spec) and self._tasks is not None:
            self._tasks.create_task(self._run_job(spec))

    async def run(self) -> None:
        """Run every unfinished job of the store to its end, or until `stop`."""
        unfinished = [row.spec for row in self._store.all_jobs() if row.state.is_active]
        try:
            async with asyncio.TaskGroup() as stages:
                admission = stages.create_task(self._admit())
                async with asyncio.TaskGroup() as self._tasks:
                    for spec in unfinished:
                        self._tasks.create_task(self._run_job(spec))
                admission.cancel()
        finally:
            self._tasks = None

    def stop(self) -> None:
        """Let running steps end and `run` return; nothing that was finished is lost."""
        self._is_stopping = True
        for job in self._jobs.values():
            job.buffer.close()
            for evaluation in job.judging:
                evaluation.cancel()

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
            group = await rollout.run(generator)
        except WorkerLost:
            await job.policy.recover()
            job.give_back(plan)
        else:
            job.policy.station.settle(job.spec, group, estimate_s, is_training=plan.is_training)
            self._hand_over(job, plan, group)
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
            outcome = await self._step(job, groups)
            await job.all_tidied()
            record = self._commit(job, groups, outcome)
            await self._publish(job, record)
            job.check_progress(record, groups)

    async def _publish(self, job: Job, record: StepRecord) -> None:
        """Let new rollouts, and an evaluation if one is due, use a committed step."""
        await job.policy.publish(record.step)
        job.buffer.publish(record.step)
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

    async def _evaluate(self, job: Job, evaluation: Evaluation) -> None:
        """Judge a version on held-out prompts while training goes on."""
        try:
            await evaluation.done.wait()
        finally:
            del job.evaluations[evaluation.version]
            job.policy.let_go(evaluation.version)
        record = evaluation.record(job.elapsed_s)
        self._store.add_evaluation(job.spec.tenant, job.spec.name, record)
        self._tell(lambda observer: observer.eval_done(job.spec, record))
        job.note(record)

    # The life of a job ------------------------------------------------------------------------

    async def _run_job(self, spec: JobSpec) -> None:
        """Bring a job from queued to a terminal state, or leave it running in the store."""
        async with self._turn:
            state, reason = JobState.DONE, ""
            try:
                async with asyncio.TaskGroup() as tasks:
                    is_done = await self._live(spec, tasks)
            except* PolicyDiverged as errors:
                state, reason, is_done = JobState.HELD, _first_message(errors), True
            except* MarlaasError as errors:
                state, reason, is_done = JobState.FAILED, _first_message(errors), True
            if is_done:
                self._set_state(spec, state, reason)

    async def _live(self, spec: JobSpec, tasks: asyncio.TaskGroup) -> bool:
        """Run a job; return False if it was stopped before its end."""
        if self._is_stopping:
            return False
        if self._mode is Mode.LOCKSTEP:
            spec = replace(spec, max_staleness=0)
        family = with_latency(self._make_family(spec), spec.latency, spec.seed)
        self._placement.assign(spec, TokenCounts.guess(spec, family.max_turns))
        policy = Policy(spec, self._placement, self._store, on_room=self._wake.set)
        job = self._jobs[spec.job_id] = Job(spec, family, policy, tasks)
        try:
            await self._open(job)
            await self._train(job)
            await job.all_tidied()
            await self._judge_last(job)
            return job.is_trained and not self._missing_evaluations(job)
        finally:
            await self._close(job)

    async def _open(self, job: Job) -> None:
        """Set a job where the store left it: environment up, policy live, evaluations under way."""
        job.restore(self._store)
        await job.family.start()
        missing = self._missing_evaluations(job)
        for version in missing:
            job.policy.hold(version)
        await job.policy.start(job.buffer.oldest_needed_version())
        for version in missing:
            job.policy.let_go(version)
            self._start_evaluation(job, version)
        self._set_state(job.spec, JobState.RUNNING)
        self._ready(job)

    async def _judge_last(self, job: Job) -> None:
        """Wait for all evaluations; a job that stopped early has its last version judged too."""
        if job.is_trained:
            job.cancel_training_rollouts()
            for version in self._missing_evaluations(job) - job.evaluations.keys():
                self._start_evaluation(job, version)
        await job.all_judged()

    async def _close(self, job: Job) -> None:
        """Free everything that a job holds outside the store."""
        del self._jobs[job.spec.job_id]
        job.policy.station.queue.forget(job.spec)
        await job.cancel_tasks()
        await job.policy.remove()
        self._placement.release(job.spec)
        await job.family.stop()

    def _missing_evaluations(self, job: Job) -> set[int]:
        """Return the versions that are due to be judged, were not, and still can be."""
        spec, newest = job.spec, job.buffer.version
        judged = {record.version for record in self._store.evaluations(spec.tenant, spec.name)}
        rows = self._store.versions(spec.tenant, spec.name)
        kept = {row.version for row in rows if row.has_adapter}
        due = {version for version in kept | {0, newest} if is_due(spec, version)}
        if job.is_satisfied:
            due.add(newest)
        return due - judged

    def _waits_for_verdicts(self, job: Job) -> bool:
        """Return whether evaluations come before the next step: in the old way, and where a seed
        must decide at which step a job is good enough to stop."""
        decides = job.spec.is_seeded and job.spec.stop_at_success > 0
        return decides or self._mode is Mode.LOCKSTEP

    # Small parts of the stages ----------------------------------------------------------------

    def _ready(self, job: Job) -> None:
        """A job may be able to open a group: let it compete."""
        if job.spec.job_id in self._jobs:
            job.policy.station.queue.add(job.spec)
            self._wake.set()

    def _open_group(self, job: Job, station: Station) -> None:
        """Open what a job opens next and charge it; one with nothing to open leaves the queue."""
        plan = job.next_plan()
        if plan is None:
            station.queue.discard(job.spec)
            return
        if plan.is_training:
            self._store.open_group(job.spec.tenant, job.spec.name, plan.index, version=plan.version)
        estimate_s = station.charge(job.spec, plan.size)
        generator = job.policy.generator(plan.size)  # its places are reserved from here on
        task = job.spawn_rollout(plan, self._roll_out(job, plan, generator, estimate_s))
        task.add_done_callback(lambda _: generator.close())

    def _hand_over(self, job: Job, plan: GroupPlan, group: Group) -> None:
        """Give a finished group to whoever asked for it; training groups are stored first."""
        if not plan.is_training:
            job.judge(group)
            return
        self._store.finish_group(job.spec.tenant, job.spec.name, group)
        job.buffer.finish(group)
        self._tell(lambda observer: observer.group_done(job.spec, group))

    async def _step(self, job: Job, groups: list[Group]) -> Outcome:
        """Train on groups until a worker lives through it.

        Raises:
            WorkerLost: none does; the step itself may be what ends them.
        """
        for attempt in range(MAX_ATTEMPTS):
            await asyncio.sleep(job.wait_before_attempt_s(attempt))
            try:
                return await train(
                    job.policy, job.spec, job.algorithm, groups, gap_bound=self._settings.gap_bound
                )
            except WorkerLost:
                await job.policy.recover()
        step = job.policy.version + 1
        raise WorkerLost(f"workers were lost in all of {MAX_ATTEMPTS} attempts at step {step}")

    def _commit(self, job: Job, groups: list[Group], outcome: Outcome) -> StepRecord:
        """Make a step durable in one transaction, before anyone can see it."""
        record = StepRecord(
            step=outcome.result.version,
            group_indices=tuple(group.index for group in groups),
            adapter_hash=outcome.result.adapter_hash,
            is_vetoed=outcome.is_vetoed,
            is_empty=outcome.is_empty,
            metrics=outcome.metrics,
            elapsed_s=job.elapsed_s,
        )
        self._store.commit_step(job.spec.tenant, job.spec.name, record, dropped=outcome.dropped)
        return record

    def _start_evaluation(self, job: Job, version: int) -> None:
        if self._is_stopping:
            return
        job.policy.hold(version)
        evaluation = Evaluation(version, job.spec.eval_prompts)
        job.add_evaluation(evaluation)
        job.spawn_evaluation(self._evaluate(job, evaluation))
        self._ready(job)

    def _set_state(self, spec: JobSpec, state: JobState, reason: str = "") -> None:
        self._store.set_job_state(spec.tenant, spec.name, state, reason)
        self._tell(lambda observer: observer.job_state(spec, state, reason))

    def _tell(self, notify: Callable[[JobObserver], None]) -> None:
        for observer in self._observers:
            notify(observer)


def _first_message(errors: BaseExceptionGroup) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)
