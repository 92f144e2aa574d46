"""Executes the operations of one run, one after another, each to exactly one outcome.

    journal ─► its turn ─┬─ pass ──────────► gate ─► worker ─► outcome stored ─► visible
                         ├─ step, load ────► worker ─► state and outcome in one commit ─► visible
                         └─ save ──────────► files written ─► checkpoint and outcome ─► visible

- Passes in a row are at the worker together, so many at most; everything else waits for those
  before it. Outcomes are stored in the order of numbers.
- A lost worker's operations begin anew, on what the store knows; so they do after a restart. What
  was stored is never done again.
- The gradient lacks a pass that failed: the next step fails too, clears it, and all is well again.
  A step that fails, for whatever reason, clears it.
- Fates: a client's fault fails its operation (`user`), ours too (`server`); a lost worker costs
  time; a store that cannot write holds the run up.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from marlaas import runtime
from marlaas.errors import (
    Conflict,
    InvalidRequest,
    MarlaasError,
    StoreUnavailable,
    WorkerLost,
)
from marlaas.loop import operations as ops
from marlaas.loop.concurrency import beside_the_loop
from marlaas.loop.journal import Entry, Journal
from marlaas.loop.operations import Category, OperationKind, QueueState, Result, Waiting
from marlaas.loop.run_policy import RunPolicy
from marlaas.loop.run_verbs import INCOMPLETE, Done, RunVerbs
from marlaas.loop.usage import Tenants
from marlaas.store import codec
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    FORWARD_BACKWARD,
    DatumOutput,
    Operation,
    OperationState,
    Run,
    TenantId,
    Usage,
)

logger = logging.getLogger(__name__)

MAX_LOSSES = 6
"""Workers that may be lost over one operation before it fails: it may be what ends them, and they
have other tenants."""

UNCHECKED_BYTES = 256 << 20
"""Passes that the journal keeps for the gradient of a run before it matters what its tenant stores:
a full storage takes no checkpoints, and lets nobody pile up passes without a step."""

STOPPING = "the server is stopping"
NEVER_CAME = "the operation of this number did not come in time; those behind it were given up"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The operator's settings of runs."""

    max_loaded: int = 32
    """Runs that one worker holds; those that idle make room."""
    max_training_tokens: int = 4096
    """Tokens that one tenant has in training at one worker, unless a single pass has more."""
    max_passes: int = 16
    """Passes of one run that are at its worker at once."""
    gap_timeout_s: float = 60.0
    """How long operations wait for one with a smaller number that has not come, since the last of
    them came."""
    max_waiting_bytes: int = 512 << 20
    """Operations of one tenant that have no outcome yet; more are to be sent later."""
    drain_s: float = 10.0
    """How long `close` lets what is at workers come to its end."""


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """What a worker said of a pass, and what that cost."""

    outputs: list[DatumOutput]
    device_s: float


Passes = deque[tuple[Entry, "asyncio.Task[PassOutcome]"]]


class Runner:
    """One run: idle -> `wake` -> working, until nothing is left -> idle.

    runner = Runner("acme", run, Journal(next_seq=1), policy, store, ...)
    runner.journal.add(entry)
    runner.wake()
    result = await entry.done
    """

    def __init__(  # noqa: PLR0913, what it is made of
        self,
        tenant_id: TenantId,
        run: Run,
        journal: Journal,
        policy: RunPolicy,
        store: AsyncStore,
        *,
        tenants: Tenants,
        settings: RunnerSettings,
        on_idle: Callable[["Runner"], None] = lambda runner: None,
    ) -> None:
        self.tenant_id = tenant_id
        self.run = run
        """As it is in the store."""
        self.journal = journal
        self.policy = policy
        self.is_over = False
        """Its client has left: it need not stay on its worker."""
        self._store = store
        self._tenants = tenants
        self._settings = settings
        self._verbs = RunVerbs(tenant_id, policy, store, tenants)
        self._on_idle = on_idle
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._paused: Waiting | None = None
        self._has_gradient = True
        """Passes may have added to it since it was cleared."""
        self._unchecked_bytes = 0
        """Of passes since the gradient was cleared, or since storage was looked at."""

    @property
    def is_idle(self) -> bool:
        return self._task is None

    @property
    def waiting(self) -> Waiting:
        """Why the operations without an outcome have none."""
        if self._paused is not None:
            return self._paused
        if self.policy.waits_for:
            return Waiting(queue_state=QueueState.PAUSED_CAPACITY, reason=self.policy.waits_for)
        missing = self.journal.missing_seq
        reason = "" if missing is None else f"operation {missing} has not come yet"
        return Waiting(reason=reason)

    # Life -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """There may be something to do."""
        if self._task is None and len(self.journal) and not self._is_stopping:
            self.policy.is_busy = True
            self._task = asyncio.create_task(self._work(), name=f"run {self.run.run_id}")
            self._task.add_done_callback(self._rest)

    async def stop(self) -> None:
        """Let what is at the worker come to its end, begin nothing more. Nothing is lost."""
        self._is_stopping = True
        self.journal.changed.set()
        if self._task is not None:
            _, late = await asyncio.wait({self._task}, timeout=self._settings.drain_s)
            for task in late:
                task.cancel()
                await asyncio.wait({task})
        self.journal.stop(Waiting(reason=STOPPING))

    def _rest(self, task: "asyncio.Task[None]") -> None:
        self._task, self.policy.is_busy = None, False
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            logger.error("run %s stands still", self.run.run_id, exc_info=error)
            return
        if not self._is_stopping:
            self.wake()  # something may have come at the last moment
        if self._task is None:
            self._on_idle(self)

    async def _work(self) -> None:
        """Execute operations until none is left."""
        self.journal.put_back()
        while not self._is_stopping and len(self.journal):
            passes: Passes = deque()
            try:
                await self._work_through(passes)
            except WorkerLost as error:
                await self._begin_anew(passes, error)
            except StoreUnavailable as error:  # only when the server is told to stop
                logger.warning("run %s waits for the next server: %s", self.run.run_id, error)
                return
            finally:
                await _give_up(passes)

    async def _work_through(self, passes: Passes) -> None:
        journal = self.journal
        while True:
            journal.changed.clear()
            while passes and passes[0][1].done():
                await self._finish_pass(*passes.popleft())
            entry = None if self._is_stopping else journal.peek()
            if entry is not None and self.policy.must_make_room(has_gradient=self._has_gradient):
                if passes:
                    await journal.changed.wait()
                else:
                    await self.policy.make_room()
                continue
            if entry is None and not passes:
                if self._is_stopping or not len(journal):
                    return
                await self._wait_out_gap()
            elif entry is not None and self._may_begin(entry, passes):
                await self._begin(entry, passes)
            else:
                await journal.changed.wait()

    def _may_begin(self, entry: Entry, passes: Passes) -> bool:
        """Return whether an operation need not wait for those before it."""
        if not passes:
            return True
        is_full = len(passes) >= self._settings.max_passes
        is_held_up = is_full or self._is_piling_up(entry) or self._why_spent(entry)
        return entry.kind.is_pass and not is_held_up

    async def _begin(self, entry: Entry, passes: Passes) -> None:
        if self._why_spent(entry):
            reason = self._why_spent(entry)
            with self._pausing(QueueState.PAUSED_RATE_LIMIT, reason), self.policy.resting():
                await self._tokens_left()
            return
        self.journal.take()
        if not entry.kind.is_pass:
            await self._execute(entry)
            return
        assert isinstance(entry.body, ops.ForwardBackward)
        if not passes:
            try:
                await self._check_storage(entry)
                await self.policy.bring()
            except (WorkerLost, StoreUnavailable):
                raise
            except Exception as error:
                await self._fail(entry, error)
                return
        self._has_gradient |= not entry.body.is_forward_only
        self._unchecked_bytes += 0 if entry.body.is_forward_only else entry.num_bytes
        task = asyncio.create_task(self._pass(entry.body))
        task.add_done_callback(lambda _: self.journal.changed.set())
        passes.append((entry, task))

    async def _begin_anew(self, passes: Passes, error: WorkerLost) -> None:
        """A worker was lost: whatever was started is started again, once there is a worker."""
        logger.warning("run %s: %s", self.run.run_id, error)
        await _give_up(passes)
        self.policy.drop()
        self.journal.put_back()
        entry = self.journal.peek()
        if entry is None:
            return
        entry.num_losses += 1
        if entry.num_losses >= MAX_LOSSES:
            self.journal.take()
            text = f"given up after {MAX_LOSSES} lost workers: {error}"
            await self._fail(entry, WorkerLost(text))

    # Passes ---------------------------------------------------------------------------------

    async def _pass(self, body: ops.ForwardBackward) -> PassOutcome:
        """Have a pass computed when the tenant's share allows it."""
        gate, num_tokens = self.policy.gate, body.num_tokens
        async with gate.passing(self.tenant_id, num_tokens):
            outputs = await self.policy.run_pass(body)
        device_s = gate.charge(self.tenant_id, num_tokens, is_forward_only=body.is_forward_only)
        return PassOutcome(outputs, device_s)

    def _is_piling_up(self, entry: Entry) -> bool:
        is_kept = entry.kind is OperationKind.FORWARD_BACKWARD
        return is_kept and self._unchecked_bytes + entry.num_bytes > UNCHECKED_BYTES

    async def _check_storage(self, entry: Entry) -> None:
        """Refuse a pass whose payload has no room in what the tenant may store.

        Raises:
            QuotaExceeded: it is used up.
        """
        if self._is_piling_up(entry):
            await self._verbs.check_storage()
            self._unchecked_bytes = 0

    async def _finish_pass(self, entry: Entry, task: "asyncio.Task[PassOutcome]") -> None:
        body = entry.body
        assert isinstance(body, ops.ForwardBackward)
        try:
            outcome = task.result()
            value, result = await beside_the_loop(
                body.num_cells, lambda: _told(body, outcome.outputs)
            )
        except WorkerLost:
            raise
        except Exception as error:
            await self._fail(entry, error)
            return
        usage = Usage(trained_tokens=body.num_tokens, device_s=outcome.device_s)
        await self._store.call(
            Store.finish_operation,
            *(self.tenant_id, self.run.run_id, entry.seq),
            result=result,
            usage=usage,
        )
        self._tenants.use(self.tenant_id, tokens=usage.trained_tokens)
        self.journal.finish(entry, Result(kind=entry.kind, value=value))
        self._learn_rates()

    def _learn_rates(self) -> None:
        """Ask the worker how long its work takes, now and then, beside the work."""
        if self.policy.is_loaded:
            self.policy.tidy(self.policy.station.learn_rates())

    def _why_spent(self, entry: Entry) -> str:
        """Return why a pass has to wait for the next day, or nothing."""
        return self._tenants.why_no_tokens(self.tenant_id) if entry.kind.is_pass else ""

    async def _tokens_left(self) -> None:
        """Wait until the tenant may use tokens, or the server is told to stop."""
        waiting = asyncio.create_task(self._tenants.tokens_left(self.tenant_id))
        try:
            while not waiting.done() and not self._is_stopping:
                changed = asyncio.create_task(self.journal.changed.wait())
                await asyncio.wait({waiting, changed}, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self.journal.changed.clear()
        finally:
            waiting.cancel()

    # Everything else ------------------------------------------------------------------------

    async def _execute(self, entry: Entry) -> None:
        """Execute an operation that is not a pass, to its outcome."""
        try:
            if entry.kind is OperationKind.OPTIM_STEP and self.journal.is_incomplete:
                raise InvalidRequest(INCOMPLETE)
            done = await self._verbs.carry_out(entry.body, self.run, entry.seq)
            try:
                await self._store_outcome(entry, done)
            except BaseException:
                done.undo()
                raise
        except (WorkerLost, StoreUnavailable):
            raise
        except Exception as error:
            await self._fail(entry, error)
        else:
            self.journal.finish(entry, Result(kind=entry.kind, value=done.value))
            await done.settle()

    # Outcomes -------------------------------------------------------------------------------

    async def _store_outcome(self, entry: Entry, done: Done) -> None:
        """Store a value; and what the run becomes, which clears its gradient."""
        key, result = (self.tenant_id, self.run.run_id, entry.seq), codec.encode(done.value)
        if done.run is None:
            await self._store.call(Store.finish_operation, *key, result=result)
            return
        self.run = await self._commit(key, done.run, result=result)
        self._note_cleared()

    def _note_cleared(self) -> None:
        """The gradient was cleared, and the passes that it was made of are gone."""
        self.journal.is_incomplete = self._has_gradient = False
        self._unchecked_bytes = 0

    async def _commit(
        self,
        key: tuple[TenantId, str, int],
        run: Run,
        *,
        result: bytes = b"",
        error: str = "",
        category: str = "",
    ) -> Run:
        return await self._store.call(
            Store.commit_run_step,
            *key,
            version=run.version,
            state_path=run.state_path,
            state_kind=run.state_kind,
            adapter_hash=run.adapter_hash,
            result=result,
            error=error,
            category=category,
        )

    async def _fail(self, entry: Entry, error: Exception) -> None:
        """Make the error of an operation visible. A step clears the gradient all the same.

        An error that nobody raised on purpose is our fault: it costs this operation, and what is on
        the worker is made anew; other runs go on.
        """
        if not isinstance(error, MarlaasError):
            logger.error("operation %d of run %s", entry.seq, self.run.run_id, exc_info=error)
            self.policy.drop()
            error = MarlaasError(f"a fault of the server: {type(error).__name__}")
        result = ops.failure(entry.kind, error)
        key = (self.tenant_id, self.run.run_id, entry.seq)
        if entry.kind is OperationKind.OPTIM_STEP:
            try:
                await self.policy.clear_gradient()
            except WorkerLost:
                self.policy.drop()
            self.run = await self._commit(
                key, self.run, error=result.error, category=result.category
            )
            self._note_cleared()
        else:
            await self._store.call(
                Store.finish_operation, *key, error=result.error, category=result.category
            )
            self.journal.is_incomplete |= entry.kind is OperationKind.FORWARD_BACKWARD
        self.journal.finish(entry, result)

    # Gaps -----------------------------------------------------------------------------------

    async def _wait_out_gap(self) -> None:
        """Wait for the number that the others wait for. When its time is over they are given up."""
        journal = self.journal
        assert journal.missing_seq is not None, "nothing is at work, and nothing is waited for"
        next_seq, is_incomplete = await self._store.call(
            used_numbers, self.tenant_id, self.run.run_id
        )
        if next_seq > journal.next_seq:  # refused before this server began, or just now
            journal.skip_to(next_seq, is_incomplete=is_incomplete)
            return
        left_s = journal.gap_since_s + self._settings.gap_timeout_s - runtime.now_s()
        with suppress(TimeoutError), self.policy.resting():
            async with asyncio.timeout(max(0.0, left_s)):
                await journal.changed.wait()
            return
        await self._give_up_behind_gap(journal.next_seq, journal.last_seq)

    async def _give_up_behind_gap(self, missing_seq: int, last_seq: int) -> None:
        """Fail what waits behind a gap. Missing numbers are used up as failed passes, since that is
        what they may have been."""
        journal = self.journal
        for seq in range(missing_seq, last_seq + 1):
            if seq < journal.next_seq:
                continue  # refused before
            entry = journal.find(seq)
            if entry is None and not await self._use_up(seq):
                return  # it has come after all
            if entry is not None:
                assert journal.peek() is entry
                journal.take()
                text = (
                    f"operation {missing_seq} of run {self.run.run_id} did not come within "
                    f"{self._settings.gap_timeout_s:g} s: {seq}, behind it, was given up"
                )
                await self._fail(entry, MarlaasError(text))

    async def _use_up(self, seq: int) -> bool:
        """Note that a number never came; return False if it did come."""
        run_id = self.run.run_id
        missing = Operation(
            run_id=run_id,
            seq=seq,
            kind=FORWARD_BACKWARD,
            request_id=ops.request_id_of(run_id, seq),
            state=OperationState.FAILED,
            error=NEVER_CAME,
            error_category=Category.SERVER.value,
        )
        try:
            await self._store.call(Store.accept, self.tenant_id, missing)
        except Conflict:
            for operation in await self._store.call(Store.accepted, self.tenant_id, run_id):
                self.journal.add(Entry.of(operation))
            return False
        self.journal.refuse(seq, is_pass=True)
        return True

    @contextmanager
    def _pausing(self, state: QueueState, reason: str) -> Iterator[None]:
        """Say meanwhile why nothing goes on."""
        self._paused = Waiting(queue_state=state, reason=reason)
        try:
            yield
        finally:
            self._paused = None


def _told(body: ops.ForwardBackward, outputs: list[DatumOutput]) -> tuple[ops.PassResult, bytes]:
    """Return what a pass says, and the same as it is stored."""
    value = ops.pass_result(body, outputs)
    return value, codec.encode(value)


def used_numbers(store: Store, tenant_id: TenantId, run_id: str) -> tuple[int, bool]:
    """Return the first number of a run without an outcome, and whether the gradient lacks a pass of
    those before it."""
    next_seq = store.next_seq(tenant_id, run_id)
    return next_seq, store.has_failed_pass(tenant_id, run_id, before_seq=next_seq)


async def _give_up(passes: Passes) -> None:
    """End passes whose outcome nobody will store."""
    tasks = [task for _, task in passes]
    passes.clear()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
