"""Policies on workers: where each one lives, which of its versions are live, how it comes back.

    absent ─► version 0 created, or loaded from the newest snapshot ─► publish(v) ─► ... ─► removed
                      ▲                                                   │
                      └────────────── its worker was lost ────────────────┘

- A version is live from `publish` until no group, step or evaluation can need it; then it is
  retired.
- Calls go to the worker that the policy was loaded on. Once that worker was lost they raise
  `WorkerLost`, even if it is back, until `recover` has loaded the policy again: half a step on the
  old process and half on the new one cannot happen.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, TypeVarTuple

from marlaas import runtime
from marlaas.config import slab_tokens
from marlaas.errors import NotFound, PolicyDiverged, StoreUnavailable, WorkerLost
from marlaas.loop.fairness import CostModel, FairQueue, TokenCounts, WorkerLoad
from marlaas.loop.forks import take_fork
from marlaas.loop.watchdog import Stage, Watch
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.store.files import VersionFiles
from marlaas.types import (
    Capabilities,
    Completion,
    EvalRecord,
    GenerateRequest,
    Generator,
    Group,
    JobId,
    JobSpec,
    TenantId,
    Trainer,
    WorkerStats,
)

LEAST_PROMPT_TOKENS = 1
"""Of a prompt that nothing is known of."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_RECOVERIES = 5
"""Times that a worker may be lost while it brings one policy back, before the job gives up."""

RATE_PERIOD_S = 2.0
"""Shortest time between two questions for a worker's rates, which change slowly."""

Home = tuple[str, int]
"""Name and incarnation of the worker that holds a policy."""

NOWHERE: Home = ("", -1)


class Worker(Protocol):
    """What samples and trains a share of the policies: one process, or a generator and a trainer
    that carry versions over between them."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int:
        """At least 0. Grows whenever the worker starts anew, without any policy."""
        ...

    @property
    def generator(self) -> Generator: ...

    @property
    def trainer(self) -> Trainer: ...

    @property
    def max_decoding(self) -> int:
        """Sequences that its decode batch holds."""
        ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    async def stats(self) -> WorkerStats: ...

    async def recover(self) -> None:
        """Return once the worker answers; at once if it does.

        Raises:
            WorkerLost: it will not come back.
        """
        ...


class Station:
    """One worker as the loop sees it: what it samples, who waits for it, what its work costs."""

    def __init__(self, worker: Worker, weights: Mapping[TenantId, float]) -> None:
        self.worker = worker
        self.load = WorkerLoad(worker.max_decoding, worker.kv_capacity_tokens)
        self.costs = CostModel()
        self.queue = FairQueue(self.costs.predict_s, weights)
        self.guests: dict[JobId, Callable[[], None]] = {}
        """Who stands in the queue beside the jobs that live here, and what begins at its turn."""
        self._refreshed_s = runtime.now_s()

    @property
    def home(self) -> Home:
        """What a policy that is loaded now is bound to."""
        return _home(self.worker)

    def charge(self, spec: JobSpec, num_trajectories: int) -> float:
        """Charge the predicted device seconds of a group to its job; return them."""
        estimate_s = self.costs.predict_s(spec.job_id) * num_trajectories / spec.group_size
        self.queue.charge(spec, estimate_s)
        return estimate_s

    def settle(self, spec: JobSpec, group: Group, estimate_s: float, *, is_training: bool) -> float:
        """Correct the charge to what a finished group cost, and learn from it; return the cost."""
        counts = TokenCounts.of(group, is_training=is_training)
        if is_training:
            self.costs.learn(spec.job_id, counts)
        cost_s = self.costs.seconds(counts)
        self.queue.charge(spec, cost_s - estimate_s)
        return cost_s

    def expect(self, spec: JobSpec, least_s: Callable[[float], float]) -> None:
        """Let a job's part of its tenant's share follow what it still needs at least, by what a
        group of it costs here."""
        self.queue.expect(spec, least_s(self.costs.predict_s(spec.job_id)))

    def forget(self, spec: JobSpec) -> None:
        """A job lives here no more."""
        self.queue.forget(spec)
        self.costs.forget(spec.job_id)

    async def learn_rates(self) -> None:
        """Ask the worker how long its work takes, now and then."""
        if runtime.now_s() - self._refreshed_s >= RATE_PERIOD_S:
            self._refreshed_s = runtime.now_s()
            with suppress(WorkerLost):
                self.costs.learn_rates(await self.worker.stats())


class Placement:
    """Gives each job the station with the least predicted work of its own tenant, and of equal ones
    that with the least in all; a job stays where it is.

    Shares hold worker by worker: of two, a tenant with all its jobs on one has half of its part.

    placement = Placement(workers, weights={})
    station = placement.assign(spec, TokenCounts.guess(spec, max_turns=1))
    placement.release(spec)                              # the job has ended
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        weights: Mapping[TenantId, float],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_room` is called when somebody may be admitted: there is room, or a newcomer."""
        self.stations = [Station(worker, weights) for worker in workers]
        self.on_room = on_room
        self._lost: set[str] = set()
        self._assigned: dict[JobId, tuple[Station, TenantId, float]] = {}

    def assign(self, spec: JobSpec, counts: TokenCounts) -> Station:
        """Return the station where a job is to live; `counts` is what one of its groups needs.

        Raises:
            WorkerLost: no worker is left.
        """
        work_s = {station.worker.name: 0.0 for station in self.stations}
        own_s = dict(work_s)
        for station, tenant_id, seconds in self._assigned.values():
            work_s[station.worker.name] += seconds
            if tenant_id == spec.tenant:
                own_s[station.worker.name] += seconds
        alive = self.alive
        if not alive:
            raise WorkerLost("no engine worker is left")
        names = {station.worker.name: station for station in alive}
        station = names[min(names, key=lambda name: (own_s[name], work_s[name]))]
        predicted_s = station.costs.seconds(counts) * spec.steps * spec.prompts_per_step
        self._assigned[spec.job_id] = (station, spec.tenant, predicted_s)
        station.costs.expect(spec.job_id, counts)
        return station

    def length_problem(self, spec: JobSpec, max_turns: int) -> str:
        """Return why a job's longest trajectory could not be trained on; nothing if it could.

        A prompt and what an environment says take room as well, but how much is not known before:
        a trajectory that comes to the bound ends there, as it does at the end of the context.
        """
        able = [station.worker.generator.capabilities for station in self.alive]
        if not able:
            return ""
        bound = min(one.max_trajectory(is_training=True) for one in able)
        context = min(one.max_context for one in able)
        longest = min(context, LEAST_PROMPT_TOKENS + max_turns * spec.max_tokens)
        if longest <= bound:
            return ""
        fitting = (bound - LEAST_PROMPT_TOKENS) // max_turns
        turns = f"{max_turns} turns" if max_turns > 1 else "one turn"
        return (
            f"max_tokens: got {spec.max_tokens}; {turns} may make a trajectory of {longest} "
            f"tokens, and the memory of a worker trains at most {bound}; expected at most "
            f"{fitting}, or a service with a larger `pass_memory_bytes`"
        )

    @property
    def alive(self) -> list[Station]:
        """Stations that were not given up."""
        return [station for station in self.stations if station.worker.name not in self._lost]

    def give_up(self, station: Station) -> None:
        """Take note that a worker will not come back."""
        self._lost.add(station.worker.name)

    def station_of(self, spec: JobSpec) -> Station:
        return self._assigned[spec.job_id][0]

    def move(self, spec: JobSpec) -> Station:
        """Give up a job's station, which will not come back, and return another one."""
        left = self.station_of(spec)
        self.give_up(left)
        station = self.assign(spec, left.costs.counts_of(spec.job_id))
        left.forget(spec)
        return station

    def release(self, spec: JobSpec) -> None:
        """A job has ended."""
        station, *_ = self._assigned.pop(spec.job_id)
        station.forget(spec)


class PolicyGenerator:
    """A policy's generator for one group, as long as its worker lives; counts what it samples.

    A place is reserved for each of the group's sequences until its first turn; `close` gives back
    the places of sequences that never came to one.
    """

    def __init__(
        self,
        station: Station,
        home: Home,
        num_sequences: int,
        *,
        spec: JobSpec,
        watch: Watch,
        on_leave: Callable[[], None],
    ) -> None:
        self._station = station
        self._home = home
        self._spec = spec
        self._watch = watch
        self._num_reserved = num_sequences
        self._on_leave = on_leave
        station.load.num_reserved += num_sequences

    @property
    def capabilities(self) -> Capabilities:
        return self._station.worker.generator.capabilities

    async def generate(self, request: GenerateRequest) -> Completion:
        self._unreserve(min(1, self._num_reserved))
        # What it may grow to, as the worker's memory counts it.
        kv_tokens = slab_tokens(len(request.tokens) + request.sampling.max_tokens)
        with self._station.load.sampling(kv_tokens, self._on_leave):
            if not self._is_bound:
                raise WorkerLost(f"{self._station.worker.name} was started anew")
            worker = self._station.worker
            with self._watch(self._spec, Stage.ROLLOUT, f"{worker.name} samples a turn"):
                return await worker.generator.generate(request)

    async def release(self, sequence_ids: Sequence[str]) -> None:
        if self._is_bound:
            with suppress(WorkerLost):  # nothing is left to free
                await self._station.worker.generator.release(sequence_ids)

    def close(self) -> None:
        """The group is over: no place is reserved any more."""
        self._unreserve(self._num_reserved)
        self._on_leave()

    @property
    def _is_bound(self) -> bool:
        return _home(self._station.worker) == self._home

    def _unreserve(self, count: int) -> None:
        self._num_reserved -= count
        self._station.load.num_reserved -= count


class Policy:
    """One policy: its place, its newest version and the older ones that are still live.

    The train stage calls `trainer` verbs, then `publish` and `retire`; the rollout stage asks for a
    `generator`; evaluations `hold` the version they need. Who sees `WorkerLost` awaits `recover`.

        policy = Policy(spec, placement, store, watch=watchdog.watch, on_room=wake)
        await policy.start(oldest_needed=0)
        home = policy.home
        result = await policy.trainer.optim_step(spec.policy_id, adam, policy.snapshot_path(1))
        policy.check_home(home)                               # or the step is made again
        await store.call(Store.commit_step, ...)              # durable before visible
        await policy.publish(result.version)
        await policy.retire(oldest_needed=result.version)
    """

    def __init__(
        self,
        spec: JobSpec,
        placement: Placement,
        store: AsyncStore,
        *,
        watch: Watch,
        on_room: Callable[[], None],
    ) -> None:
        self.version = 0
        self._spec = spec
        self._placement = placement
        self._store = store
        self._watch = watch
        self._on_room = on_room
        self._live: set[int] = set()
        self._held: Counter[int] = Counter()
        self._oldest_needed = 0
        self._home = NOWHERE
        self._touched = NOWHERE
        """Where some of the policy may lie, even if bringing it there was given up halfway."""
        self._lock = asyncio.Lock()

    # Where ----------------------------------------------------------------------------------

    @property
    def station(self) -> Station:
        return self._placement.station_of(self._spec)

    @property
    def trainer(self) -> Trainer:
        """The trainer that holds this policy. Fetch it anew for every call.

        Raises:
            WorkerLost: the worker went away since the policy was loaded.
        """
        worker = self.station.worker
        if _home(worker) != self._home:
            raise WorkerLost(f"{worker.name} does not hold {self._spec.policy_id}")
        return worker.trainer

    @property
    def home(self) -> Home:
        """Where the policy was loaded last."""
        return self._home

    def check_home(self, home: Home) -> None:
        """Make sure, right before a step is committed, that the version it made is still there.

        A policy that is brought back after the commit began finds that step in the store; one that
        came back before is a version behind, and the step must be made again.

        Raises:
            WorkerLost: the policy was or must be loaded anew since it lived at `home`.
        """
        if not home == self._home == _home(self.station.worker):
            raise WorkerLost(f"{self._spec.policy_id} was loaded anew before its step was stored")

    def generator(self, num_sequences: int) -> PolicyGenerator:
        """Return the generator of one group, bound to the worker that holds the policy now."""
        return PolicyGenerator(
            self.station,
            self._home,
            num_sequences,
            spec=self._spec,
            watch=self._watch,
            on_leave=self._on_room,
        )

    def snapshot_path(self, version: int) -> str:
        """Return where the training state of a version is to be written."""
        return self._files(version).prepare().state

    # Life -----------------------------------------------------------------------------------

    async def start(self, oldest_needed: int) -> None:
        """Create the policy, or load its newest durable version and the older ones still needed."""
        self._oldest_needed = oldest_needed
        await self.recover()

    async def recover(self) -> None:
        """Return once the policy is live on a worker, at the newest durable version.

        Raises:
            WorkerLost: no worker is left, or it is lost each time that the policy comes back.
        """
        async with self._lock:
            for _ in range(MAX_RECOVERIES):
                worker = self.station.worker
                with self._watch(self._spec, Stage.WORKER, f"{worker.name} is to hold the policy"):
                    if await self._recover_on(worker):
                        return
            raise WorkerLost(f"{self._spec.policy_id}: lost {MAX_RECOVERIES} times in a row")

    async def bring(self, version: int) -> None:
        """Make an older version live whose adapter is kept; nothing happens if it is live. Whoever
        needs it holds it."""
        async with self._lock:
            if version in self._live or version == self.version:
                return
            with suppress(WorkerLost):  # recovery brings held versions with it
                folder = self._files(version).adapter
                await self.trainer.load_version(self._spec.policy_id, version, folder)
                self._live.add(version)
                return
        await self.recover()

    async def publish(self, version: int) -> None:
        """Make the committed version the one that new rollouts use."""
        try:
            if self.version < version:
                await self.trainer.publish(self._spec.policy_id, version)
                self.version = version
                self._live.add(version)
        except WorkerLost:
            await self.recover()  # loads what was committed, live
        assert self.version == version

    async def keep_adapter(self) -> None:
        """Write the newest version as a PEFT folder, and forget those that nobody will ask for."""
        try:
            await self._save_adapter(self.trainer, self.version)
        except WorkerLost:
            await self.recover()  # writes it too
        evaluations = await self._call(Store.evaluations)
        await self._call(Store.prune_adapters, self._kept_versions(evaluations))

    async def retire(self, oldest_needed: int) -> None:
        """Let go of live versions before `oldest_needed` that nobody holds."""
        self._oldest_needed = oldest_needed
        for version in sorted(self._live):
            if version < min(oldest_needed, self.version) and not self._held[version]:
                self._live.discard(version)
                try:
                    await self.trainer.retire(self._spec.policy_id, version)
                except WorkerLost:
                    return  # with the worker every version went; whoever needs one recovers

    def is_live(self, version: int) -> bool:
        return version in self._live

    def hold(self, version: int) -> None:
        """Keep a version live and its adapter on disk, for an evaluation, until `let_go`."""
        self._held[version] += 1

    def let_go(self, version: int) -> None:
        self._held[version] -= 1

    async def remove(self) -> None:
        """Forget the policy; its place becomes free."""
        with suppress(WorkerLost), self._watch(self._spec, Stage.WORKER, "the policy is removed"):
            await self._forget()
        self._live.clear()
        self._home = NOWHERE

    # ----------------------------------------------------------------------------------------

    async def _recover_on(self, worker: Worker) -> bool:
        """Load the policy on a worker if it is not there; return whether that went well."""
        try:
            await worker.recover()
        except WorkerLost:
            self._placement.move(self._spec)
            return False
        home = _home(worker)
        if home == self._home:
            return True
        with suppress(WorkerLost):
            await self._forget()
            self._touched = home
            await self._bring_back(worker.trainer)
            self._home = home
            return True
        return False

    async def _forget(self) -> None:
        """Take whatever there is of the policy off the worker that is there now."""
        worker = self.station.worker
        if _home(worker) == self._touched:
            with suppress(NotFound):
                await worker.trainer.remove(self._spec.policy_id)
        self._touched = NOWHERE

    async def _bring_back(self, trainer: Trainer) -> None:
        spec, step = self._spec, await self._call(_checked_step)
        if step == 0:
            adapter_hash = await self._create(trainer)
            await self._call(Store.add_first_version, adapter_hash)
        else:
            result = await trainer.load(spec.policy_id, self._files(step).state)
            adapter_hash = result.adapter_hash
        versions = {row.version: row for row in await self._call(Store.versions)}
        if adapter_hash != versions[step].adapter_hash:
            raise PolicyDiverged(
                f"version {step} came back as {adapter_hash}, committed was "
                f"{versions[step].adapter_hash}"
            )
        self.version = step
        self._live = {step}
        if not versions[step].has_adapter:
            await self._save_adapter(trainer, step)
        for version in sorted(self._needed(step)):
            if versions[version].has_adapter:
                folder = self._files(version).adapter
                await trainer.load_version(spec.policy_id, version, folder)
                self._live.add(version)

    async def _create(self, trainer: Trainer) -> str:
        """Make version 0: fresh, or what the job was forked from."""
        spec = self._spec
        if spec.fork is None:
            return await trainer.create(spec.policy_id, spec.adapter)
        source = await self._store.call(take_fork, spec)
        return await trainer.create_from(spec.policy_id, spec.adapter, str(source))

    def _needed(self, step: int) -> set[int]:
        """Return the older versions to bring back: held ones, and those a fixed lag asks for."""
        held = {version for version, count in self._held.items() if count}
        lag = range(self._oldest_needed, step) if self._spec.is_seeded else ()
        return {version for version in (*held, *lag) if version < step}

    async def _save_adapter(self, trainer: Trainer, version: int) -> None:
        files = self._files(version).prepare()
        await trainer.save_adapter(self._spec.policy_id, version, files.adapter)
        await self._call(Store.keep_adapter, version)

    def _kept_versions(self, evaluations: Sequence[EvalRecord]) -> set[int]:
        """Return the versions whose adapters stay: first, best, newest, held, and those that a
        fixed-lag schedule would need after a restart."""
        spec = self._spec
        best = max(evaluations, key=lambda record: record.success, default=None)
        num_newest = max(spec.keep_versions, spec.max_staleness + 2 if spec.is_seeded else 1)
        newest = range(max(0, self.version - num_newest + 1), self.version + 1)
        held = (version for version, count in self._held.items() if count)
        return {0, *newest, *held, *([best.version] if best else [])}

    async def _call(self, function: Callable[[Store, TenantId, str, *Ts], T], *args: *Ts) -> T:
        """Call a function of the store on this job."""
        with self._watch(self._spec, Stage.STORE, "the store is to answer"):
            return await self._store.call(function, self._spec.tenant, self._spec.name, *args)

    def _files(self, version: int) -> VersionFiles:
        return self._store.files.version(self._spec.tenant, self._spec.name, version)


class VisitingPolicy(Policy):
    """One kept version of a job that does not run, brought to a worker to be judged.

    Nothing is created, trained, published or stored; the version is held from the beginning.
    """

    def __init__(
        self,
        spec: JobSpec,
        placement: Placement,
        store: AsyncStore,
        version: int,
        *,
        watch: Watch,
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(spec, placement, store, watch=watch, on_room=on_room)
        self.version = version
        self.hold(version)

    async def _bring_back(self, trainer: Trainer) -> None:
        folder = self._files(self.version).adapter
        await trainer.load_version(self._spec.policy_id, self.version, folder)
        self._live = {self.version}


def _checked_step(store: Store, tenant_id: TenantId, name: str) -> int:
    """Return a job's newest step, whose training state is on disk as it was committed.

    Raises:
        PolicyDiverged: it is not; what would be loaded is not what was trained.
    """
    step = store.job(tenant_id, name).step
    if step > 0:
        try:
            store.check_state(tenant_id, name, step)
        except StoreUnavailable as error:
            raise PolicyDiverged(str(error)) from error
    return step


def _home(worker: Worker) -> Home:
    return worker.name, worker.incarnation
