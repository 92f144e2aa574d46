"""Runs: policies that clients drive operation by operation, beside the jobs of a controller.

    create ─► operation 0 ─┐
    submit ─► operation n ─┼─► journal (durable) ─► request id        wait(request id) ─► outcome
    reject ─► number used ─┘        │                                        ▲
                                    └─► runner of the run ───────────────────┘

| module | answers |
|---|---|
| `operations.py` | what may be asked, and what comes of it |
| `journal.py` | whose turn it is |
| `runner.py` | how each is executed, to exactly one outcome |
| `run_policy.py` | where the run is, and how it comes back |
| `training_gate.py` | how much of a tenant is at a worker |

- Accepted is durable: a request id is given out once the operation is in the store, and its outcome
  is there before anybody sees it. A restart goes on with what has none.
- The same number again is the same operation, and gives the same request id.
- Every id is looked up under its tenant first: another's looks like nothing.
- Nobody polls: whoever waits for an outcome is woken by it.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from marlaas.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from marlaas.loop.concurrency import beside_the_loop, to_its_end
from marlaas.loop.journal import Entry, Journal
from marlaas.loop.operations import (
    CREATE_SEQ,
    Body,
    Category,
    CreateRun,
    ForwardBackward,
    OperationKind,
    Result,
    Waiting,
    encode_body,
    kind_of,
    request_id_of,
    result_of,
    split_request_id,
)
from marlaas.loop.patience import PatientStore
from marlaas.loop.policies import Placement, Station
from marlaas.loop.run_policy import Berths, RunPolicy
from marlaas.loop.run_verbs import source_of
from marlaas.loop.runner import NEVER_CAME, Runner, RunnerSettings, used_numbers
from marlaas.loop.training_gate import TrainingGate
from marlaas.loop.usage import Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    Checkpoint,
    Operation,
    OperationState,
    Run,
    TenantId,
)

FULL_RETRY_S = 2.0
"""What a tenant with too much waiting is told to wait."""

MAX_AHEAD = 10_000
"""A number may be so far beyond the next one that is missing. When a gap is given up, each number
in it is used up."""


class Runs:
    """All runs that have work or are on a worker: `start -> verbs* -> close`.

    runs = Runs(controller.placement, store, tenants=controller.tenants)
    await runs.start()                                       # goes on with what was accepted
    request_id = await runs.create("acme", run)
    await runs.submit("acme", run.run_id, 1, ForwardBackward(data=data, objective=objective))
    result = await runs.wait("acme", request_id, timeout_s=25.0)      # Result, or Waiting
    await runs.close()
    """

    def __init__(
        self,
        placement: Placement,
        store: AsyncStore,
        *,
        tenants: Tenants | None = None,
        settings: RunnerSettings | None = None,
    ) -> None:
        self._placement = placement
        self._store = PatientStore(store)
        self._tenants = tenants or Tenants({})
        self._settings = settings or RunnerSettings()
        self._runners: dict[tuple[TenantId, str], Runner] = {}
        self._opening = asyncio.Lock()
        self._berths = Berths(self._settings.max_loaded)
        self._gates: dict[str, TrainingGate] = {}
        self._ids = itertools.count(1)
        self._background: set[asyncio.Task[None]] = set()
        self._is_closing = False

    # Life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Go on with every accepted operation of the store."""
        for tenant_id, run_id in await self._store.call(Store.unfinished_runs):
            (await self._open(tenant_id, run_id)).wake()

    async def close(self) -> None:
        """Let what is at workers come to its end, take it off them, and begin nothing more; what
        was accepted stays in the store. Whoever waits is told to ask again."""
        self._is_closing = True
        runners = list(self._runners.values())
        stopping = [asyncio.create_task(runner.stop()) for runner in runners]
        await asyncio.sleep(0)  # every runner is told before the store gives up
        self._store.give_up()
        await asyncio.gather(*stopping)
        for runner in runners:
            self._spawn(runner.policy.unload())
        if self._background:
            _, late = await asyncio.wait(self._background, timeout=self._settings.drain_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # Verbs ----------------------------------------------------------------------------------

    async def create(
        self,
        tenant_id: TenantId,
        run: Run,
        *,
        source: tuple[TenantId, Checkpoint] | None = None,
        with_optimizer: bool = False,
    ) -> str:
        """Accept a new run, fresh or from a checkpoint that the tenant may read; return the id of
        the request. The run takes over the checkpoint's files.

        Raises:
            NotFound: this tenant has no such session, or the checkpoint's files are gone.
            Conflict: there is another run of that number or id.
            QuotaExceeded: the tenant has too many runs at work.
            InvalidRequest: the checkpoint has no optimizer to go on with.
        """
        path = None
        if source is not None:
            _, checkpoint = source
            path = checkpoint.path
            state, kind = source_of(checkpoint, with_optimizer=with_optimizer)
            run = replace(
                run, state_path=state, state_kind=kind, adapter_hash=checkpoint.adapter_hash
            )
        max_live = self._tenants.quotas(tenant_id).max_runs
        await self._store.inner.call(Store.add_run, tenant_id, run, max_live=max_live)
        body = CreateRun(path=path, with_optimizer=with_optimizer)
        return await self.submit(tenant_id, run.run_id, CREATE_SEQ, body)

    async def submit(self, tenant_id: TenantId, run_id: str, seq: int, body: Body) -> str:
        """Accept an operation; return the id of the request. Again: the same id, and nothing else.

        Raises:
            NotFound: this tenant has no such run.
            Conflict: the number was used for something else, or the run has ended.
            QuotaExceeded: too much of the tenant waits; the next in order is always taken.
            StoreUnavailable: it was not accepted; send it again.
        """
        kind = kind_of(body)
        num_cells = body.num_cells if isinstance(body, ForwardBackward) else 0
        payload = await beside_the_loop(num_cells, lambda: encode_body(body))
        self._check_room(tenant_id, run_id, seq, len(payload))
        operation = Operation(
            run_id=run_id,
            seq=seq,
            kind=kind.value,
            request_id=request_id_of(run_id, seq),
            payload=payload,
        )
        # What is accepted is executed, even if its client has just left.
        return await to_its_end(self._take(tenant_id, operation, body))

    async def reject(
        self,
        tenant_id: TenantId,
        run_id: str,
        seq: int,
        error: str,
        *,
        kind: OperationKind = OperationKind.FORWARD_BACKWARD,
    ) -> str:
        """Note that the request of a number was refused: it is used up, and failed.

        After a refused `forward_backward` the next step fails, like after one that failed: so say
        which kind it was, if it was another.

        Raises:
            NotFound: this tenant has no such run.
            Conflict: the number was used for something else.
        """
        operation = Operation(
            run_id=run_id,
            seq=seq,
            kind=kind.value,
            request_id=request_id_of(run_id, seq),
            state=OperationState.FAILED,
            error=error or "refused",
            error_category=Category.USER.value,
        )
        refused = await self._accept(tenant_id, operation)
        runner = self._runners.get((tenant_id, run_id))
        if runner is not None:
            runner.journal.refuse(seq, is_pass=kind is OperationKind.FORWARD_BACKWARD)
        return refused.request_id

    async def wait(
        self, tenant_id: TenantId, request_id: str, timeout_s: float
    ) -> Result | Waiting:
        """Return the outcome of an operation as soon as there is one; `Waiting` when there is none
        in time. It may be asked for again, until results of its age are deleted.

        Raises:
            NotFound: this tenant has no such request, or its outcome is not kept any more.
        """
        run_id, seq = split_request_id(request_id)
        key = (tenant_id, run_id)
        entry = self._runners[key].journal.find(seq) if key in self._runners else None
        if entry is None:
            operation = await self._store.inner.call(Store.operation, tenant_id, run_id, seq)
            if operation.state is not OperationState.ACCEPTED:
                return result_of(operation)
            runner = await self._open(tenant_id, run_id)
            runner.wake()
            entry = runner.journal.find(seq)
        if entry is None:  # it was finished meanwhile
            return result_of(await self._store.inner.call(Store.operation, tenant_id, run_id, seq))
        await asyncio.wait({entry.done}, timeout=timeout_s)
        if entry.done.done():
            return entry.done.result()
        runner = self._runners.get(key)
        return runner.waiting if runner is not None else Waiting()

    async def end_session(self, tenant_id: TenantId, session_id: str) -> None:
        """A client has left: its runs leave their workers once they have nothing to do."""
        for runner in list(self._runners.values()):
            if runner.tenant_id == tenant_id and runner.run.session_id == session_id:
                runner.is_over = True
                self._note_idle(runner)

    async def drop_tenant(self, tenant_id: TenantId) -> None:
        """A tenant was deleted: nothing of its runs goes on."""
        for key, runner in list(self._runners.items()):
            if runner.tenant_id == tenant_id:
                self._runners.pop(key, None)
                await runner.stop()
                await runner.policy.unload()

    # ----------------------------------------------------------------------------------------

    async def _take(self, tenant_id: TenantId, operation: Operation, body: Body) -> str:
        """Accept an operation, and hand it to its run; return the id of the request."""
        accepted = await self._accept(tenant_id, operation)
        if accepted.state is OperationState.ACCEPTED and not self._is_closing:
            runner = await self._open(tenant_id, operation.run_id)
            kind, num_bytes = OperationKind(operation.kind), len(operation.payload)
            entry = Entry(seq=operation.seq, kind=kind, body=body, num_bytes=num_bytes)
            runner.journal.add(entry)
            runner.wake()
        return accepted.request_id

    async def _accept(self, tenant_id: TenantId, operation: Operation) -> Operation:
        """Put an operation into the journal; one that comes after it was given up finds that.

        Raises:
            InvalidRequest: its number is far beyond any that a client could be at.
        """
        store = self._store.inner
        runner = self._runners.get((tenant_id, operation.run_id))
        try:
            next_seq = None if runner is None else runner.journal.next_seq
            return await store.call(_accept_near, tenant_id, operation, next_seq)
        except Conflict:
            with suppress(NotFound):
                stored = await store.call(
                    Store.operation, tenant_id, operation.run_id, operation.seq
                )
                if stored.error == NEVER_CAME:
                    return stored
            raise

    def _check_room(self, tenant_id: TenantId, run_id: str, seq: int, num_bytes: int) -> None:
        """Refuse what would make too much wait, unless the others wait for it."""
        runner = self._runners.get((tenant_id, run_id))
        if runner is None or seq <= runner.journal.next_seq or runner.journal.find(seq):
            return
        waiting = sum(
            one.journal.num_bytes for one in self._runners.values() if one.tenant_id == tenant_id
        )
        if waiting + num_bytes > self._settings.max_waiting_bytes:
            raise QuotaExceeded(
                f"operations of {waiting} bytes wait to be executed; expected at most "
                f"{self._settings.max_waiting_bytes} together with this one",
                FULL_RETRY_S,
            )

    async def _open(self, tenant_id: TenantId, run_id: str) -> Runner:
        """Return the runner of a run, with all that is accepted and has no outcome."""
        key = (tenant_id, run_id)
        if key in self._runners:
            return self._runners[key]
        async with self._opening:
            if key not in self._runners:
                await self._tenants.learn_today(self._store.inner, tenant_id)
                known = await self._store.inner.call(read_run, tenant_id, run_id)
                self._runners[key] = self._make_runner(tenant_id, known)
            return self._runners[key]

    def _make_runner(self, tenant_id: TenantId, known: "KnownRun") -> Runner:
        run_id = known.run.run_id
        journal = Journal(known.next_seq, is_incomplete=known.is_incomplete)
        for operation in known.accepted:
            journal.add(Entry.of(operation))
        policy = RunPolicy(
            tenant_id,
            run_id,
            self._placement,
            self._store,
            berths=self._berths,
            gates=self._gate,
            ids=self._ids,
            on_unload=lambda: self._note_idle(runner),
        )
        runner = Runner(
            tenant_id,
            known.run,
            journal,
            policy,
            self._store,
            tenants=self._tenants,
            settings=self._settings,
            on_idle=self._note_idle,
        )
        runner.is_over = known.is_over
        return runner

    def _gate(self, station: Station) -> TrainingGate:
        name = station.worker.name
        if name not in self._gates:
            self._gates[name] = TrainingGate(station, max_tokens=self._settings.max_training_tokens)
        return self._gates[name]

    def _note_idle(self, runner: Runner) -> None:
        """A run has nothing to do: it may make room, and is forgotten once it is nowhere."""
        self._berths.note_idle()
        if not runner.is_idle or self._is_closing:
            return
        if runner.policy.is_absent:
            key = (runner.tenant_id, runner.run.run_id)
            if self._runners.get(key) is runner and not len(runner.journal):
                del self._runners[key]
        elif runner.is_over or not runner.policy.is_loaded:
            self._spawn(runner.policy.unload())

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


@dataclass(frozen=True, slots=True)
class KnownRun:
    """What the store knows of a run and its operations."""

    run: Run
    next_seq: int
    is_incomplete: bool
    """The gradient lacks a pass that failed."""
    accepted: Sequence[Operation]
    is_over: bool
    """Its session has ended."""


def read_run(store: Store, tenant_id: TenantId, run_id: str) -> KnownRun:
    run = store.run(tenant_id, run_id)
    next_seq, is_incomplete = used_numbers(store, tenant_id, run_id)
    is_over = store.session(tenant_id, run.session_id).finished_s is not None
    return KnownRun(run, next_seq, is_incomplete, store.accepted(tenant_id, run_id), is_over)


def _accept_near(
    store: Store, tenant_id: TenantId, operation: Operation, next_seq: int | None
) -> Operation:
    """Accept an operation whose number is not too far ahead of its run."""
    run_id, seq = operation.run_id, operation.seq
    if seq > MAX_AHEAD:
        next_seq = store.next_seq(tenant_id, run_id) if next_seq is None else next_seq
        if seq > next_seq + MAX_AHEAD:
            raise InvalidRequest(
                f"seq_id = {seq}, where run {run_id} is at {next_seq}; expected the next number, "
                f"or one at most {MAX_AHEAD} beyond it"
            )
    return store.accept(tenant_id, operation)
