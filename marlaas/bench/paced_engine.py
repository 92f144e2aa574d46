"""An engine worker under virtual time: the real host, scheduler and packing; passes only take time.

    messages ─► PacedHost (the real one) ─► quantum: what it would take ─► cores ─► replies
                                                      ▲                     ▲
                                              PassTimes (measured)     server, sandboxes

What is computed next, for whom, and in which company is decided by the production code: the host's
turns between sampling and training, the generator's scheduler, the trainer's packing. Instead of a
pass its time is spent, and replies are those of a recording. Everything that computes shares the
machine's cores (`Cores`), the server process included, so that its work slows the workers down.
"""

import asyncio
import heapq
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from marlaas.config import EngineSettings
from marlaas.engine.generator import BatchGenerator
from marlaas.engine.kv_cache import Chunk, SlabPool
from marlaas.engine.packing import ChunkQueue, PassCost, Submission, cut
from marlaas.engine.scheduler import Scheduler
from marlaas.engine.sequence import LiveSequence
from marlaas.engine.trainer import LoraTrainer
from marlaas.engine.types import SequenceRequest, SequenceResult, Work
from marlaas.model.base import BaseModel
from marlaas.model.lora import Slot
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    AdamParams,
    AdapterSpec,
    Datum,
    DatumOutput,
    Objective,
    StepResult,
    StopReason,
    WorkerStats,
)
from marlaas.workers import messages as m
from marlaas.workers.host import EngineHost
from marlaas.workers.local import LocalWorker

ReplyOf = Callable[[str], Sequence[int]]
"""Returns the tokens that answer a request, by its id."""

ROW = torch.zeros(1)
"""Weights of every policy: nobody reads them."""

CROWDING = 1.6
"""How much longer work takes while more processes compute than there are cores: each finds its
caches filled by the others. Fitted to the measured makespan of 32 jobs; at 8 and 16 it hardly
matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """CPU seconds of one worker's work on `tiny`, one thread of an AMD EPYC with AVX-512.

    Fitted to a real host in one process that was driven with the pipeline's lengths (batches of 5
    to 115 rows in which sequences come and go, 1 to 32 policies; median error 5 %), times 1.25: so
    much more the same passes took in the worker processes of a run.
    """

    decode_s: float = 1.48e-3
    decode_row_s: float = 71e-6
    decode_slot_s: float = 69e-6
    """Per adapter version in the batch."""
    prefill_s: float = 2.0e-3
    prefill_token_s: float = 27e-6
    train_s: float = 9.9e-3
    train_token_s: float = 71e-6
    score_s: float = 2.25e-3
    score_token_s: float = 25e-6
    step_s: float = 1.8e-3
    """`optim_step` with its snapshot."""
    message_s: Mapping[type, float] = field(
        default_factory=lambda: {
            m.Generate: 160e-6,
            m.ForwardBackward: 500e-6,
            m.SaveAdapter: 2.2e-3,
            m.Create: 2.0e-3,
            m.Publish: 380e-6,
        }
    )
    """What taking a message and sending its reply costs, beside its passes."""
    other_message_s: float = 60e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimes:
    """CPU seconds of the server process for what it does for jobs: about 0.5 ms a trajectory.

    With the real server, over sockets to engines that replay a recording, it is 0.43 to 0.48 ms.
    """

    send_s: float = 80e-6
    """A call to a worker, and what leads to it."""
    reply_s: float = 105e-6
    """A worker's answer, and what follows from it."""
    store_s: Mapping[str, float] = field(
        default_factory=lambda: {
            "open_group": 180e-6,
            "finish_group": 0.8e-3,
            "commit_step": 1.2e-3,
        }
    )
    other_store_s: float = 180e-6


# ---------------------------------------------------------------------------------------------
# Cores


class Cores:
    """Processor sharing: whoever has work gets an equal part of `count` cores, one at most."""

    def __init__(self, count: int, *, speed: float = 1.0, crowding: float = CROWDING) -> None:
        self._count = count
        self._speed = speed
        self._crowding = crowding
        self._served_s = 0.0
        """What each task that was here all the time has got."""
        self._seen_s = 0.0
        self._work: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self.idle_s = 0.0
        """Core seconds that nobody wanted."""

    async def work(self, seconds: float) -> None:
        """Return once `seconds` of CPU have been had."""
        if seconds <= 0:
            return
        self._advance()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(
            self._work, (self._served_s + seconds / self._speed, next(self._order), done)
        )
        self._arm()
        await done

    @property
    def _rate(self) -> float:
        if len(self._work) <= self._count:
            return 1.0
        return self._count / len(self._work) / self._crowding

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        passed_s = now_s - self._seen_s
        self._served_s += passed_s * self._rate
        self.idle_s += passed_s * max(0, self._count - len(self._work))
        self._seen_s = now_s

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._work:
            left_s = max(0.0, self._work[0][0] - self._served_s) / self._rate
            self._timer = asyncio.get_running_loop().call_later(left_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._work and self._work[0][0] <= self._served_s + 1e-9:
            _, _, done = heapq.heappop(self._work)
            if not done.done():
                done.set_result(None)
        self._timer = None
        self._arm()


class Server:
    """The server process: one thing after another, each of which takes CPU."""

    def __init__(self, cores: Cores, times: ServerTimes) -> None:
        self.times = times
        self.busy_s = 0.0
        self._cores = cores
        self._todo: deque[tuple[float, Callable[[], object]]] = deque()
        self._arrived = asyncio.Event()

    def do(self, seconds: float, then: Callable[[], object]) -> None:
        """Spend `seconds` when their turn comes, then call `then`."""
        self._todo.append((seconds, then))
        self._arrived.set()

    async def spend(self, seconds: float) -> None:
        """Return once `seconds` were spent, after what was to be done before."""
        spent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.do(seconds, lambda: spent.done() or spent.set_result(None))
        await spent

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            if not self._todo:
                self._arrived.clear()
                await self._arrived.wait()
            seconds, then = self._todo.popleft()
            await self._cores.work(seconds)
            self.busy_s += seconds
            then()


class PacedStore(AsyncStore):
    """A store whose calls take the server's CPU."""

    def __init__(self, store: Store, server: Server) -> None:
        super().__init__(store, is_threaded=False)
        self._server = server

    async def call(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        times = self._server.times
        name = getattr(function, "__name__", "")
        spending = asyncio.ensure_future(
            self._server.spend(times.store_s.get(name, times.other_store_s))
        )
        try:
            await asyncio.shield(spending)
        except asyncio.CancelledError:
            await asyncio.wait([spending])
            function(self.store, *args, **kwargs)
            raise
        return function(self.store, *args, **kwargs)


# ---------------------------------------------------------------------------------------------
# Worker


class Spending:
    """CPU that a worker has used: passes add to it instead of computing."""

    def __init__(self) -> None:
        self.cpu_s = 0.0

    def spend(self, seconds: float) -> None:
        self.cpu_s += seconds


class PacedGenerator(BatchGenerator):
    """The real generator, but for its passes."""

    def __init__(
        self, settings: EngineSettings, base: object, reply_of: ReplyOf, spending: Spending,
        times: PassTimes,
    ) -> None:  # fmt: skip
        self.base = cast(BaseModel, base)
        self.max_context = settings.max_context
        self.decode_text = None
        self.is_exact = False
        self.pool = SlabPool(
            num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32,
            device=torch.device("cpu"), capacity_tokens=settings.kv_capacity_tokens,
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.pool,
            max_batch=settings.max_batch,
            budget_tokens=settings.prefill_budget_tokens,
        )
        self._batch = None
        self._scores = {}
        self._num_submitted = 0
        self._decodes_since_prefill = 0
        self._reply_of = reply_of
        self._spending = spending
        self._times = times
        self._replies: dict[str, Sequence[int]] = {}

    def submit(self, request: SequenceRequest) -> None:
        super().submit(request)
        self._replies[request.request_id] = self._reply_of(request.request_id)

    def _prefill(self, chunks: list[Chunk]) -> Work:
        num_tokens = sum(chunk.end - chunk.slab.length for chunk in chunks)
        times = self._times
        self._spending.spend(times.prefill_s + times.prefill_token_s * num_tokens)
        self.scheduler.prefilled(chunks)
        return Work("prefill", num_tokens)

    def _decode(self) -> tuple[list[SequenceResult], Work | None]:
        slabs = self.pool.decoding()
        if not slabs:
            return [], None
        sequences = cast(list[LiveSequence], [slab.owner for slab in slabs])
        num_slots = len({sequence.slot for sequence in sequences})
        times = self._times
        self._spending.spend(
            times.decode_s + times.decode_row_s * len(slabs) + times.decode_slot_s * num_slots
        )
        for slab in slabs:
            slab.length += 1
        ended = []
        for sequence in sequences:
            sequence.note_slot()
            reply = self._replies[sequence.request.request_id]
            num_sampled = sequence.num_sampled
            sequence.tokens.append(reply[num_sampled])
            sequence.logprobs.append(-1.0)
            if num_sampled + 1 == len(reply):
                ended.append(sequence)
        return [self._end_of(sequence) for sequence in ended], Work("decode", len(slabs))

    def _end_of(self, sequence: LiveSequence) -> SequenceResult:
        request = sequence.request
        del self._replies[request.request_id]
        has_stopped = sequence.tokens[-1] in request.sampling.stop_token_ids
        return self._finish(sequence, StopReason.STOP_TOKEN if has_stopped else StopReason.LENGTH)


@dataclass(slots=True)
class _State:
    spec: AdapterSpec
    version: int = 0


class PacedTrainer:
    """The real packing of passes; what they would compute is what was recorded."""

    def __init__(self, settings: EngineSettings, spending: Spending, times: PassTimes) -> None:
        self.cost = PassCost(cost_per_pair=2e-4)
        self._budget_tokens = settings.train_budget_tokens
        self._queue = ChunkQueue(settings.train_budget_tokens, is_exact=False)
        self._states: dict[Hashable, _State] = {}
        self._spending = spending
        self._times = times

    @property
    def has_work(self) -> bool:
        return len(self._queue) > 0

    def create(self, key: Hashable, spec: AdapterSpec) -> None:
        self._states[key] = _State(spec)

    def weights(self, key: Hashable) -> torch.Tensor:
        return ROW

    def adapter_hash(self, key: Hashable) -> str:
        return f"{zlib.crc32(str(key).encode()):08x}{self._states[key].version:08x}"

    def submit_forward_backward(
        self, key: Hashable, slot: Slot, data: Sequence[Datum], objective: Objective, ticket: int
    ) -> None:
        self._submit(key, slot, data, objective, ticket)

    def submit_forward(
        self, key: Hashable, slot: Slot | None, data: Sequence[Datum], ticket: int
    ) -> None:
        self._submit(key, slot, data, None, ticket)

    def _submit(
        self, key: Hashable, slot: Slot | None, data: Sequence[Datum],
        objective: Objective | None, ticket: int,
    ) -> None:  # fmt: skip
        submission = Submission(
            ticket=ticket, key=key, slot=slot, data=data, objective=objective, outputs=[]
        )
        self._queue.push(cut(submission, self.cost, self._budget_tokens))

    def step(self) -> tuple[list[tuple[Hashable, list[DatumOutput]]], Work | None]:
        chunks = self._queue.pop_pass()
        if not chunks:
            return [], None
        num_tokens = round(sum(chunk.cost for chunk in chunks))
        is_training, times = chunks[0].submission.is_training, self._times
        if is_training:
            self._spending.spend(times.train_s + times.train_token_s * num_tokens)
        else:
            self._spending.spend(times.score_s + times.score_token_s * num_tokens)
        finished = []
        for chunk in chunks:
            submission = chunk.submission
            submission.num_chunks_left -= 1
            if not submission.num_chunks_left:
                finished.append((submission.ticket, _outputs(submission.data)))
        return finished, Work("train" if is_training else "score", num_tokens)

    def optim_step(self, key: Hashable, adam: AdamParams) -> StepResult:
        self._spending.spend(self._times.step_s)
        self._states[key].version += 1
        return StepResult(
            version=self._states[key].version,
            grad_norm=1.0,
            adapter_hash=self.adapter_hash(key),
            is_vetoed=False,
        )

    def save_snapshot(self, key: Hashable, path: str, *, is_synced: bool = False) -> None:
        Path(path).write_bytes(b"")

    def remove(self, key: Hashable) -> list[Hashable]:
        dropped = [chunk.submission.ticket for chunk in self._queue.drop(key)]
        self._states.pop(key, None)
        return list(dict.fromkeys(dropped))


def _outputs(data: Sequence[Datum]) -> list[DatumOutput]:
    return [DatumOutput(logprobs=datum.sampling_logprobs, loss=0.0) for datum in data]


class _Bank:
    """Slots without weights."""

    def __init__(self) -> None:
        self._rows = itertools.count()

    def allocate(self, *, rank: int, scale: float, kinds: object) -> Slot:
        return Slot(rank, next(self._rows))

    def write(self, slot: Slot, row: object) -> None:
        pass

    def free(self, slot: Slot) -> None:
        pass


class PacedHost(EngineHost):
    """The real host, on a clock of the CPU that it would have used."""

    def __init__(self, settings: EngineSettings, reply_of: ReplyOf, times: PassTimes) -> None:
        base = SimpleNamespace(vocab_size=1 << 31, bank=_Bank(), is_prepacked=False, name="paced")
        self.spending = Spending()
        self._times = times
        generator = PacedGenerator(settings, base, reply_of, self.spending, times)
        trainer = PacedTrainer(settings, self.spending, times)
        super().__init__(
            settings.name, cast(BaseModel, base), generator, cast(LoraTrainer, trainer)
        )

    def handle(self, call_id: int, message: m.Call) -> None:
        super().handle(call_id, message)
        times = self._times
        self.spending.spend(times.message_s.get(type(message), times.other_message_s))

    def _now(self) -> tuple[float, float]:  # type: ignore[override]
        return self.spending.cpu_s, self.spending.cpu_s

    def statistics(self) -> WorkerStats:
        """Return where its time went."""
        return cast(m.ReplyStats, self._stats(0, m.GetStats())).stats

    def _check_targets(self, spec: AdapterSpec) -> None:
        pass

    def _save_adapter(self, call_id: int, message: m.SaveAdapter) -> m.Reply:
        Path(message.folder).mkdir(parents=True, exist_ok=True)
        return m.ReplyHash(self._live_version(message.policy_id, message.version).adapter_hash)


class PacedWorker(LocalWorker):
    """An engine process that is never started: its messages go through the server's hands."""

    def __init__(
        self, settings: EngineSettings, reply_of: ReplyOf, cores: Cores, server: Server, *,
        times: PassTimes,
    ) -> None:  # fmt: skip
        super().__init__(settings)
        self.host = PacedHost(settings, reply_of, times)
        self.busy_s = 0.0
        """Time in which it had work, waiting for a core included."""
        self.incarnation = 1
        self.lost.clear()
        self._cores = cores
        self._server = server
        self._inbox: list[tuple[int, m.Call]] = []
        self._arrived = asyncio.Event()

    def _send(self, call_id: int, message: m.Call) -> None:
        self._server.do(self._server.times.send_s, lambda: self._receive(call_id, message))

    def _receive(self, call_id: int, message: m.Call) -> None:
        self._inbox.append((call_id, message))
        self._arrived.set()

    async def run(self) -> None:
        """Work until cancelled: take what has arrived, one quantum, replies."""
        host, loop = self.host, asyncio.get_running_loop()
        while True:
            if not self._inbox and not host.has_work:
                self._arrived.clear()
                await self._arrived.wait()
            before_s, began_s = host.spending.cpu_s, loop.time()
            inbox, self._inbox = self._inbox, []
            for call in inbox:
                host.handle(*call)
            if host.has_work:
                host.run_quantum()
            await self._cores.work(host.spending.cpu_s - before_s)
            self.busy_s += loop.time() - began_s
            replies = list(host.replies)
            host.replies.clear()
            for call_id, reply in replies:
                self._server.do(
                    self._server.times.reply_s,
                    lambda call_id=call_id, reply=reply: self._take(call_id, reply),
                )
