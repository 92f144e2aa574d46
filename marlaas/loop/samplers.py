"""Samplers of clients: each samples from the base or from one checkpoint, request by request.

    create ─► submit (seq) ─► waits, is sampled ─► done ─► read, any number of times ─► dropped
                 │ the same again                    └──► told to whoever follows the sampler
                 └──► the same request id

- A request is known by (sampler, seq): the same again is the same request, whether it waits, is
  sampled or done. It belongs to the server: a client that goes away and comes back finds it.
- Results live in memory (`loop/results.py`): for an hour, within a tenant's room. After that, and
  after a restart, asking raises `Expired`, and a client sends the request anew under another
  number. Nothing of a tenant changes by being sampled twice.
- A sampler names its checkpoint by path, which its owner may delete or stop publishing: that is
  looked at again every few seconds. What is sampled from counts as used, named or not, and whether
  its session is heard of or not.
- A request that waits is a record, not a task; whoever waits for it, or follows its sampler, is
  woken when it is done.
- A follower whose cursor is of an earlier process is told that what may have been under way then is
  over, for it would wait for ever: it asks, finds it expired, and sends it anew.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import numpy as np

from marlaas import runtime
from marlaas.errors import (
    Expired,
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    WorkerLost,
)
from marlaas.loop.dispatch import NO_EXTRAS, Extras, Order
from marlaas.loop.operations import Category, Waiting, category_of
from marlaas.loop.results import FeedKey, Held, Results
from marlaas.loop.serving import Serving
from marlaas.loop.shelf import ServedVersion
from marlaas.store import codec
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import Completion, Sampler, SamplingParams, TenantId

logger = logging.getLogger(__name__)

CLONE = 10**9
"""Requests of clone `c` of a sampler have the numbers from `c` times this on."""

MAX_SEQ = (1 << 63) - 1
MAX_SEQ_DIGITS = 19

MAX_KNOWN = 4096
"""Samplers whose version is remembered, the last used ones; others are looked up again."""

TOUCH_S = 300.0
"""How often it is noted that a sampler and its checkpoint are used; unnamed checkpoints are kept
for an hour after that."""

MAX_LOST = 2048
"""Requests on either side of where a client stood that an earlier process may have had."""

_REQUEST = "smp"
"""Begins the request ids of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """The operator's settings of samplers."""

    kept_s: float = 3600.0
    """How long a result can be read."""
    kept_bytes: int = 128 << 20
    """Room of one tenant: results that are kept, and what open requests may bring."""
    recheck_s: float = 2.0
    """How often a sampler's checkpoint is looked up again while it is sampled from."""
    retry_after_s: float = 1.0
    """What a tenant is told to wait whose room is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How a client wants to be told; nothing that is computed depends on it."""

    logprobs_from: int = 0
    """Logprobs of the prompt and its most likely tokens are told of entries from here on."""
    is_sparse: bool = False
    """Logprobs of given tokens come back as a sparse matrix, as they were given."""


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
    extras: Extras = field(default_factory=lambda: NO_EXTRAS)
    form: AnswerForm = field(default_factory=AnswerForm)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    """What was sampled, in order; of the context, the first completion says what was asked."""

    completions: Sequence[Completion]
    form: AnswerForm = field(default_factory=AnswerForm)
    seed: int = 0
    """Also where chance chose it: with it the same is sampled again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why nothing was sampled."""

    error: str
    category: Category


Outcome = SampleResult | SampleFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One request of a sampler that came to its end."""

    request_id: str
    is_failed: bool
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Known:
    """A sampler as it was when it was looked up last."""

    sampler: Sampler
    version: ServedVersion | None
    expires_s: float | None
    """When its checkpoint will, on the wall clock."""
    checked_s: float
    touched_s: float


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
        self._results: Results[Outcome] = Results(
            kept_s=self._settings.kept_s,
            max_bytes=self._settings.kept_bytes,
            retry_after_s=self._settings.retry_after_s,
        )
        self._orders: dict[Held[Outcome], Order] = {}
        """Of open requests."""
        self._known: OrderedDict[tuple[TenantId, str], _Known] = OrderedDict()
        self._checks: dict[tuple[TenantId, str], asyncio.Task[_Known]] = {}
        """Samplers that are being looked up."""
        self._is_closing = False

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
        """Return a clone number that no other client of this sampler has: by chance, like those
        that clients draw themselves, so that no process has to remember which were given.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        await self._own(tenant_id, sampler_id)
        return 1 + _chance() % (CLONE - 1)

    # Requests -------------------------------------------------------------------------------

    async def submit(
        self, tenant_id: TenantId, sampler_id: str, seq: int, request: SampleRequest
    ) -> tuple[str, list[str]]:
        """Take a request; return its id and one id for each of its samples.

        Raises:
            NotFound: this tenant has no such sampler, or its checkpoint is gone.
            InvalidRequest: faulty settings, or the number stands for another request.
            QuotaExceeded: too many samples are under way, or results wait to be fetched.
            WorkerLost: the service is about to end.
        """
        if not 0 <= seq <= MAX_SEQ:
            raise InvalidRequest(f"seq_id = {seq}; expected 0 to {MAX_SEQ}")
        sampling = self._sampling(request)
        self._serving.check_sample(request.tokens, sampling, request.n, request.extras)
        request_id = f"{_REQUEST}:{sampler_id}:{seq}"
        digest = blake2b(codec.encode(request), digest_size=16).digest()
        if not self._is_same(tenant_id, request_id, digest):
            known = await self._find(tenant_id, sampler_id)
            await self._serving.prepare(tenant_id)
            if self._is_closing:
                raise WorkerLost("the service is about to end: send the request again")
            # Meanwhile the same request may have come another time. From here on nothing waits.
            if not self._is_same(tenant_id, request_id, digest):
                feed_key: FeedKey = (tenant_id, sampler_id, seq // CLONE)
                held = self._results.open(
                    feed_key,
                    seq % CLONE,
                    request_id,
                    digest,
                    num_bytes=_most_bytes(request, sampling),
                )
                self._start(held, known.version, request, sampling)
        return request_id, [f"{request_id}:{index}" for index in range(request.n)]

    async def wait(
        self, tenant_id: TenantId, request_id: str, timeout_s: float
    ) -> Outcome | Waiting:
        """Return what came of a request, or `Waiting` when it takes longer.

        Raises:
            Expired: its result is not kept any more.
            NotFound: this tenant has no such request.
        """
        held = self._results.find(tenant_id, request_id)
        if held is None:
            await self._own(tenant_id, _sampler_of(request_id))
            raise Expired(f"the result of {request_id} is not kept any more: send the request anew")
        outcome = await self._results.outcome(held, timeout_s)
        return outcome or self._serving.why_waiting(tenant_id)

    async def cancel(self, tenant_id: TenantId, request_id: str) -> None:
        """Give up a request that is not done; one that is done, or unknown, stays what it is."""
        held = self._results.find(tenant_id, request_id)
        if held is not None and held in self._orders:
            self._serving.cancel(self._orders[held])

    async def completions_since(
        self, tenant_id: TenantId, sampler_id: str, clone: int, cursor: int, timeout_s: float
    ) -> tuple[list[Notification], int]:
        """Return which requests of a clone came to their end behind `cursor`, and the new cursor;
        wait for one if there is none. 0 is the cursor of whoever begins.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        sampler = await self._own(tenant_id, sampler_id)
        lost: list[Notification] = []
        if self._results.is_earlier(cursor) and sampler.created_s < self._results.began_s:
            lost = self._lost(tenant_id, sampler_id, clone, self._results.num_told(cursor))
        events, cursor = await self._results.events(
            (tenant_id, sampler_id, clone), cursor, 0 if lost else timeout_s
        )
        ended = [
            Notification(
                request_id=held.request_id, is_failed=held.is_failed, num_bytes=held.num_bytes
            )
            for held in events
        ]
        return lost + ended, cursor

    def acknowledge(self, tenant_id: TenantId, request_ids: Iterable[str]) -> None:
        """The client has these results: they need not be kept."""
        for request_id in request_ids:
            held = self._results.find(tenant_id, request_id)
            if held is not None and not held.is_open:
                self._results.drop(held)

    async def close(self) -> None:
        """End what is under way; clients send it anew when there is a server again."""
        self._is_closing = True
        orders = list(self._orders.values())
        for order in orders:
            self._serving.cancel(order)
        if orders:
            await asyncio.wait([order.result for order in orders])
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        self._results.close()

    # What is sampled ------------------------------------------------------------------------

    def _is_same(self, tenant_id: TenantId, request_id: str, digest: bytes) -> bool:
        """Return whether a request was taken before.

        Raises:
            InvalidRequest: its number stands for another one.
        """
        held = self._results.find(tenant_id, request_id)
        if held is not None and held.digest != digest:
            raise InvalidRequest(
                f"{request_id} stands for another request; expected a new seq_id with a new request"
            )
        return held is not None

    def _sampling(self, request: SampleRequest) -> SamplingParams:
        room = self._serving.max_context - len(request.tokens)
        stops = request.stop_token_ids
        return SamplingParams(
            max_tokens=max(1, room) if request.max_tokens is None else request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop_token_ids=self._serving.stop_token_ids if stops is None else stops,
            stop_strings=request.stop_strings,
            seed=_chance() if request.seed is None else request.seed,
        )

    def _start(
        self,
        held: Held[Outcome],
        version: ServedVersion | None,
        request: SampleRequest,
        sampling: SamplingParams,
    ) -> None:
        try:
            order = self._serving.start(
                held.tenant_id, version, request.tokens, sampling, request.n, request.extras
            )
        except QuotaExceeded:
            self._results.forget(held)
            raise
        self._orders[held] = order
        order.result.add_done_callback(partial(self._note_end, held, request.form))

    def _note_end(
        self, held: Held[Outcome], form: AnswerForm, result: asyncio.Future[list[Completion]]
    ) -> None:
        """An order is over: keep what came of it."""
        order = self._orders.pop(held)
        error = None if result.cancelled() else result.exception()
        if self._is_closing:
            self._results.drop(held)
        elif result.cancelled():
            self._fail(held, "the request was cancelled", Category.USER)
        elif isinstance(error, MarlaasError):
            self._fail(held, str(error), category_of(error))
        elif error is not None:
            logger.error("%s came to nothing", held.request_id, exc_info=error)
            self._fail(held, "something of ours broke; the log says what", Category.SERVER)
        else:
            completions = result.result()
            outcome = SampleResult(completions=completions, form=form, seed=order.sampling.seed)
            num_bytes = sum(map(_num_bytes, completions))
            self._results.finish(held, outcome, num_bytes=num_bytes, is_failed=False)

    def _fail(self, held: Held[Outcome], error: str, category: Category) -> None:
        outcome = SampleFailure(error=error, category=category)
        self._results.finish(held, outcome, num_bytes=len(error), is_failed=True)

    def _lost(
        self, tenant_id: TenantId, sampler_id: str, clone: int, num_told: int
    ) -> list[Notification]:
        """Return that what an earlier process may have had of a clone is over."""
        first, last = max(0, num_told - MAX_LOST), min(CLONE, num_told + MAX_LOST)
        ids = [f"{_REQUEST}:{sampler_id}:{clone * CLONE + seq}" for seq in range(first, last)]
        return [
            Notification(request_id=request_id, is_failed=True, num_bytes=0)
            for request_id in ids
            if self._results.find(tenant_id, request_id) is None
        ]

    # What it is sampled from ----------------------------------------------------------------

    async def _find(self, tenant_id: TenantId, sampler_id: str) -> _Known:
        """Return a sampler whose checkpoint was there just now.

        Raises:
            NotFound: this tenant has no such sampler, or its checkpoint is gone.
        """
        key, now_s = (tenant_id, sampler_id), runtime.now_s()
        known = self._known.get(key)
        if known is None or known.checked_s + self._settings.recheck_s <= now_s:
            if key not in self._checks:
                self._checks[key] = asyncio.create_task(self._check(key, known))
                self._checks[key].add_done_callback(partial(self._note_checked, key))
            known = await asyncio.shield(self._checks[key])
        if known.expires_s is not None and known.expires_s <= runtime.wall_time_s():
            raise _gone(known.sampler)
        return known

    async def _check(self, key: tuple[TenantId, str], known: _Known | None) -> _Known:
        """Look a sampler and its checkpoint up, and note now and then that they are used."""
        now_s = runtime.now_s()
        touched_s = known.touched_s if known else -TOUCH_S
        is_touching = touched_s + TOUCH_S <= now_s
        found = await self._store.call(_look_up, *key, is_touching=is_touching)
        found.checked_s, found.touched_s = now_s, now_s if is_touching else touched_s
        self._known[key] = found
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return found

    def _note_checked(self, key: tuple[TenantId, str], check: asyncio.Task[_Known]) -> None:
        del self._checks[key]
        if not check.cancelled():
            check.exception()  # whoever was to hear of it may have left

    async def _own(self, tenant_id: TenantId, sampler_id: str) -> Sampler:
        """Return a sampler of a tenant, whatever became of its checkpoint.

        Raises:
            NotFound: this tenant has no such sampler.
        """
        known = self._known.get((tenant_id, sampler_id))
        return (
            known.sampler if known else await self._store.call(Store.sampler, tenant_id, sampler_id)
        )


def is_sample(request_id: str) -> bool:
    """Return whether a request id is one of a sampler's, not of a run's operation."""
    return request_id.startswith(f"{_REQUEST}:")


def _sampler_of(request_id: str) -> str:
    """Return the sampler that a request id names, or would if there were one.

    Raises:
        NotFound: no request has such an id.
    """
    head, _, number = request_id.rpartition(":")
    prefix, _, sampler_id = head.partition(":")
    is_number = number.isascii() and number.isdigit() and len(number) <= MAX_SEQ_DIGITS
    if prefix != _REQUEST or not sampler_id or not is_number or str(int(number)) != number:
        raise NotFound(f"no request {request_id!r}")
    return sampler_id


def _look_up(store: Store, tenant_id: TenantId, sampler_id: str, *, is_touching: bool) -> _Known:
    """Return a sampler with what it samples from; note that both are used, if that is due.

    Raises:
        NotFound: this tenant has no such sampler, or its checkpoint is gone.
    """
    sampler = (store.use_sampler if is_touching else store.sampler)(tenant_id, sampler_id)
    if sampler.checkpoint_path is None:
        return _Known(sampler, None, None, 0.0, 0.0)
    try:
        owner, checkpoint = store.find_checkpoint(tenant_id, sampler.checkpoint_path)
    except NotFound:
        raise _gone(sampler) from None
    version = ServedVersion(
        tenant_id=owner,
        job=checkpoint.run_id,
        version=checkpoint.version,
        adapter_hash=checkpoint.adapter_hash,
        folder=str(checkpoint.folder / "adapter"),
        num_bytes=checkpoint.size_bytes,
    )
    return _Known(sampler, version, checkpoint.expires_s, 0.0, 0.0)


def _gone(sampler: Sampler) -> NotFound:
    return NotFound(
        f"{sampler.checkpoint_path}, which sampler {sampler.sampler_id} samples from, is not there "
        "any more: it was deleted, has expired, or is not published now"
    )


def _chance() -> int:
    return int.from_bytes(runtime.unguessable_bytes(8), "little") & MAX_SEQ


_CELL_BYTES = 4
_TOKEN_BYTES = 3 * _CELL_BYTES
"""Of one sampled token: id, logprob, version."""

_COMPLETION_BYTES = 700
"""Of a completion's record and the headers of its arrays."""


def _most_bytes(request: SampleRequest, sampling: SamplingParams) -> int:
    """Return what the result of a request takes at most, roughly."""
    extras, num_tokens = request.extras, len(request.tokens)
    targets = extras.target_prompt_ids
    per_token = _TOKEN_BYTES + 2 * _CELL_BYTES * extras.topk_sample_logprobs
    per_prompt_token = _CELL_BYTES * (
        extras.prompt_logprobs
        + 2 * extras.topk_prompt_logprobs
        + 2 * extras.prompt_alt_tokens_k
        + (0 if targets is None else targets.shape[1])
    )
    most = request.n * (_COMPLETION_BYTES + sampling.max_tokens * per_token)
    return most + num_tokens * per_prompt_token


def _num_bytes(completion: Completion) -> int:
    """Return what a completion takes, roughly."""
    arrays = (
        completion.tokens,
        completion.logprobs,
        completion.versions,
        completion.prompt_logprobs,
        completion.topk_prompt_ids,
        completion.topk_prompt_logprobs,
        completion.target_prompt_logprobs,
        completion.prompt_alt_ids,
        completion.prompt_alt_logprobs,
        completion.topk_sample_ids,
        completion.topk_sample_logprobs,
    )
    return _COMPLETION_BYTES + sum(array.nbytes for array in arrays if array is not None)
