"""The states of all jobs: who starts next, who stops, and what the store says of it.

    submit ─► queued ─► running ─► done | held | failed
                ▲ │        │
         resume │ └──┬─────┘ pause, cancel; a cap; a lower quota (back to queued)
                │    ▼
              paused | cancelled

- `Roster` decides and keeps no time; `Lifecycle` writes states and runs jobs. A job runs exactly
  while it has a place: as many as the server allows, and of one tenant as many as its quota.
- Next is the tenant with the fewest running jobs for its weight, then its oldest job. Jobs that ran
  when the server went down come first.
- Verbs on one job come one after another, on different jobs none waits for another. Each may be
  repeated: the second time it finds its work done. A caller that leaves does not stop its verb:
  memory and store never differ.
- A job that is made to stop gives up what is in flight, but never a write to the store; when the
  verb returns, its places on the worker are free.
"""

import asyncio
import heapq
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from marlaas.errors import (
    Conflict,
    MarlaasError,
    NotFound,
    PolicyDiverged,
    QuotaExceeded,
    StoreUnavailable,
)
from marlaas.loop.concurrency import to_its_end
from marlaas.loop.forks import check_fork, take_fork
from marlaas.loop.patience import PatientStore
from marlaas.loop.usage import Tenants, why_capped, why_full
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store, StoredJob
from marlaas.types import JOB_MOVES, JobId, JobSpec, JobState, Quotas, Tenant, TenantId, Usage

logger = logging.getLogger(__name__)

INTERRUPTED = "the server was started anew and has no place for it yet"
RETRY_QUEUE_S = 60.0
"""When a tenant whose queue is full may try again: places come free as jobs end."""


@dataclass(eq=False, kw_only=True)
class Seat:
    """An active job in memory: waiting for a place, or having one."""

    spec: JobSpec
    number: int
    """Order of submission."""
    step: int = 0
    """Steps committed when it was last queued."""
    used: Usage = field(default_factory=Usage)
    """What it had used when it was last queued."""
    was_running: bool = False
    """It ran when the server went down."""
    is_closing: bool = False
    """It has stopped working, and gives back what it holds."""
    wish: tuple[JobState, str] | None = None
    """State and reason to end with, once it was told to stop."""
    work: asyncio.Task[bool] | None = None
    """The running job; cancelled to stop it."""
    end: asyncio.Task[None] | None = None
    """Done when the job has no place any more and the store says so."""

    @property
    def is_ending(self) -> bool:
        """It will not work any more."""
        is_over = self.work is not None and self.work.done()
        return self.is_closing or is_over or self.wish is not None

    @property
    def turn(self) -> tuple[bool, int]:
        """Order among a tenant's waiting jobs."""
        return (not self.was_running, self.number)


class Roster:
    """Active jobs in memory: `add` -> queued -> `start` -> running -> `requeue` or `remove`.

    roster = Roster(max_running=64, tenants=tenants)
    roster.add(seat)
    seat = roster.next()                       # None: no place, or nobody waits
    roster.start(seat)
    roster.places()["acme/sums"]               # 3: two others would start before it
    """

    def __init__(self, max_running: int, tenants: Tenants) -> None:
        self.max_running = max_running
        self._tenants = tenants
        self._seats: dict[JobId, Seat] = {}
        self._queued: dict[TenantId, list[Seat]] = {}
        self._running: dict[TenantId, list[Seat]] = {}
        self._blocked: Counter[JobId] = Counter()
        self._num_running = 0
        self._places: dict[JobId, int] | None = None

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._seats

    def get(self, job_id: JobId) -> Seat | None:
        return self._seats.get(job_id)

    @property
    def num_running(self) -> int:
        return self._num_running

    def running(self, tenant_id: TenantId | None = None) -> list[Seat]:
        """Return the jobs that have a place, of one tenant or all, in the order they started."""
        if tenant_id is not None:
            return list(self._running.get(tenant_id, ()))
        return [seat for seats in self._running.values() for seat in seats]

    def queued(self) -> list[Seat]:
        """Return the waiting jobs in the order in which they would start if places came free one
        by one and no quota held any back."""
        num_running = {tenant: len(self._running.get(tenant, ())) for tenant in self._queued}
        iterators = {tenant: iter(seats) for tenant, seats in self._queued.items()}
        heads: list[tuple[tuple[bool, float, int], TenantId, Seat]] = []

        def offer(tenant: TenantId) -> None:
            seat = next(iterators[tenant], None)
            if seat is not None:
                share = num_running[tenant] / self._tenants.weight(tenant)
                heapq.heappush(heads, ((seat.turn[0], share, seat.number), tenant, seat))

        for tenant in self._queued:
            offer(tenant)
        order = []
        while heads:
            _, tenant, seat = heapq.heappop(heads)
            order.append(seat)
            num_running[tenant] += 1
            offer(tenant)
        return order

    def places(self) -> dict[JobId, int]:
        """Return the 1-based place of every waiting job; computed anew only after a change."""
        if self._places is None:
            self._places = {seat.spec.job_id: i + 1 for i, seat in enumerate(self.queued())}
        return self._places

    def next(self) -> Seat | None:
        """Return the job that is to start now, if one can."""
        if self._num_running >= self.max_running:
            return None
        heads = [seat for tenant in self._queued if (seat := self._head(tenant)) is not None]
        return min(heads, key=self._claim, default=None)

    def why_waits(self, seat: Seat) -> str:
        """Return why a waiting job does not run, in words."""
        tenant, quota = seat.spec.tenant, self._tenants.quotas(seat.spec.tenant).max_running_jobs
        if self._blocked[seat.spec.job_id]:
            return "an evaluation of it that was asked for runs first"
        if quota is not None and len(self._running.get(tenant, ())) >= quota:
            return f"the tenant's quota is {quota} running jobs"
        if self._num_running >= self.max_running:
            return f"the server runs {self.max_running} jobs, as many as it may"
        return "it is about to start"

    # Changes ----------------------------------------------------------------------------------

    def add(self, seat: Seat) -> None:
        """Let a job wait for a place."""
        assert seat.spec.job_id not in self._seats
        self._seats[seat.spec.job_id] = seat
        insort(self._queued.setdefault(seat.spec.tenant, []), seat, key=lambda seat: seat.turn)
        self._places = None

    def start(self, seat: Seat) -> None:
        """Give a waiting job a place."""
        self._leave(self._queued, seat)
        self._running.setdefault(seat.spec.tenant, []).append(seat)
        self._num_running += 1

    def remove(self, seat: Seat) -> None:
        """Forget a job that is not active any more; its place comes free."""
        if seat in self._running.get(seat.spec.tenant, ()):
            self._leave(self._running, seat)
            self._num_running -= 1
        else:
            self._leave(self._queued, seat)
        del self._seats[seat.spec.job_id]

    def reorder(self) -> None:
        """Weights or quotas have changed."""
        self._places = None

    def block(self, job_id: JobId) -> None:
        """Let a job not start until `unblock`, as often as it was blocked."""
        self._blocked[job_id] += 1

    def unblock(self, job_id: JobId) -> None:
        self._blocked[job_id] -= 1
        if not self._blocked[job_id]:
            del self._blocked[job_id]

    def over_quota(self, tenant_id: TenantId) -> list[Seat]:
        """Return the running jobs that are too many for a tenant's quota, the youngest ones."""
        quota = self._tenants.quotas(tenant_id).max_running_jobs
        staying = [seat for seat in self._running.get(tenant_id, ()) if seat.wish is None]
        return [] if quota is None else staying[quota:]

    # ------------------------------------------------------------------------------------------

    def _head(self, tenant: TenantId) -> Seat | None:
        """Return the tenant's job that would start next, if its quota lets one start."""
        quota = self._tenants.quotas(tenant).max_running_jobs
        if quota is not None and len(self._running.get(tenant, ())) >= quota:
            return None
        free = (seat for seat in self._queued[tenant] if not self._blocked[seat.spec.job_id])
        return next(free, None)

    def _claim(self, seat: Seat) -> tuple[bool, float, int]:
        """Return the order in which the tenants' first jobs start: the least comes first."""
        tenant = seat.spec.tenant
        share = len(self._running.get(tenant, ())) / self._tenants.weight(tenant)
        return (seat.turn[0], share, seat.number)

    def _leave(self, seats: dict[TenantId, list[Seat]], seat: Seat) -> None:
        seats[seat.spec.tenant].remove(seat)
        if not seats[seat.spec.tenant]:
            del seats[seat.spec.tenant]
        self._places = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How a job was handed over."""

    idempotency_key: str = ""
    body_digest: str = ""
    """Of what was sent, before the names in it were resolved."""
    owner: Tenant | None = None
    """The tenant as it was when the request came; without a service, jobs have none."""


class Lifecycle:
    """Moves jobs through their states: constructed -> `begin` -> verbs* -> `idle` -> `stop`.

    `live` runs one job and returns whether it came to its end; cancelling it makes it stop. Verbs
    may be called before `begin`: what they queue starts then.
    """

    def __init__(
        self,
        store: PatientStore,
        roster: Roster,
        tenants: Tenants,
        *,
        live: Callable[[JobSpec], Coroutine[None, None, bool]],
        tell: Callable[[JobSpec, JobState, str], None],
    ) -> None:
        self._store = store.inner
        self._patient = store
        self._roster = roster
        self._tenants = tenants
        self._live = live
        self._tell = tell
        self._tasks: asyncio.TaskGroup | None = None
        self._is_stopping = False
        self._loading = asyncio.Lock()
        self._num_submitted = 0
        self._is_loaded = False
        self._became_idle = asyncio.Event()
        """Set whenever a job ended or all were told to stop: see whether nothing is left."""
        self._verbs: WeakValueDictionary[JobId, asyncio.Lock] = WeakValueDictionary()

    # Verbs --------------------------------------------------------------------------------------

    async def submit(self, spec: JobSpec, request: Request) -> StoredJob:
        """Accept a job; the same again is the same job.

        Raises:
            NotFound: the tenant was purged meanwhile.
            Conflict: the tenant has another job of that name, or used the key for another one.
            InvalidRequest: it begins where nothing is.
            QuotaExceeded: the tenant's queue is full.
        """
        return await to_its_end(self._submit(spec, request))

    async def pause(self, tenant_id: TenantId, name: str, reason: str) -> StoredJob:
        """Stop a job so that it can be resumed; return once it holds nothing.

        Raises:
            NotFound: no such job.
            Conflict: it has ended.
        """
        return await to_its_end(self._stop_job(tenant_id, name, JobState.PAUSED, reason))

    async def cancel(self, tenant_id: TenantId, name: str, reason: str) -> StoredJob:
        """Stop a job for good; return once it holds nothing.

        Raises:
            NotFound: no such job.
            Conflict: it is done.
        """
        return await to_its_end(self._stop_job(tenant_id, name, JobState.CANCELLED, reason))

    async def resume(self, tenant_id: TenantId, name: str) -> StoredJob:
        """Queue a job again that was paused, held or failed.

        Raises:
            NotFound: no such job.
            Conflict: it is done or cancelled, or has reached its cap.
            QuotaExceeded: the tenant's queue is full.
        """
        return await to_its_end(self._resume(tenant_id, name))

    async def delete(self, tenant_id: TenantId, name: str) -> None:
        """Delete what is stored of a job that is not active.

        Raises:
            NotFound: no such job.
            Conflict: it is active; cancel it first.
        """
        await self._load()
        async with self._verb(job_id_of(tenant_id, name)):
            await self._store.call(Store.delete_job, tenant_id, name)

    def stop_soon(self, spec: JobSpec, state: JobState, reason: str) -> None:
        """Make a running job stop, from inside it; if it comes to its end before, it has."""
        seat = self._roster.get(spec.job_id)
        if seat is not None:
            self._tell_to_stop(seat, state, reason)

    def quotas_changed(self, tenant_ids: Iterable[TenantId]) -> None:
        """Let jobs start that now may; queue those again that are now too many."""
        self._roster.reorder()
        for tenant_id in tenant_ids:
            quota = self._tenants.quotas(tenant_id).max_running_jobs
            for seat in self._roster.over_quota(tenant_id):
                reason = f"the tenant's quota is {quota} running jobs now"
                self._tell_to_stop(seat, JobState.QUEUED, reason)
        self.start_waiting()

    # Running ------------------------------------------------------------------------------------

    async def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Start jobs from now on, as tasks of `tasks`."""
        await self._load()
        self._tasks = tasks
        self.start_waiting()
        for seat in self._roster.queued():
            if seat.was_running:
                await self._queue_interrupted(seat)

    async def idle(self) -> None:
        """Return once no job runs and none can start, or all were told to stop."""
        while not self._is_idle:
            self._became_idle.clear()
            await self._became_idle.wait()

    async def stopped(self) -> None:
        """Return once all were told to stop."""
        while not self._is_stopping:
            self._became_idle.clear()
            await self._became_idle.wait()

    def start_waiting(self) -> None:
        """Start waiting jobs while there are places."""
        if self._tasks is None or self._is_stopping:
            return
        while (seat := self._roster.next()) is not None:
            self._roster.start(seat)
            seat.end = self._tasks.create_task(self._run(seat))

    def stop(self) -> None:
        """Start no further job. Those that run are the caller's to end; the store keeps them
        running, so that the next server goes on with them."""
        self._is_stopping = True
        self._became_idle.set()

    def finish(self) -> None:
        """The tasks given to `begin` are about to end."""
        self._tasks = None

    # ------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Read the active jobs from the store, once."""
        async with self._loading:
            if self._is_loaded:
                return
            for stored in await self._store.call(Store.all_jobs):
                if stored.state.is_active:
                    self._add(stored)
            self._is_loaded = True

    def _verb(self, job_id: JobId) -> asyncio.Lock:
        """Return the lock of a job's verbs; it lives as long as somebody uses it."""
        return self._verbs.setdefault(job_id, asyncio.Lock())

    def _add(self, stored: StoredJob) -> None:
        self._num_submitted += 1
        self._roster.add(
            Seat(
                spec=stored.spec,
                number=self._num_submitted,
                step=stored.step,
                used=stored.usage,
                was_running=stored.state is JobState.RUNNING,
            )
        )

    async def _queue_interrupted(self, seat: Seat) -> None:
        """Write that a job that ran has no place now, unless a verb or a place came first."""
        job_id = seat.spec.job_id
        async with self._verb(job_id):
            if self._roster.get(job_id) is not seat or seat.end is not None:
                return
            self._roster.block(job_id)  # it does not start while the store is to say that it waits
            try:
                await self._write(self._patient, seat.spec, JobState.QUEUED, INTERRUPTED)
            except StoreUnavailable as error:  # the server stops
                logger.warning("%s is not stored as queued: %s", job_id, error)
            finally:
                self._roster.unblock(job_id)
                self.start_waiting()

    def _queue_if_new(self, stored: StoredJob) -> None:
        """Let a job wait that the store holds as queued and nobody here knows: it is new, or the
        answer that it was queued was lost."""
        if stored.state is JobState.QUEUED and stored.spec.job_id not in self._roster:
            self._add(stored)
            self.start_waiting()

    async def _submit(self, spec: JobSpec, request: Request) -> StoredJob:
        await self._load()
        quota = self._tenants.quotas(spec.tenant).max_queued_jobs
        async with self._verb(spec.job_id):
            stored = await self._store.call(accept, spec, request, max_queued=quota)
            self._queue_if_new(stored)
        return stored

    async def _resume(self, tenant_id: TenantId, name: str) -> StoredJob:
        await self._load()
        job_id = job_id_of(tenant_id, name)
        async with self._verb(job_id):
            stored = await self._store.call(Store.job, tenant_id, name)
            if job_id in self._roster:
                return stored
            if stored.state is JobState.QUEUED:  # the answer to an earlier call was lost
                self._queue_if_new(stored)
                return stored
            _check_move(stored, JobState.QUEUED)
            cap = why_capped(stored.spec, _tokens(stored.usage), stored.usage.device_s)
            if cap:
                raise Conflict(f"job {name!r} cannot go on: {cap}; fork it with a higher one")
            quotas = self._tenants.quotas(tenant_id)
            await self._store.call(queue_again, stored.spec, quotas)
            self._tell(stored.spec, JobState.QUEUED, "")
            stored = replace(stored, state=JobState.QUEUED, reason="")
            self._queue_if_new(stored)
        return stored

    async def _stop_job(
        self, tenant_id: TenantId, name: str, state: JobState, reason: str
    ) -> StoredJob:
        await self._load()
        job_id = job_id_of(tenant_id, name)
        async with self._verb(job_id):
            self._roster.block(job_id)  # whatever comes of it, it does not start meanwhile
            try:
                seat = self._roster.get(job_id)
                if seat is not None and seat.end is not None:
                    self._tell_to_stop(seat, state, reason)
                    await asyncio.wait([seat.end])
                return await self._end(tenant_id, name, state, reason)
            finally:
                self._roster.unblock(job_id)
                self.start_waiting()

    async def _end(self, tenant_id: TenantId, name: str, state: JobState, reason: str) -> StoredJob:
        """Write the state of a job that does not run, and forget it if it waited."""
        stored = await self._store.call(Store.job, tenant_id, name)
        if stored.state is not state:
            _check_move(stored, state)
            await self._write(self._store, stored.spec, state, reason)
            stored = replace(stored, state=state, reason=reason)
        seat = self._roster.get(stored.spec.job_id)
        if seat is not None:
            self._roster.remove(seat)
        return stored

    def _tell_to_stop(self, seat: Seat, state: JobState, reason: str) -> None:
        """Cancel a running job, once: what it does then to end must not be cancelled too."""
        if seat.wish is None:
            seat.wish = (state, reason)
            if seat.work is not None:
                seat.work.cancel()

    async def _run(self, seat: Seat) -> None:
        """Run a job that has a place, and write down how it ended."""
        end = await self._outcome(seat)
        if end is not None:
            state, reason = end
            again = None
            try:
                await self._write(self._patient, seat.spec, state, reason)
                if state is JobState.QUEUED:
                    again = await self._queued_again(seat)
            except StoreUnavailable as error:  # the server stops
                logger.warning("%s is not stored as %s: %s", seat.spec.job_id, state, error)
                return
            self._roster.remove(seat)
            if again is not None:
                self._roster.add(again)
            self.start_waiting()
        self._became_idle.set()

    async def _queued_again(self, seat: Seat) -> Seat:
        stored = await self._patient.call(Store.job, seat.spec.tenant, seat.spec.name)
        return Seat(spec=seat.spec, number=seat.number, step=stored.step, used=stored.usage)

    async def _outcome(self, seat: Seat) -> tuple[JobState, str] | None:
        """Return how a job ended; None if it was left as it was when the server stopped."""
        end = None
        try:
            is_done = await self._work(seat)
            end = (JobState.DONE, "") if is_done else seat.wish
        except* StoreUnavailable as errors:
            # A server that stops waits for no store: the next one goes on with the job.
            if not self._is_stopping:
                end = JobState.FAILED, first_message(errors)
        except* PolicyDiverged as errors:
            end = JobState.HELD, first_message(errors)
        except* MarlaasError as errors:
            end = JobState.FAILED, first_message(errors)
        return end

    async def _work(self, seat: Seat) -> bool:
        """Run the job in a task of its own, which can be cancelled without this one."""
        if seat.wish is not None:
            return False
        seat.work = asyncio.create_task(self._live(seat.spec))
        try:
            await asyncio.wait([seat.work])
        finally:
            if not seat.work.done():  # this task was cancelled
                seat.work.cancel()
                await asyncio.gather(seat.work, return_exceptions=True)
        return not seat.work.cancelled() and seat.work.result()

    async def _write(self, store: AsyncStore, spec: JobSpec, state: JobState, reason: str) -> None:
        await store.call(Store.set_job_state, spec.tenant, spec.name, state, reason)
        self._tell(spec, state, reason)

    @property
    def _is_idle(self) -> bool:
        nothing_runs = self._roster.num_running == 0 and self._roster.next() is None
        return self._is_stopping or nothing_runs


def job_id_of(tenant_id: TenantId, name: str) -> JobId:
    """Return the id under which the loop knows a job."""
    return JobId(f"{tenant_id}/{name}")


def _tokens(usage: Usage) -> int:
    return usage.sampled_tokens + usage.trained_tokens


def _moved(done_to: str, state: JobState) -> tuple[str, list[JobState]]:
    """Return what is done to jobs that come to a state, and to which it can be done."""
    # A server that stops queues running jobs again; nobody resumes them.
    never = {JobState.RUNNING} if state is JobState.QUEUED else set()
    return done_to, [each for each in JobState if state in JOB_MOVES[each] and each not in never]


_MOVED: Mapping[JobState, tuple[str, list[JobState]]] = {
    JobState.QUEUED: _moved("resumed", JobState.QUEUED),
    JobState.PAUSED: _moved("paused", JobState.PAUSED),
    JobState.CANCELLED: _moved("cancelled", JobState.CANCELLED),
}


def _check_move(stored: StoredJob, state: JobState) -> None:
    if state not in JOB_MOVES[stored.state]:
        because = f" ({stored.reason})" if stored.reason else ""
        done_to, movable = _MOVED[state]
        names = [each.value for each in movable]
        raise Conflict(
            f"job {stored.spec.name!r} is {stored.state}{because}: only "
            f"{', '.join(names[:-1])} and {names[-1]} jobs are {done_to}"
        )


def first_message(errors: BaseExceptionGroup) -> str:
    """Return what the first of several errors says."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


# ---------------------------------------------------------------------------------------------
# Accepting a job: one call of the store, so that nothing comes in between


def accept(store: Store, spec: JobSpec, request: Request, *, max_queued: int | None) -> StoredJob:
    """Store a job; return it. What it begins from is made its own.

    Raises:
        Conflict, InvalidRequest, NotFound, QuotaExceeded: see `Lifecycle.submit`.
    """
    owner = request.owner
    if owner is not None:
        store.check_tenant(owner.tenant_id, created_s=owner.created_s)
    if not _exists(store, spec):
        if max_queued is not None:
            _check_queue(store, spec.tenant, max_queued)
        check_fork(store, spec)
    is_new = store.add_job(
        spec.tenant,
        spec,
        idempotency_key=request.idempotency_key,
        body_digest=request.body_digest,
    )
    if is_new and spec.fork is not None:
        with suppress(
            MarlaasError
        ):  # the job is stored: its start tries again, and says what fails
            take_fork(store, spec)
    return store.job(spec.tenant, spec.name)


def queue_again(store: Store, spec: JobSpec, quotas: Quotas) -> None:
    """Write that a job waits again.

    Raises:
        QuotaExceeded: the tenant's queue is full, or its storage.
    """
    if quotas.max_queued_jobs is not None:
        _check_queue(store, spec.tenant, quotas.max_queued_jobs)
    if full := why_full(store.stored_bytes(spec.tenant), quotas.stored_bytes):
        raise QuotaExceeded(full, retry_after_s=RETRY_QUEUE_S)
    store.set_job_state(spec.tenant, spec.name, JobState.QUEUED)


def _exists(store: Store, spec: JobSpec) -> bool:
    with suppress(NotFound):
        store.job(spec.tenant, spec.name)
        return True
    return False


def _check_queue(store: Store, tenant_id: TenantId, max_queued: int) -> None:
    num_queued = store.job_counts(tenant_id).get(JobState.QUEUED, 0)
    if num_queued >= max_queued:
        raise QuotaExceeded(
            f"{num_queued} jobs are queued, the tenant's quota is {max_queued}: wait until some "
            "have run",
            retry_after_s=RETRY_QUEUE_S,
        )
