"""Completions from the base, or from any kept version of any job of a tenant, while jobs train.

    request ─► model resolved ─► one of the tenant's places ─► turn in the fair queue ─┐
                                                                                       ▼
                 usage ◄─── settled ◄─── sampled under one version ◄─── version loaded beside

    | model          | is                                                                  |
    |----------------|---------------------------------------------------------------------|
    | `base`         | the base model without adapter                                      |
    | `JOB`          | the job's promoted version, or else its newest one                  |
    | `JOB@promoted` | the version that the tenant chose                                   |
    | `JOB@best`     | the one with the most success, the oldest among equals              |
    | `JOB@latest`   | the newest one                                                      |
    | `JOB@7`        | version 7, if it is kept                                            |

- Given tokens are sampled under a given version (`sample`) in the same way, without names and
  texts, for clients that bring both (`loop/samplers.py`). Many more of them may be open.
- Every completion competes like a group of a job: it waits for its tenant's turn on a worker, is
  charged an estimate in device seconds, and settled on what it took. So serving cannot starve
  training, nor training serving; of one tenant's work, serving counts as one job per worker.
- A served version is loaded beside the policy in training (`loop/shelf.py`), never taken from it:
  training may retire it, end or be deleted meanwhile. It is fixed when the request's first
  completion begins, and checked on every completion by the adapter's content hash.
- Bounded: completions under way and waiting per tenant, versions loaded per worker.
- A worker that is lost costs a completion one repetition, elsewhere if there is an elsewhere.
- Text is rendered once, on the way in; a conversation is computed anew with every request.
"""

import asyncio
import hashlib
import itertools
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from marlaas.errors import (
    InvalidRequest,
    MarlaasError,
    NotFound,
    QuotaExceeded,
    StoreUnavailable,
    UnsupportedFeature,
    WorkerLost,
)
from marlaas.loop.concurrency import all_or_none
from marlaas.loop.lane import Lane
from marlaas.loop.policies import Placement, Station
from marlaas.loop.rollout import ChatTokenizer
from marlaas.loop.shelf import ServedVersion, Shelf
from marlaas.loop.usage import Tenants
from marlaas.runtime import derive_seed
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import (
    BASE_VERSION,
    Completion,
    GenerateRequest,
    Message,
    PolicyId,
    SamplingParams,
    StopReason,
    TenantId,
    Usage,
)

logger = logging.getLogger(__name__)

BASE_MODEL = "base"
"""Name of the base model; a job of that name is served as `base@latest` and so on."""

MAX_ATTEMPTS = 2
"""Workers that one completion may lose."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256


MAX_VERSION_DIGITS = 20
"""Python refuses to read numbers of thousands of digits; no version has as many as this."""

MAX_TOKEN_ID = 1 << 31
"""Ids travel in 32 bits; which ones the base has, the engine knows."""

Opening = str | Sequence[Message] | Sequence[int] | np.ndarray
"""Text, a conversation up to where the assistant begins, or token ids."""


class TextTokenizer(ChatTokenizer, Protocol):
    """A chat tokenizer that takes plain text, too."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The operator's settings of serving."""

    max_completions: int = 16
    """Completions of one tenant that may be sampled, or wait for their turn, at the same time."""
    max_open: int = 256
    """Completions of one tenant under way or waiting; more are refused."""
    max_loaded: int = 64
    """Versions that one worker holds for serving. More than `max_completions`, so that no tenant
    can occupy them all."""
    max_loaded_bytes: int = 2 << 30
    """What these versions take at most, as far as their sizes are known."""
    book_every_s: float = 0.5
    """Usage of samples is written to the store so often, all that came to its end together."""
    retry_after_s: float = 1.0
    """What a tenant with too many completions is told to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What may be asked for beside the sampled tokens and their logprobs; see `GenerateRequest`.
    Whatever concerns the context is the same for all samples: only the first one has it."""

    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    target_prompt_ids: np.ndarray | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_from: int = 0
    topk_sample_logprobs: int = 0


@dataclass(slots=True, eq=False)
class TenantPlaces:
    """How much of what a tenant may have at once it has."""

    places: asyncio.Semaphore
    num_open: int = 0


@dataclass(slots=True, eq=False, kw_only=True)
class Order:
    """One request: `n` completions of one prompt under one version."""

    tenant_id: TenantId
    model: str
    tokens: np.ndarray
    sampling: SamplingParams
    n: int
    name: str
    version: ServedVersion | None
    """None is the base."""
    extras: Extras = Extras()
    prefix_id: str = ""
    """Names the prompt, so that orders with the same one share what is computed of it."""
    is_begun: bool = False
    """A completion began, so the version stays what it is."""
    station: Station | None = None
    """Where its completions go, so that the prompt is computed once."""
    done: list[tuple[Completion, float]] = field(default_factory=list)
    """What has come back, with its device seconds."""
    resolving: asyncio.Lock = field(default_factory=asyncio.Lock)


class Serving:
    """Answers completion requests beside the jobs of a controller that runs.

    serving = Serving(controller.placement, store, tokenizer, tenants=controller.tenants)
    sampling = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, seed=1)
    (completion,) = await serving.complete("acme", "sums@best", [Message("user", "2+2?")], sampling)
    serving.text(completion, sampling)
    await serving.close()
    """

    def __init__(
        self,
        placement: Placement,
        store: AsyncStore,
        tokenizer: TextTokenizer,
        settings: ServingSettings | None = None,
        *,
        tenants: Tenants | None = None,
    ) -> None:
        self._placement = placement
        self._quotas = tenants or Tenants({})
        self._store = store
        self._tokenizer = tokenizer
        self._settings = settings or ServingSettings()
        self._tenants: dict[TenantId, TenantPlaces] = {}
        self._prompts: Counter[str] = Counter()
        """Orders under way, by what names their prompt."""
        self._unbooked: dict[TenantId, Usage] = {}
        self._booking: asyncio.Task[None] | None = None
        self._lanes: dict[tuple[TenantId, str], Lane] = {}
        self._ids = itertools.count(1)
        self._shelves = {
            station.worker.name: Shelf(
                station,
                max_loaded=self._settings.max_loaded,
                max_bytes=self._settings.max_loaded_bytes,
                ids=self._ids,
            )
            for station in placement.stations
        }
        self._recoveries: dict[str, asyncio.Task[None]] = {}
        self._merging = asyncio.Lock()

    # Text -----------------------------------------------------------------------------------

    def least_tokens(self, prompt: Opening) -> int:
        """Return how many tokens a prompt takes at the very least. Cheap, however long it is."""
        if isinstance(prompt, str):
            return self._tokenizer.least_tokens([Message("user", prompt)])
        if len(prompt) and all(isinstance(part, Message) for part in prompt):
            return self._tokenizer.least_tokens(prompt)  # type: ignore[arg-type]
        return len(prompt)

    def tokens(self, prompt: Opening) -> np.ndarray:
        """Return the ids of messages (by the chat template, up to where the assistant begins), of
        text, or of what are ids already.

        Raises:
            InvalidRequest: nothing to complete, or messages that the base's template refuses.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        elif all(isinstance(part, Message) for part in prompt) and len(prompt):
            ids = self._tokenizer.render_opening(prompt)  # type: ignore[arg-type]
        else:
            ids = prompt
        if not len(ids):
            raise InvalidRequest("the prompt is empty; expected messages, text or token ids")
        wide = np.asarray(ids, dtype=np.int64)
        if wide.min() < 0 or wide.max() >= MAX_TOKEN_ID:
            raise InvalidRequest(f"token ids: expected 0 to less than {MAX_TOKEN_ID}")
        return wide.astype(np.int32)

    def text(self, completion: Completion, sampling: SamplingParams) -> str:
        """Return a completion as text, up to the stop token or stop string that ended it."""
        text = self._tokenizer.decode(completion.reply_tokens.tolist())
        if completion.stop_reason is StopReason.STOP_STRING:
            places = [text.find(stop) for stop in sampling.stop_strings]
            return text[: min((place for place in places if place >= 0), default=len(text))]
        return text

    async def resolve(self, tenant_id: TenantId, model: str) -> ServedVersion | None:
        """Return the version that a model name stands for now; None for the base.

        Raises:
            NotFound: this tenant has no such job, or the job no such version (any more).
            InvalidRequest: no name of a model.
        """
        return await self._store.call(find_version, tenant_id, model)

    # Completions ----------------------------------------------------------------------------

    async def complete(
        self,
        tenant_id: TenantId,
        model: str,
        prompt: Opening,
        sampling: SamplingParams,
        n: int = 1,
    ) -> list[Completion]:
        """Sample `n` completions of a prompt; cancelling takes what is under way out of the batch.

        The base's own stop tokens end a reply, too. Sample 0 has the seed of `sampling`, the others
        one that is derived from it: the same request under the same version gives the same tokens.

        Raises:
            InvalidRequest: faulty settings, or a prompt that leaves no room for a reply.
            NotFound: no such model.
            QuotaExceeded: the tenant has too many completions under way, or used up its day.
            WorkerLost: workers went away in every attempt.
        """
        tokens = self.tokens(prompt)
        self.check(tokens, sampling, n, most=self._settings.max_completions)
        await self._quotas.learn_today(self._store, tenant_id)
        self._quotas.check_tokens(tenant_id)
        version = await self.resolve(tenant_id, model)
        stops = (*sampling.stop_token_ids, *self._tokenizer.stop_token_ids)
        order = Order(
            tenant_id=tenant_id,
            model=model,
            tokens=tokens,
            sampling=replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops))),
            n=n,
            name=f"#serve/{next(self._ids)}",  # no job's sequence is called so
            version=version,
        )
        try:
            with self._open(tenant_id, n) as places:
                samples = [
                    asyncio.create_task(self._complete_one(order, index, places))
                    for index in range(n)
                ]
                return await all_or_none(samples)
        finally:
            await self._book(order)

    async def sample(
        self,
        tenant_id: TenantId,
        version: ServedVersion | None,
        tokens: np.ndarray,
        sampling: SamplingParams,
        n: int = 1,
        *,
        extras: Extras = Extras(),
    ) -> list[Completion]:
        """Continue given tokens `n` times under a given version. Stops are those of `sampling`
        alone, seeds are as in `complete`. The caller has made sure that the tenant may read the
        version, that `check` finds nothing wrong, and that there are not too many at once.

        Raises:
            NotFound: the version's files are gone.
            QuotaExceeded: the tenant used up its day.
            WorkerLost: workers went away in every attempt.
        """
        await self._quotas.learn_today(self._store, tenant_id)
        self._quotas.check_tokens(tenant_id)
        order = Order(
            tenant_id=tenant_id,
            model="",
            tokens=tokens,
            sampling=sampling,
            n=n,
            name=f"#sample/{next(self._ids)}",
            version=version,
            extras=extras,
            prefix_id=_prompt_id(tenant_id, tokens),
        )
        try:
            with self._shared_prompt(order):
                if n == 1:
                    return [await self._try(order, 0)]
                samples = [asyncio.create_task(self._try(order, index)) for index in range(n)]
                return await all_or_none(samples)
        finally:
            self._book_later(order)

    def why_waiting(self, tenant_id: TenantId) -> str:
        """Return in words why samples of a tenant wait for a worker; empty if none does."""
        num_waiting = sum(
            len(lane) for (owner, _), lane in self._lanes.items() if owner == tenant_id
        )
        return f"{num_waiting} samples wait for a place on a worker" if num_waiting else ""

    @contextmanager
    def _shared_prompt(self, order: Order) -> Iterator[None]:
        """Let orders with the same prompt know of each other."""
        self._prompts[order.prefix_id] += 1
        try:
            yield
        finally:
            self._prompts[order.prefix_id] -= 1
            if not self._prompts[order.prefix_id]:
                del self._prompts[order.prefix_id]

    @contextmanager
    def _open(self, tenant_id: TenantId, n: int) -> Iterator[asyncio.Semaphore]:
        """Count `n` completions of a tenant from arrival to answer."""
        settings = self._settings
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            tenant = TenantPlaces(asyncio.Semaphore(settings.max_completions))
        if tenant.num_open + n > settings.max_open:
            raise QuotaExceeded(
                f"{tenant.num_open} completions are under way or waiting; expected at most "
                f"{settings.max_open} together with the {n} new ones",
                settings.retry_after_s,
            )
        self._tenants[tenant_id] = tenant
        tenant.num_open += n
        try:
            yield tenant.places
        finally:
            tenant.num_open -= n
            if not tenant.num_open:
                del self._tenants[tenant_id]

    async def _complete_one(
        self, order: Order, index: int, places: asyncio.Semaphore
    ) -> Completion:
        async with places:
            return await self._try(order, index)

    async def _try(self, order: Order, index: int) -> Completion:
        """Sample one sequence of an order, on another worker if one is lost."""
        for _ in range(MAX_ATTEMPTS):
            station = order.station = order.station or await self._choose(order.version)
            try:
                return await self._sample(order, index, station)
            except WorkerLost:
                self._start_recovery(station)
                if order.station is station:
                    order.station = None
        raise WorkerLost(f"a worker was lost in all of {MAX_ATTEMPTS} attempts")

    async def _sample(self, order: Order, index: int, station: Station) -> Completion:
        """Wait for the tenant's turn on a worker, sample there, settle what it cost."""
        lane = self._lane(order.tenant_id, station)
        turn = await lane.turn(len(order.tokens), order.sampling.max_tokens)
        try:
            async with self._version(order, station, lane) as (policy_id, version, adapter_hash):
                request = self._request(order, index, policy_id, version)
                completion = await turn.place.generate(request)
            if completion.stop_reason is StopReason.CANCELLED:
                raise WorkerLost(f"{station.worker.name} gave up the sequence")
        except MarlaasError:  # a client who leaves has had the worker's time, and stays charged
            lane.give_back(turn)
            raise
        finally:
            turn.place.close()
        assert completion.adapter_hash == adapter_hash, "answered by another adapter"
        order.done.append((completion, lane.settle(turn, completion)))
        return completion

    def _request(
        self, order: Order, index: int, policy_id: PolicyId | None, version: int
    ) -> GenerateRequest:
        extras = order.extras
        is_first = index == 0
        is_shared = order.n > 1 or self._prompts[order.prefix_id] > 1
        return GenerateRequest(
            request_id=f"{order.name}/{index}/{next(self._ids)}",
            sequence_id=f"{order.name}/{index}",
            policy_id=policy_id,
            version=version,
            tokens=order.tokens,
            sampling=replace(order.sampling, seed=_seed(order.sampling.seed, index)),
            prefix_id=(order.prefix_id or order.name) if is_shared else "",
            prefix_len=len(order.tokens),
            prompt_logprobs=extras.prompt_logprobs and is_first,
            topk_prompt_logprobs=extras.topk_prompt_logprobs if is_first else 0,
            target_prompt_ids=extras.target_prompt_ids if is_first else None,
            prompt_alt_tokens_k=extras.prompt_alt_tokens_k if is_first else 0,
            prompt_logprobs_from=extras.prompt_logprobs_from if is_first else 0,
            topk_sample_logprobs=extras.topk_sample_logprobs,
        )

    @asynccontextmanager
    async def _version(
        self, order: Order, station: Station, lane: Lane
    ) -> AsyncIterator[tuple[PolicyId | None, int, str]]:
        """Have the order's version on a worker, as (policy id, version, adapter hash)."""
        if order.version is None:
            yield None, BASE_VERSION, ""
            return
        shelf = self._shelves[station.worker.name]
        async with order.resolving:
            try:
                loaded = await shelf.take(order.version, on_load=lane.charge_load)
            except NotFound:
                if not order.model:
                    raise
                # Pruned since the request came: what the name stands for now is as good, unless a
                # sibling has begun under the older one.
                version = await self.resolve(order.tenant_id, order.model)
                if order.is_begun or version is None or version == order.version:
                    raise
                order.version = version
                loaded = await shelf.take(version, on_load=lane.charge_load)
            order.is_begun = True
        try:
            yield loaded.policy_id, order.version.version, order.version.adapter_hash
        finally:
            shelf.put_back(loaded)

    async def _book(self, order: Order) -> None:
        """Count what was sampled as the tenant's, also if the client has left."""
        if not order.done:
            return
        usage = _usage_of(order)
        self._quotas.use(order.tenant_id, tokens=usage.served_tokens)
        job = order.version.job if order.version else ""
        await self._store.call(Store.add_usage, order.tenant_id, job, usage)
        if order.station is not None:
            await order.station.learn_rates()

    def _book_later(self, order: Order) -> None:
        """Count what was sampled now, and have it written with what others sample meanwhile."""
        if not order.done:
            return
        usage, tenant_id = _usage_of(order), order.tenant_id
        self._quotas.use(tenant_id, tokens=usage.served_tokens)
        self._unbooked[tenant_id] = self._unbooked.get(tenant_id, Usage()) + usage
        if self._booking is None:
            self._booking = asyncio.create_task(self._write_usage(), name="usage of samples")

    async def _write_usage(self) -> None:
        await asyncio.sleep(self._settings.book_every_s)
        await self._write_unbooked()
        self._booking = None
        for station in self._placement.alive:
            await station.learn_rates()

    async def _write_unbooked(self) -> None:
        while self._unbooked:
            tenant_id, usage = self._unbooked.popitem()
            try:
                await self._store.call(Store.add_usage, tenant_id, "", usage)
            except StoreUnavailable as error:
                logger.warning("usage of samples of %s is not written: %s", tenant_id, error)

    @property
    def max_context(self) -> int:
        """Tokens that a prompt and its continuation may have together."""
        return self._placement.stations[0].worker.generator.capabilities.max_context

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The base's own."""
        return tuple(self._tokenizer.stop_token_ids)

    def check(self, tokens: np.ndarray, sampling: SamplingParams, n: int, *, most: int) -> None:
        """Refuse what could not be sampled, before anybody waits for it.

        Raises:
            InvalidRequest: naming every fault.
            UnsupportedFeature: the workers' generator lacks something.
        """
        problems = list(sampling_problems(sampling))
        if not 1 <= n <= most:
            problems.append(f"n = {n}; expected 1 to {most}")
        able = self._placement.stations[0].worker.generator.capabilities
        if len(tokens) >= able.max_context:
            problems.append(
                f"the prompt of {len(tokens)} tokens leaves no room in a context of "
                f"{able.max_context}"
            )
        if problems:
            raise InvalidRequest(*problems)
        if (sampling.min_p and not able.min_p) or (sampling.stop_strings and not able.stop_strings):
            raise UnsupportedFeature("the workers' generator has no min_p or no stop strings")

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
        ready = [
            station
            for station in up
            if station.load.has_room
            and (version is None or version in self._shelves[station.worker.name])
        ]
        return min(ready or up, key=self._num_busy)

    def _num_busy(self, station: Station) -> int:
        """Return how many sequences are at a station, or wait for it here."""
        name = station.worker.name
        waiting = sum(len(lane) for (_, where), lane in self._lanes.items() if where == name)
        return station.load.num_sampling + station.load.num_reserved + waiting

    def _lane(self, tenant_id: TenantId, station: Station) -> Lane:
        key = tenant_id, station.worker.name
        if key not in self._lanes:
            self._lanes[key] = Lane(tenant_id, station, self._placement)
        return self._lanes[key]

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

    # The rest -------------------------------------------------------------------------------

    async def merge(self, tenant_id: TenantId, model: str, out_folder: Path) -> ServedVersion:
        """Write a version merged into the base as a Hugging Face folder, one merge at a time;
        return which version it was.

        Raises:
            NotFound: no such model, or its files were pruned meanwhile.
            InvalidRequest: the base itself, or `out_folder` exists.
        """
        async with self._merging:
            version = await self.resolve(tenant_id, model)
            if version is None:
                raise InvalidRequest("the base needs no merging; expected a version of a job")
            alive = self._placement.alive or self._placement.stations
            await alive[0].worker.trainer.merge(version.folder, str(out_folder))
            return version

    async def close(self) -> None:
        """End what goes on in the background. Requests are ended by whoever awaits them."""
        tasks = [*self._recoveries.values(), *([self._booking] if self._booking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._write_unbooked()


# ---------------------------------------------------------------------------------------------
# Models


def find_version(store: Store, tenant_id: TenantId, model: str) -> ServedVersion | None:
    """Return the version that a model name stands for now; None for the base.

    Raises:
        NotFound: this tenant has no such job, or the job no such version (any more).
        InvalidRequest: no name of a model.
    """
    if model == BASE_MODEL:
        return None
    job, at, which = model.partition("@")
    is_number = which.isascii() and which.isdigit() and len(which) <= MAX_VERSION_DIGITS
    if not job or (at and not is_number and which not in ("best", "promoted", "latest")):
        raise InvalidRequest(
            f"model {model!r}; expected base, JOB, JOB@NUMBER, JOB@best, JOB@promoted or JOB@latest"
        )
    store.job(tenant_id, job)  # NotFound, also if it is another tenant's
    kept = {row.version: row for row in store.versions(tenant_id, job) if row.has_adapter}
    number = int(which) if is_number else _number(store, tenant_id, job, which, set(kept))
    if number not in kept:
        there = ", ".join(map(str, sorted(kept))) or "none"
        raise NotFound(f"version {number} of job {job!r} is not kept; kept: {there}")
    return ServedVersion(
        tenant_id=tenant_id,
        job=job,
        version=number,
        adapter_hash=kept[number].adapter_hash,
        folder=store.files.version(tenant_id, job, number).adapter,
    )


def _number(store: Store, tenant_id: TenantId, job: str, which: str, kept: set[int]) -> int:
    """Return which version a word stands for; "" is the promoted one, or else the newest."""
    if not kept:
        raise NotFound(f"job {job!r} has no version yet")
    if which == "best":
        judged = {
            record.version: record.success
            for record in store.evaluations(tenant_id, job)
            if record.version in kept
        }
        if not judged:
            raise NotFound(f"no kept version of job {job!r} has been evaluated")
        return max(judged, key=lambda version: (judged[version], -version))
    if which != "latest":
        promoted = store.promoted(tenant_id, job)
        if promoted is not None:
            return promoted
        if which:
            raise NotFound(f"no version of job {job!r} is promoted")
    return max(kept)


# ---------------------------------------------------------------------------------------------
# Sampling


def sampling_problems(sampling: SamplingParams) -> Iterator[str]:
    """Yield what is wrong with settings that a client chose."""
    if sampling.max_tokens < 1:
        yield f"max_tokens = {sampling.max_tokens}; expected at least 1"
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        yield f"temperature = {sampling.temperature}; expected a finite number, 0 or more"
    if not 0 < sampling.top_p <= 1:
        yield f"top_p = {sampling.top_p}; expected more than 0, at most 1"
    if sampling.top_k < 0:
        yield f"top_k = {sampling.top_k}; expected 0 (no limit) or more"
    if not 0 <= sampling.min_p <= 1:
        yield f"min_p = {sampling.min_p}; expected 0 to 1"
    if not 0 <= sampling.seed < 1 << 63:
        yield f"seed = {sampling.seed}; expected 0 to 2^63 - 1"
    if len(sampling.stop_strings) > MAX_STOP_STRINGS:
        yield f"{len(sampling.stop_strings)} stop strings; expected at most {MAX_STOP_STRINGS}"
    lengths = [len(stop) for stop in sampling.stop_strings]
    if not all(1 <= length <= MAX_STOP_STRING_CHARS for length in lengths):
        yield f"stop strings of {lengths} characters; expected 1 to {MAX_STOP_STRING_CHARS}"


def _usage_of(order: Order) -> Usage:
    completions = [completion for completion, _ in order.done]
    num_cached = sum(completion.num_cached_tokens for completion in completions)
    return Usage(
        served_tokens=sum(len(completion.tokens) for completion in completions),
        prefill_tokens=len(completions) * len(order.tokens) - num_cached,
        device_s=sum(seconds for _, seconds in order.done),
    )


def _prompt_id(tenant_id: TenantId, tokens: np.ndarray) -> str:
    """Return what names a prompt of a tenant; another tenant's is never the same."""
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16, key=b"prompt")
    return f"#prompt/{tenant_id}/{digest.hexdigest()}"


def _seed(seed: int, index: int) -> int:
    """Return the seed of one of several samples; the first has the one that was asked for."""
    return derive_seed("serve", seed, index) if index else seed
