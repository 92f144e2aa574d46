"""The worker side of one run: loaded, given its gradient again, trained, saved, unloaded.

    absent ─► loaded from the run's durable state ─► passes repeated ─► ready ─► unloaded
                          ▲                                               │
                          └──── its worker was lost, or another load ─────┘

- What is on a worker can always be made again from the store: the newest durable state, and the
  passes that were answered since the gradient was cleared last. In exact mode it is the same bits.
- Every load gets a policy id of its own, so nothing of an earlier one can be meant by mistake. The
  worker's versions begin anew with it; `Run.version` is counted by the store.
- At most so many runs are loaded on a worker (`Berths`); the one that was idle for longest makes
  room. One with work stays for a while, and then makes room for others between two operations:
  those of tenants that have less there go first, so nobody's runs keep out everybody else's.
- Calls go to the worker that the run was loaded on; once that was lost they raise `WorkerLost`
  until `bring` has loaded it again.
"""

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress

from marlaas import runtime
from marlaas.errors import Conflict, InvalidRequest, NotFound, PolicyDiverged, WorkerLost
from marlaas.loop.concurrency import all_or_none
from marlaas.loop.fairness import TokenCounts
from marlaas.loop.operations import ForwardBackward, body_of
from marlaas.loop.policies import NOWHERE, Home, Placement, Station
from marlaas.loop.training_gate import TrainingGate
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    DatumOutput,
    JobSpec,
    PolicyId,
    Run,
    StateKind,
    StepResult,
    TenantId,
    Trainer,
)

STAY_S = 5.0
"""How long a run that has work keeps its place though others wait for one."""

STAY_WITH_GRADIENT_S = 30.0
"""The same while it has a gradient, which would have to be accumulated again."""

EXPECTED_TOKENS = 4096
"""What a step of a run is taken to train on, to spread runs over workers."""


class Berths:
    """Places for loaded runs, so many a station: `take -> (leave | made room)`.

    Whoever finds none waits in line: first those of the tenant that has the fewest places there,
    first come first served among them.
    """

    def __init__(self, max_loaded: int) -> None:
        self._max_loaded = max_loaded
        self._loaded: dict[str, OrderedDict[RunPolicy, None]] = {}
        self._waiting: dict[str, list[RunPolicy]] = {}
        self._freed = asyncio.Event()

    def num_loaded(self, station: Station) -> int:
        return len(self._loaded.get(station.worker.name, ()))

    async def take(self, policy: "RunPolicy", station: Station) -> None:
        """Have a place for a policy; the one that was idle for longest is unloaded if need be."""
        name = station.worker.name
        loaded = self._loaded.setdefault(name, OrderedDict())
        waiting = self._waiting.setdefault(name, [])
        waiting.append(policy)
        try:
            while policy not in loaded:
                is_next = self._next(name) is policy
                idle = next((one for one in loaded if not one.is_busy), None)
                if is_next and len(loaded) < self._max_loaded:
                    loaded[policy] = None
                elif is_next and idle is not None:
                    await idle.unload()
                else:
                    self._freed.clear()
                    await self._freed.wait()
        finally:
            waiting.remove(policy)
            self._freed.set()  # somebody else is next
        loaded.move_to_end(policy)

    def leave(self, policy: "RunPolicy", station: Station) -> None:
        self._loaded.get(station.worker.name, OrderedDict()).pop(policy, None)
        self._freed.set()

    def note_idle(self) -> None:
        """A policy has no work any more: it may make room."""
        self._freed.set()

    def wants_place_of(self, policy: "RunPolicy", station: Station) -> bool:
        """Return whether somebody waits who should have the place of a policy that has work."""
        name = station.worker.name
        loaded, first = self._loaded.get(name, OrderedDict()), self._next(name)
        if first is None or policy not in loaded:
            return False
        num_leaving = sum(one.is_leaving or not one.is_busy for one in loaded)
        if len(loaded) < self._max_loaded or num_leaving >= len(self._waiting[name]):
            return False
        counts = self._counts(name)
        is_own = first.tenant_id == policy.tenant_id
        return is_own or counts[first.tenant_id] < counts[policy.tenant_id]

    def _next(self, name: str) -> "RunPolicy | None":
        counts = self._counts(name)
        return min(self._waiting.get(name, ()), key=lambda one: counts[one.tenant_id], default=None)

    def _counts(self, name: str) -> Counter[TenantId]:
        """Return how many places each tenant has at a station."""
        return Counter(one.tenant_id for one in self._loaded.get(name, ()))


class RunPolicy:
    """One run on a worker.

    policy = RunPolicy("acme", run_id, placement, store, berths=berths, ...)
    policy.is_busy = True
    await policy.bring()                                   # loaded, gradient and all
    outputs = await policy.forward_backward(body)
    result = await policy.step(adam, snapshot_path)        # then commit, then
    policy.is_busy = False                                 # it may be unloaded
    """

    def __init__(  # noqa: PLR0913, what it is made of
        self,
        tenant_id: TenantId,
        run_id: str,
        placement: Placement,
        store: AsyncStore,
        *,
        berths: Berths,
        gates: Callable[[Station], TrainingGate],
        ids: "itertools.count[int]",
        on_unload: Callable[[], None] = lambda: None,
    ) -> None:
        self.tenant_id = tenant_id
        self._run_id = run_id
        self._placement = placement
        self._store = store
        self._berths = berths
        self._gates = gates
        self._ids = ids
        self._on_unload = on_unload
        self._spec = JobSpec(tenant=tenant_id, name=f"#run/{run_id}", env={})  # no job's name
        self._station: Station | None = None
        self._home: Home = NOWHERE
        self._touched: Home = NOWHERE
        """Where something of it may lie, even if loading was given up halfway."""
        self._policy_id = PolicyId("")
        self._version = 0
        """The worker's number of what is trained."""
        self._is_live = False
        """That version may be sampled and saved."""
        self._lock = asyncio.Lock()
        self._tidying: set[asyncio.Task[None]] = set()
        self.is_busy = False
        """There is work for it: it stays where it is."""
        self.is_leaving = False
        """It makes room, although there is work for it."""
        self._loaded_s = 0.0
        self.adapter_hash = ""
        """Of what was loaded last."""
        self.num_loads = 0
        self.waits_for = ""
        """What bringing it waits for, in words."""

    # Where ----------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        return self._station is not None and self._home == self._station.home

    @property
    def is_absent(self) -> bool:
        """Nothing of it is anywhere, and no place is kept for it."""
        return self._station is None

    @property
    def station(self) -> Station:
        """Where it is to be loaded, or is.

        Raises:
            WorkerLost: nowhere.
        """
        if self._station is None:
            raise WorkerLost(f"{self._run_id} is on no worker")
        return self._station

    @property
    def gate(self) -> TrainingGate:
        return self._gates(self.station)

    @property
    def trainer(self) -> Trainer:
        """The trainer that holds the run. Fetch it anew for every call.

        Raises:
            WorkerLost: the worker went away since the run was loaded.
        """
        if not self.is_loaded:
            raise WorkerLost(f"{self._run_id} is not loaded")
        return self.station.worker.trainer

    async def bring(self) -> None:
        """Have the run on a worker as the store knows it, gradient included; at once if it is.

        Raises:
            WorkerLost: no worker is left, or it was lost meanwhile: try again.
            PolicyDiverged: what was stored cannot be brought back as it was.
            InvalidRequest: there can be no such policy on this base.
        """
        if self.is_loaded:
            return
        async with self._lock:
            try:
                station = await self._alive_station()
                await self._forget()
                self.waits_for = f"another run is to make room on {station.worker.name}"
                await self._berths.take(self, station)
                try:
                    self.waits_for = ""
                    await self._load(station)
                except BaseException:
                    self._berths.leave(self, station)
                    raise
            finally:
                self.waits_for = ""

    async def unload(self) -> None:
        """Take the run off its worker; a later `bring` loads it again. A busy one stays."""
        async with self._lock:
            if self.is_busy:
                return
            await self._leave()
        self._on_unload()

    def must_make_room(self, *, has_gradient: bool) -> bool:
        """Return whether the run has had its place for long enough, and others wait for one."""
        if not self.is_loaded:
            return False
        stay_s = STAY_WITH_GRADIENT_S if has_gradient else STAY_S
        is_long = runtime.now_s() - self._loaded_s >= stay_s
        return is_long and self._berths.wants_place_of(self, self.station)

    async def make_room(self) -> None:
        """Let others have the place; `bring` waits in line for another one."""
        self.is_leaving = True
        try:
            with self.resting():
                await self.unload()
        finally:
            self.is_leaving = False

    @contextmanager
    def resting(self) -> Iterator[None]:
        """There is work, and none of it can be done for now: meanwhile it may make room."""
        self.is_busy = False
        self._berths.note_idle()
        try:
            yield
        finally:
            self.is_busy = True

    def drop(self) -> None:
        """What is on the worker is not to be trusted: the next `bring` loads the run anew."""
        self._home = NOWHERE

    # Verbs ----------------------------------------------------------------------------------

    async def run_pass(self, body: ForwardBackward) -> list[DatumOutput]:
        """Score data and, unless forward only, add their gradient."""
        if body.is_forward_only:
            return await self.trainer.forward(self._policy_id, self._version, body.data)
        return await self.trainer.forward_backward(self._policy_id, body.data, body.objective)

    async def step(self, adam: AdamParams, snapshot: str) -> StepResult:
        """Apply the gradient, clear it, and write the state."""
        result = await self.trainer.optim_step(self._policy_id, adam, snapshot)
        before, self._version = self._version, result.version
        self._is_live = False
        self.tidy(self._retire(self.trainer, self._policy_id, before))
        return result

    async def clear_gradient(self) -> None:
        """Clear the gradient. A run that is not loaded has none: it is loaded without."""
        if self.is_loaded:
            await self.trainer.zero_grad(self._policy_id)

    async def save_adapter(self, folder: str) -> str:
        """Write the newest version as a PEFT folder; return its adapter hash."""
        if not self._is_live:
            await self.trainer.publish(self._policy_id, self._version)
            self._is_live = True
        return await self.trainer.save_adapter(self._policy_id, self._version, folder)

    async def load_beside(self, run: Run, source: str) -> tuple[PolicyId, str]:
        """Load other weights beside what is there; return where, and their hash. Once they are
        committed they are to be adopted, otherwise abandoned.

        Raises:
            InvalidRequest: they are those of an adapter of another shape.
            NotFound: there is nothing at `source`.
        """
        policy_id = self._new_id()
        return policy_id, await self.trainer.create_from(policy_id, run.spec, source)

    def adopt(self, policy_id: PolicyId) -> None:
        """Go on with what was loaded beside."""
        before, self._policy_id = self._policy_id, policy_id
        self._version, self._is_live = 0, True
        self.abandon(before)

    def abandon(self, policy_id: PolicyId) -> None:
        """Let go of what was loaded beside, or before."""
        if self.is_loaded:
            self.tidy(self._remove(self.trainer, policy_id))

    # ----------------------------------------------------------------------------------------

    async def _alive_station(self) -> Station:
        """Return the run's station, with a worker that answers."""
        if self._station is None:
            counts = TokenCounts(prefill=0, decode=0, train=EXPECTED_TOKENS)
            self._station = self._placement.assign(self._spec, counts)
        station = self._station
        self.waits_for = f"{station.worker.name} is to come back"
        try:
            await station.worker.recover()
        except WorkerLost:
            self._berths.leave(self, station)
            self._home = self._touched = NOWHERE
            self._station = self._placement.move(self._spec)
            raise
        return station

    async def _load(self, station: Station) -> None:
        run = await self._store.call(Store.run, self.tenant_id, self._run_id)
        home, trainer = station.home, station.worker.trainer
        self._policy_id, self._touched = self._new_id(), home
        self.adapter_hash = adapter_hash = await self._load_state(trainer, run)
        if run.adapter_hash and adapter_hash != run.adapter_hash:
            await self._store.call(Store.mark_corrupted, self.tenant_id, self._run_id)
            raise PolicyDiverged(
                f"version {run.version} of {self._run_id} came back as {adapter_hash}, committed "
                f"was {run.adapter_hash}: its files have changed"
            )
        self._is_live = True
        self.num_loads += 1
        await self._repeat_passes(trainer)
        self._home, self._loaded_s = home, runtime.now_s()

    async def _load_state(self, trainer: Trainer, run: Run) -> str:
        if run.state_kind is StateKind.FRESH:
            self._version = 0
            return await trainer.create(self._policy_id, run.spec)
        assert run.state_path is not None
        try:
            if run.state_kind is StateKind.ADAPTER:
                self._version = 0
                return await trainer.create_from(self._policy_id, run.spec, run.state_path)
            result = await trainer.load(self._policy_id, run.state_path)
        except NotFound as error:
            raise PolicyDiverged(f"the state of {self._run_id} is gone: {error}") from error
        self._version = result.version
        return result.adapter_hash

    async def _repeat_passes(self, trainer: Trainer) -> None:
        """Accumulate again what was answered since the gradient was cleared."""
        operations = await self._store.call(Store.replayable, self.tenant_id, self._run_id)
        policy_id, gate = self._policy_id, self.gate

        async def repeat(body: ForwardBackward) -> None:
            async with gate.passing(self.tenant_id, body.num_tokens):
                await trainer.forward_backward(policy_id, body.data, body.objective)

        bodies = [body_of(operation) for operation in operations]
        try:
            await all_or_none(
                [
                    asyncio.create_task(repeat(body))
                    for body in bodies
                    if isinstance(body, ForwardBackward)
                ]
            )
        except InvalidRequest as error:
            raise PolicyDiverged(f"a pass of {self._run_id} was refused: {error}") from error

    async def _forget(self) -> None:
        """Take whatever there is of the run off the worker that is there now."""
        self._home = NOWHERE  # before anything is awaited: a run that has work finds it gone
        if self._station is not None and self._station.home == self._touched:
            await self._remove(self._station.worker.trainer, self._policy_id)
        self._touched = NOWHERE

    async def _leave(self) -> None:
        station = self._station
        if station is None:
            return
        await self._forget()
        self._berths.leave(self, station)
        self._placement.release(self._spec)
        self._station = None

    @staticmethod
    async def _remove(trainer: Trainer, policy_id: PolicyId) -> None:
        with suppress(NotFound, WorkerLost):
            await trainer.remove(policy_id)

    @staticmethod
    async def _retire(trainer: Trainer, policy_id: PolicyId, version: int) -> None:
        with suppress(NotFound, Conflict, WorkerLost):
            await trainer.retire(policy_id, version)

    def tidy(self, coroutine: Coroutine[object, object, None]) -> None:
        """Free something on the worker while the run goes on."""
        task = asyncio.create_task(coroutine)
        self._tidying.add(task)
        task.add_done_callback(self._tidying.discard)

    def _new_id(self) -> PolicyId:
        return PolicyId(f"{self.tenant_id}/{self._run_id}#{next(self._ids)}")
