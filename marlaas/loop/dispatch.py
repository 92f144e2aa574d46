"""Orders of completions on their way to workers: `n` samples of one prompt under one version.

    order ─► one of the tenant's places ─► station ─► turn in its lane ─► version loaded beside
      │                                       ▲                                  │
      └── waits as a record, not as a task    └──── its worker was lost          ▼
                                  the order's result ◄── all samples ◄── sampled, settled

- A tenant has so many samples under way at once; what waits for a place is the order and a number.
  Where a sample goes is decided when it gets its place, so that no worker runs dry.
- The samples of one order go to one worker, where the prompt is computed once; of large orders
  every few may go elsewhere. Equal prompts of several orders of one tenant that are open together
  are computed once, too; never those of two tenants.
- One sample that fails ends its order: the others are taken out of their batches first.
- A worker that is lost costs a sample one repetition, elsewhere if there is an elsewhere.
"""

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

import numpy as np

from marlaas.errors import MarlaasError, NotFound, WorkerLost
from marlaas.loop.lane import Lane, Lanes
from marlaas.loop.policies import Placement, Station
from marlaas.loop.shelf import LoadedVersion, ServedVersion, Shelf
from marlaas.loop.usage import Tenants
from marlaas.runtime import derive_seed
from marlaas.types import (
    BASE_VERSION,
    Completion,
    GenerateRequest,
    SamplingParams,
    StopReason,
    TenantId,
    Usage,
)

TOGETHER = 16
"""Samples of one order that go to one worker. A prompt is computed once on each worker, and large
orders are to fill all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What is asked for beside the sampled tokens and their logprobs; see `GenerateRequest`.

    What is asked of the prompt is the same for every sample: the first one says it.
    """

    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_ids: np.ndarray | None = None
    """int32 [T, K]."""
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_from: int = 0
    topk_sample_logprobs: int = 0


NO_EXTRAS = Extras()


@dataclass(slots=True, eq=False)
class Places:
    """What one tenant may have of a kind, completions or samples, and has."""

    tenant_id: TenantId
    max_running: int
    """Samples that may be on workers, or wait for their turn there."""
    max_open: int
    of_kind: dict[TenantId, "Places"]
    """Of all tenants that have something open."""
    may_wait_for_day: bool = False
    """Nothing begins while the tenant has used up its tokens of the day."""
    num_running: int = 0
    num_open: int = 0
    """Samples from arrival to the end of their order."""
    waiting: deque["Order"] = field(default_factory=deque)
    """Orders with samples that have no place yet, first come first served."""


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """`n` completions of one prompt: `submitted -> result set`, or cancelled.

    The result is there once no sample of it is on a worker any more, whatever came of it.
    """

    tenant_id: TenantId
    name: str
    tokens: np.ndarray
    sampling: SamplingParams
    n: int
    version: ServedVersion | None
    """None is the base."""
    find_again: Callable[[], Awaitable[ServedVersion | None]] | None = None
    """Returns what is meant now, when the version was deleted before a sample began."""
    extras: Extras = NO_EXTRAS
    prompt_id: str = ""
    """Equal for equal prompts of one tenant under one version; empty: shared within the order."""
    max_attempts: int = 2
    """Workers that one of its samples may lose."""
    result: asyncio.Future[list[Completion]]
    places: Places | None = None
    """Of its tenant; from submission on."""
    stations: dict[int, Station] = field(default_factory=dict)
    """Where its samples go, by `TOGETHER` of them."""
    is_begun: bool = False
    """A sample began, so the version stays what it is."""
    resolving: asyncio.Lock | None = None
    num_started: int = 0
    num_ended: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    error: BaseException | None = None
    served_tokens: int = 0
    prefill_tokens: int = 0
    device_s: float = 0.0

    @property
    def prompt_name(self) -> str:
        """What its prompt is shared by: the order's own name if only within it."""
        return self.prompt_id or self.name

    @property
    def is_over(self) -> bool:
        return self.error is not None or self.num_ended == self.n

    def usage(self) -> Usage:
        """Return what its samples have taken, also of those that came to nothing in the end."""
        return Usage(
            served_tokens=self.served_tokens,
            prefill_tokens=self.prefill_tokens,
            device_s=self.device_s,
        )

    def note(self, index: int, completion: Completion, num_computed: int, device_s: float) -> None:
        """One of its samples is there; so many tokens of the prompt were computed for it."""
        self.completions[index] = completion
        self.served_tokens += len(completion.tokens)
        self.prefill_tokens += num_computed
        self.device_s += device_s


class Dispatcher:
    """Sees orders through: `submit(order, places) -> order.result`, at any time `cancel(order)`.

    order = Order(tenant_id="acme", ..., result=asyncio.get_running_loop().create_future())
    dispatcher.submit(order, places)
    completions = await order.result
    """

    def __init__(
        self,
        placement: Placement,
        tenants: Tenants,
        *,
        max_loaded: int,
        max_loaded_bytes: int,
        on_end: Callable[[Order, Places], None],
    ) -> None:
        """`on_end` hears of every order right before its result is set."""
        self._placement = placement
        self._tenants = tenants
        self._on_end = on_end
        self._ids = itertools.count(1)
        self._prompts: Counter[str] = Counter()
        """Open orders by prompt."""
        self._paid: set[str] = set()
        """Shared prompts of open orders that somebody has paid for."""
        stations = placement.stations
        self._lanes = {station.worker.name: Lanes(station, placement) for station in stations}
        self.shelves = {
            station.worker.name: Shelf(
                station, max_loaded=max_loaded, max_bytes=max_loaded_bytes, ids=self._ids
            )
            for station in stations
        }
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._resuming: dict[TenantId, asyncio.Task[None]] = {}
        """Tenants that wait for their day to end."""

    @property
    def max_decoding(self) -> int:
        """Sequences that the batches of all workers hold together."""
        return sum(station.load.max_decoding for station in self._placement.stations)

    @property
    def is_down(self) -> bool:
        """True while no worker answers: all that are left are being brought back."""
        return all(station.worker.name in self._recoveries for station in self._placement.alive)

    def submit(self, order: Order, places: Places) -> None:
        """Begin with an order as soon as its tenant has places."""
        order.places = places
        places.num_open += order.n
        self._prompts[order.prompt_name] += 1
        places.waiting.append(order)
        self._fill(places)

    def cancel(self, order: Order) -> None:
        """Give an order up: what is under way leaves its batch, then the result is cancelled."""
        assert order.places is not None, "it was submitted"
        self._give_up(order, order.places, asyncio.CancelledError())

    async def close(self) -> None:
        """End what goes on in the background. Orders are ended by whoever submitted them."""
        tasks = [*self._recoveries.values(), *self._resuming.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Places ---------------------------------------------------------------------------------

    def _fill(self, places: Places) -> None:
        """Start samples while their tenant has places."""
        while places.waiting and places.num_running < places.max_running:
            order = places.waiting[0]
            if order.is_over:
                places.waiting.popleft()
                continue
            if places.may_wait_for_day and self._tenants.why_no_tokens(places.tenant_id):
                self._resume_later(places)
                return
            index = order.num_started
            order.num_started += 1
            if order.num_started == order.n:
                places.waiting.popleft()
            places.num_running += 1
            task = asyncio.create_task(self._try(order, index))
            task.add_done_callback(partial(self._note_end, order, index, places))
            order.tasks[index] = task

    def _resume_later(self, places: Places) -> None:
        if places.tenant_id not in self._resuming:
            task = asyncio.create_task(self._resume(places))
            self._resuming[places.tenant_id] = task

    async def _resume(self, places: Places) -> None:
        await self._tenants.tokens_left(places.tenant_id)
        del self._resuming[places.tenant_id]
        # Everything may have been cancelled meanwhile, and something else have come.
        if (current := places.of_kind.get(places.tenant_id)) is not None:
            self._fill(current)

    def _note_end(self, order: Order, index: int, places: Places, task: asyncio.Task[None]) -> None:
        """A sample's task is over: it may have been cancelled before it took a single step."""
        del order.tasks[index]
        places.num_running -= 1
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._give_up(order, places, error)
        self._count_ended(order, places, 1)
        self._fill(places)

    def _give_up(self, order: Order, places: Places, error: BaseException) -> None:
        if order.is_over:
            return
        order.error = error
        num_unstarted, order.num_started = order.n - order.num_started, order.n
        for task in order.tasks.values():
            task.cancel()
        if num_unstarted:
            places.waiting.remove(order)
            self._count_ended(order, places, num_unstarted)

    def _count_ended(self, order: Order, places: Places, num_samples: int) -> None:
        order.num_ended += num_samples
        if order.num_ended < order.n:
            return
        places.num_open -= order.n
        self._forget_prompt(order.prompt_name)
        self._on_end(order, places)
        if order.result.done():
            return
        if order.error is None:
            order.result.set_result([order.completions[index] for index in range(order.n)])
        elif isinstance(order.error, asyncio.CancelledError):
            order.result.cancel()
        else:
            order.result.set_exception(order.error)

    def _forget_prompt(self, prompt_id: str) -> None:
        self._prompts[prompt_id] -= 1
        if not self._prompts[prompt_id]:
            del self._prompts[prompt_id]
            self._paid.discard(prompt_id)

    # One sample -----------------------------------------------------------------------------

    async def _try(self, order: Order, index: int) -> None:
        for _ in range(order.max_attempts):
            part = index // TOGETHER
            station = order.stations.get(part) or await self._choose(order.version)
            station = order.stations.setdefault(part, station)  # a sibling's, if it chose meanwhile
            try:
                return await self._sample(order, index, station)
            except WorkerLost:
                self._start_recovery(station)
                if order.stations.get(part) is station:
                    del order.stations[part]
        raise WorkerLost(f"a worker was lost in all of {order.max_attempts} attempts")

    async def _sample(self, order: Order, index: int, station: Station) -> None:
        """Wait for the tenant's turn on a worker, sample there, settle what it cost."""
        name = station.worker.name
        lane, shelf = self._lanes[name].of(order.tenant_id), self.shelves[name]
        loaded: LoadedVersion | None = None
        turn = await lane.turn(len(order.tokens), order.sampling.max_tokens)
        try:
            if order.version is not None:
                loaded = shelf.take_loaded(order.version) or await self._load(order, shelf, lane)
            order.is_begun = True
            completion = await turn.generate(self._request(order, index, loaded))
            if completion.stop_reason is StopReason.CANCELLED:
                raise WorkerLost(f"{name} gave up the sequence")
        except MarlaasError:  # a client who leaves has had the worker's time, and stays charged
            turn.give_back()
            raise
        finally:
            if loaded is not None:
                shelf.put_back(loaded)
            turn.close()
        adapter_hash = order.version.adapter_hash if order.version else ""
        assert completion.adapter_hash == adapter_hash, "answered by another adapter"
        num_computed = len(order.tokens) - self._num_free(order, completion)
        device_s = turn.settle(num_computed, len(completion.tokens), order.sampling.max_tokens)
        order.note(index, completion, num_computed, device_s)

    def _num_free(self, order: Order, completion: Completion) -> int:
        """Return how much of the prompt a sample has for nothing. Of those that share one, all find
        it computed: the first to be there pays for it."""
        prompt_id = order.prompt_name
        if not completion.num_cached_tokens or prompt_id in self._paid:
            return completion.num_cached_tokens
        self._paid.add(prompt_id)
        return 0

    async def _load(self, order: Order, shelf: Shelf, lane: Lane) -> LoadedVersion:
        """Have the order's version on a worker that does not have it yet."""
        order.resolving = order.resolving or asyncio.Lock()
        async with order.resolving:
            assert order.version is not None
            try:
                return await shelf.take(order.version, on_load=lane.charge_load)
            except NotFound:
                # Deleted since the request came: what the name stands for now is as good, unless a
                # sibling has begun under the older one.
                if order.find_again is None:
                    raise
                version = await order.find_again()
                if order.is_begun or version is None or version == order.version:
                    raise
                order.version = version
                return await shelf.take(version, on_load=lane.charge_load)

    def _request(self, order: Order, index: int, loaded: LoadedVersion | None) -> GenerateRequest:
        extras = order.extras if index == 0 else NO_EXTRAS
        prompt_id = order.prompt_name
        is_shared = order.n > 1 or self._prompts[prompt_id] > 1
        sampling = order.sampling
        return GenerateRequest(
            request_id=f"{order.name}/{index}/{next(self._ids)}",
            sequence_id=f"{order.name}/{index}",
            policy_id=loaded.policy_id if loaded else None,
            version=order.version.version if order.version else BASE_VERSION,
            tokens=order.tokens,
            sampling=replace(sampling, seed=seed_of(sampling.seed, index)) if index else sampling,
            prefix_id=prompt_id if is_shared else "",
            prefix_len=len(order.tokens),
            prompt_logprobs=extras.prompt_logprobs,
            topk_prompt_logprobs=extras.topk_prompt_logprobs,
            target_prompt_ids=extras.target_prompt_ids,
            prompt_alt_tokens_k=extras.prompt_alt_tokens_k,
            prompt_logprobs_from=extras.prompt_logprobs_from,
            topk_sample_logprobs=order.extras.topk_sample_logprobs,
        )

    # Where ----------------------------------------------------------------------------------

    async def _choose(self, version: ServedVersion | None) -> Station:
        """Return where a request is to go: where its version is, if there is room, or else where
        least goes on; a worker that is being brought back only if there is no other.

        Raises:
            WorkerLost: no worker is left.
        """
        alive = self._placement.alive
        if not alive:
            raise WorkerLost("no engine worker is left")
        up = [station for station in alive if station.worker.name not in self._recoveries]
        if not up:
            await asyncio.wait(self._recoveries.values(), return_when=asyncio.FIRST_COMPLETED)
            return await self._choose(version)
        return min(up, key=lambda station: self._rank(station, version))

    def _rank(self, station: Station, version: ServedVersion | None) -> tuple[bool, int]:
        name = station.worker.name
        is_ready = station.load.has_room and (version is None or version in self.shelves[name])
        return not is_ready, self._lanes[name].num_busy

    def _start_recovery(self, station: Station) -> None:
        """Bring a lost worker back, whether or not a job lives there; requests go elsewhere."""
        name = station.worker.name
        if name not in self._recoveries:
            task = asyncio.create_task(self._recover(station), name=f"recover {name} for serving")
            self._recoveries[name] = task
            task.add_done_callback(lambda _: self._recoveries.pop(name))

    async def _recover(self, station: Station) -> None:
        try:
            await station.worker.recover()
        except WorkerLost:
            self._placement.give_up(station)


def prompt_id_of(tenant_id: TenantId, version: ServedVersion | None, tokens: np.ndarray) -> str:
    """Return what names a prompt of a tenant under a version; never the same for two tenants."""
    adapter = version.adapter_hash if version else ""
    digest = blake2b(f"{tenant_id}\x1f{adapter}\x1f".encode(), digest_size=16)
    digest.update(tokens.tobytes())
    return f"#prompt/{digest.hexdigest()}"


def seed_of(seed: int, index: int) -> int:
    """Return the seed of one of several samples; the first has the one that was asked for."""
    return derive_seed("serve", seed, index) if index else seed
