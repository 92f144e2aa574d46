"""Samplers of clients: each samples from the base or from one checkpoint, request by request.

    create ─► submit (seq) ─► waits, is sampled ─► done ─► read, any number of times ─► forgotten
                 │ the same again                    └──► told to whoever follows the sampler
                 └──► the same request id

- A request is known by (sampler, seq): the same again is the same request, whether it waits, is
  sampled or done. It belongs to the server: a client that goes away and comes back finds it.
- Results live in memory: for an hour, and while a tenant's take no more than their share; what was
  acknowledged goes first. After that, and after a restart, asking raises `Expired`, and a client
  sends the request anew under another number. Nothing of a tenant changes by being sampled twice.
- A sampler names its checkpoint by path, which its owner may delete or stop publishing: that is
  looked at again every few seconds, and says to the store that the checkpoint is in use.
- Nobody polls: whoever waits for a request, or follows a sampler, is woken when one is done.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from marlaas import runtime
from marlaas.errors import Expired, InvalidRequest, MarlaasError, NotFound, QuotaExceeded
from marlaas.loop.operations import Category, QueueState, Waiting, category_of
from marlaas.loop.serving import Extras, Serving
from marlaas.loop.shelf import ServedVersion
from marlaas.store import codec
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import Completion, Sampler, SamplingParams, TenantId

CLONE = 10**9
"""Requests of clone `c` of a sampler have the numbers from `c` times this on."""

MAX_SEQ = (1 << 63) - 1
MAX_SEQ_DIGITS = 19

_REQUEST = "smp"
"""Begins the request ids of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """The operator's settings of samplers."""

    kept_s: float = 3600.0
    """How long a result can be read."""
    kept_bytes: int = 256 << 20
    """Results of one tenant that are kept; the oldest go first."""
    recheck_s: float = 10.0
    """How often a sampler's checkpoint is looked up again."""
    max_samples: int = 256
    """Samples of one request."""
    max_open: int = 2048
    """Samples of one tenant under way or waiting; more are refused for the moment."""
    retry_after_s: float = 1.0
    """What a tenant with too many is told to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """Tokens to continue, and how."""

    tokens: np.ndarray
    """int32 [T]."""
    n: int = 1
    max_tokens: int | None = None
    """None: as many as the context leaves."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """None: by chance."""
    stop_token_ids: tuple[int, ...] | None = None
    """None: the base's own."""
    stop_strings: tuple[str, ...] = ()
    extras: Extras = field(default_factory=Extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was sampled, in order; of the context, the first completion says what was asked."""

    completions: Sequence[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why nothing was sampled."""

    error: str
    category: Category


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One request of a sampler that came to its end."""

    request_id: str
    is_failed: bool
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Request:
    """One request between its arrival and the end of its result."""

    request_id: str
    digest: bytes
    n: int
    done: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    outcome: SampleResult | SampleFailure | None = None
    num_bytes: int = 0
    finished_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Results:
    """One tenant's requests, oldest first."""

    by_id: OrderedDict[str, _Request] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    num_open: int = 0
    """Samples that are not done."""


@dataclass(slots=True, eq=False)
class _Feed:
    """What came to its end of one clone of a sampler, numbered from 1."""

    entries: deque[Notification] = field(default_factory=deque)
    num_told: int = 0
    """Number of the newest entry."""
    grown: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, with every entry."""


@dataclass(slots=True, eq=False)
class _Known:
    """A sampler as it was when its checkpoint was looked up last."""

    version: ServedVersion | None
    checked_s: float
    num_joined: int
    """Clones that have joined so far; the next one gets the number behind it."""


class Samplers:
    """Takes requests, keeps their results: `create -> submit -> wait`.

    samplers = Samplers(serving, store)
    sampler_id = await samplers.create("acme", session_id, 0, "tiny", None)
    request_id, sequence_ids = await samplers.submit("acme", sampler_id, 0, request)
    result = await samplers.wait("acme", request_id, timeout_s=25)
    await samplers.close()
    """

    def __init__(
        self, serving: Serving, store: AsyncStore, settings: SamplerSettings | None = None
    ) -> None:
        self._serving = serving
        self._store = store
        self._settings = settings or SamplerSettings()
        self._tenants: dict[TenantId, _Results] = {}
        self._known: dict[tuple[TenantId, str], _Known] = {}
        self._feeds: dict[tuple[TenantId, str, int], _Feed] = {}

    # Samplers -------------------------------------------------------------------------------

    async def create(
        self, tenant_id: TenantId, session_id: str, seq: int, base_model: str, path: str | None
    ) -> str:
        """Make sampler `seq` of a session, of the base or of a checkpoint; the same again is the
        same sampler.

        Raises:
            NotFound: this tenant has no such session, or may read no such checkpoint.
            InvalidRequest: no path of a checkpoint.
            Conflict: that number is another sampler.
        """
        if path is not None:
            await self._store.call(Store.use_checkpoint, tenant_id, path)
        sampler = Sampler(
            sampler_id=f"{session_id}:sample:{seq}",
            session_id=session_id,
            seq=seq,
            base_model=base_model,
            checkpoint_path=path,
        )
        return (await self._store.call(Store.add_sampler, tenant_id, sampler)).sampler_id

    async def join(self, tenant_id: TenantId, sampler_id: str) -> int:
        """Return a clone number that no other client of this sampler has been given.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        known = await self._find(tenant_id, sampler_id)
        known.num_joined += 1
        return known.num_joined

    async def _find(self, tenant_id: TenantId, sampler_id: str) -> _Known:
        key, now_s = (tenant_id, sampler_id), runtime.now_s()
        known = self._known.get(key)
        if known is not None and now_s - known.checked_s < self._settings.recheck_s:
            return known
        version = await self._store.call(_version_of, tenant_id, sampler_id)
        if known is None:
            # Beyond what clients draw by themselves, and beyond an earlier process's numbers.
            known = self._known.setdefault(
                key, _Known(version, now_s, CLONE + int(runtime.wall_time_s()))
            )
        known.version, known.checked_s = version, now_s
        return known

    # Requests -------------------------------------------------------------------------------

    async def submit(
        self, tenant_id: TenantId, sampler_id: str, seq: int, request: SampleRequest
    ) -> tuple[str, list[str]]:
        """Take a request; return its id and one id for each of its samples.

        Raises:
            NotFound: this tenant has no such sampler, or its checkpoint is gone.
            InvalidRequest: faulty settings, or the number stands for another request.
            QuotaExceeded: too many samples are under way.
        """
        if not 0 <= seq <= MAX_SEQ:
            raise InvalidRequest(f"seq_id = {seq}; expected 0 to {MAX_SEQ}")
        sampling = self._sampling(request)
        self._serving.check(request.tokens, sampling, request.n, most=self._settings.max_samples)
        request_id = f"{_REQUEST}:{sampler_id}:{seq}"
        sequence_ids = [f"{request_id}:{index}" for index in range(request.n)]
        digest = blake2b(codec.encode(request), digest_size=16).digest()
        version = (await self._find(tenant_id, sampler_id)).version
        results = self._tenants.setdefault(tenant_id, _Results())
        before = results.by_id.get(request_id)
        if before is not None:
            if before.digest != digest:
                raise InvalidRequest(
                    f"seq_id = {seq} stands for another request of {sampler_id}; expected a new "
                    "number for a new request"
                )
            return request_id, sequence_ids
        self._check_room(results, request.n)
        held = results.by_id[request_id] = _Request(request_id, digest, request.n)
        results.num_open += request.n
        work = self._run(tenant_id, sampler_id, seq, held, request, sampling, version)
        held.task = asyncio.create_task(work, name=request_id)
        return request_id, sequence_ids

    async def wait(
        self, tenant_id: TenantId, request_id: str, timeout_s: float
    ) -> SampleResult | SampleFailure | Waiting:
        """Return what came of a request, or `Waiting` when it takes longer.

        Raises:
            Expired: its result is not kept any more.
            NotFound: this tenant has no such request.
        """
        results = self._tenants.get(tenant_id)
        held = results.by_id.get(request_id) if results else None
        if held is None:
            await self._raise_missing(tenant_id, request_id)
            raise AssertionError
        with suppress(TimeoutError):
            await asyncio.wait_for(held.done.wait(), timeout_s)
        return held.outcome or self._why_waiting(tenant_id)

    async def cancel(self, tenant_id: TenantId, request_id: str) -> None:
        """Give up a request that is not done; one that is done, or unknown, stays what it is."""
        results = self._tenants.get(tenant_id)
        held = results.by_id.get(request_id) if results else None
        if held is not None and held.task is not None:
            held.task.cancel()

    async def completions_since(
        self, tenant_id: TenantId, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Notification], int]:
        """Return which requests of a clone came to their end behind `cursor`, and the new cursor;
        wait for one if there is none.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        await self._find(tenant_id, sampler_id)
        feed = self._feeds.setdefault((tenant_id, sampler_id, clone), _Feed())
        # A cursor of an earlier process says nothing about this one's numbers.
        cursor = min(cursor, feed.num_told)
        if feed.num_told == cursor and timeout_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(feed.grown.wait(), timeout_s)
        first = feed.num_told - len(feed.entries)
        behind = list(feed.entries)[max(0, cursor - first) :]
        return behind, feed.num_told

    def acknowledge(self, tenant_id: TenantId, request_ids: Iterable[str]) -> None:
        """The client has these results: they need not be kept."""
        results = self._tenants.get(tenant_id)
        for request_id in request_ids:
            held = results.by_id.get(request_id) if results else None
            if results is not None and held is not None and held.outcome is not None:
                _forget(results, held)

    async def close(self) -> None:
        """End what is under way; clients send it anew when there is a server again."""
        tasks = [task for task in self._tasks() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> Iterator[asyncio.Task[None]]:
        for results in self._tenants.values():
            for held in results.by_id.values():
                if held.task is not None:
                    yield held.task

    # ----------------------------------------------------------------------------------------

    def _check_room(self, results: _Results, n: int) -> None:
        most = self._settings.max_open
        if results.num_open + n > most:
            raise QuotaExceeded(
                f"{results.num_open} samples are under way or waiting; expected at most {most} "
                f"together with the {n} new ones",
                self._settings.retry_after_s,
            )

    def _sampling(self, request: SampleRequest) -> SamplingParams:
        left = self._serving.max_context - len(request.tokens)
        stops = request.stop_token_ids
        if request.max_tokens is not None and len(request.tokens) and request.max_tokens > left > 0:
            raise InvalidRequest(
                f"a prompt of {len(request.tokens)} tokens and max_tokens = {request.max_tokens} "
                f"do not fit a context of {self._serving.max_context}; expected at most {left}"
            )
        return SamplingParams(
            max_tokens=max(1, left) if request.max_tokens is None else request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_token_ids=self._serving.stop_token_ids if stops is None else stops,
            stop_strings=request.stop_strings,
            seed=0 if request.seed is None else request.seed,
        )

    async def _run(
        self,
        tenant_id: TenantId,
        sampler_id: str,
        seq: int,
        held: _Request,
        request: SampleRequest,
        sampling: SamplingParams,
        version: ServedVersion | None,
    ) -> None:
        """Sample a request and keep what comes of it."""
        if request.seed is None:
            seed = int.from_bytes(runtime.unguessable_bytes(8), "little") & MAX_SEQ
            sampling = replace(sampling, seed=seed)
        outcome: SampleResult | SampleFailure = SampleFailure(
            error="something of ours broke; the server's log says what", category=Category.SERVER
        )
        try:
            completions = await self._serving.sample(
                tenant_id, version, request.tokens, sampling, request.n, extras=request.extras
            )
            outcome = SampleResult(completions=completions)
            held.num_bytes = sum(_num_bytes(one) for one in completions)
        except asyncio.CancelledError:
            outcome = SampleFailure(error="the request was cancelled", category=Category.USER)
        except MarlaasError as error:
            outcome = SampleFailure(error=str(error), category=category_of(error))
        finally:
            self._finish(tenant_id, sampler_id, seq, held, outcome)

    def _finish(
        self,
        tenant_id: TenantId,
        sampler_id: str,
        seq: int,
        held: _Request,
        outcome: SampleResult | SampleFailure,
    ) -> None:
        held.outcome, held.task, held.finished_s = outcome, None, runtime.now_s()
        held.done.set()
        results = self._tenants[tenant_id]
        results.num_open -= held.n
        results.num_bytes += held.num_bytes
        self._drop_old(results)
        feed = self._feeds.setdefault((tenant_id, sampler_id, seq // CLONE), _Feed())
        feed.num_told += 1
        is_failed = isinstance(outcome, SampleFailure)
        feed.entries.append(
            Notification(request_id=held.request_id, is_failed=is_failed, num_bytes=held.num_bytes)
        )
        while len(feed.entries) > 2 * len(results.by_id) + 16:
            feed.entries.popleft()
        feed.grown.set()
        feed.grown = asyncio.Event()

    def _drop_old(self, results: _Results) -> None:
        """Forget results that are too old, or too many."""
        oldest_s = runtime.now_s() - self._settings.kept_s
        for held in list(results.by_id.values()):
            is_over = results.num_bytes > self._settings.kept_bytes
            if held.outcome is None:
                continue
            if held.finished_s > oldest_s and not is_over:
                return
            _forget(results, held)

    def _why_waiting(self, tenant_id: TenantId) -> Waiting:
        reason = self._serving.why_waiting(tenant_id)
        state = QueueState.PAUSED_CAPACITY if reason else QueueState.ACTIVE
        return Waiting(queue_state=state, reason=reason)

    async def _raise_missing(self, tenant_id: TenantId, request_id: str) -> None:
        """Say of a request that is not here whether it may have been."""
        sampler_id = _sampler_of(request_id)
        await self._store.call(Store.sampler, tenant_id, sampler_id)  # NotFound unless theirs
        raise Expired(f"the result of {request_id} is not kept any more; send the request anew")


def is_sample(request_id: str) -> bool:
    """Return whether a request id is one of a sampler's, not of a run's operation."""
    return request_id.startswith(f"{_REQUEST}:")


def _sampler_of(request_id: str) -> str:
    head, _, number = request_id.rpartition(":")
    prefix, _, sampler_id = head.partition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= MAX_SEQ_DIGITS
    if prefix != _REQUEST or not sampler_id or not is_number:
        raise NotFound(f"no request {request_id!r}")
    return sampler_id


def _version_of(store: Store, tenant_id: TenantId, sampler_id: str) -> ServedVersion | None:
    """Return what a sampler samples from, and note that it does."""
    sampler = store.use_sampler(tenant_id, sampler_id)
    if sampler.checkpoint_path is None:
        return None
    owner, checkpoint = store.use_checkpoint(tenant_id, sampler.checkpoint_path)
    return ServedVersion(
        tenant_id=owner,
        job=checkpoint.run_id,
        version=checkpoint.version,
        adapter_hash=checkpoint.adapter_hash,
        folder=str(checkpoint.folder / "adapter"),
        num_bytes=checkpoint.size_bytes,
    )


def _forget(results: _Results, held: _Request) -> None:
    results.num_bytes -= held.num_bytes
    del results.by_id[held.request_id]


def _num_bytes(completion: Completion) -> int:
    """Return what a completion takes in memory, roughly."""
    arrays = (getattr(completion, name) for name in Completion.__slots__)
    return 500 + sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
