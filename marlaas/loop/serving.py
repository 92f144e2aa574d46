"""Completions from the base, or from any kept version of any job or run, while others train.

    | `complete`                         | `sample`, `start`                                  |
    |------------------------------------|----------------------------------------------------|
    | a model name, resolved at the time | a version that the caller has found                |
    | messages, text or ids              | ids, and what is to be said of them (`Extras`)     |
    | the base's stop tokens, too        | the stops that are asked for, and no others        |
    | few at once, for people            | thousands: most wait, in a few hundred bytes each  |
    | a spent day is refused             | a spent day is waited out                          |

Both become an order (`loop/dispatch.py`).

- Every completion competes like a group of a job: it waits for its tenant's turn on a worker, is
  charged an estimate in device seconds, and settled on what it took. So serving cannot starve
  training, nor training serving; of one tenant's work, serving counts as one job per worker.
- A served version is loaded beside the policy in training (`loop/shelf.py`), never taken from it:
  training may retire it, end or be deleted meanwhile. It is fixed when the request's first
  completion begins, and checked on every completion by the adapter's content hash.
- Bounded: completions under way and waiting per tenant, versions loaded per worker.
- Text is rendered once, on the way in; a conversation is computed anew with every request.
"""

import asyncio
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from marlaas.errors import InvalidRequest, QuotaExceeded, UnsupportedFeature
from marlaas.loop.dispatch import NO_EXTRAS, Dispatcher, Extras, Order, Places, prompt_id_of
from marlaas.loop.ledger import Ledger
from marlaas.loop.model_names import find_version
from marlaas.loop.operations import QueueState, Waiting
from marlaas.loop.policies import Placement
from marlaas.loop.rollout import ChatTokenizer
from marlaas.loop.shelf import ServedVersion
from marlaas.loop.usage import Tenants
from marlaas.store.async_store import AsyncStore
from marlaas.store.db import Store
from marlaas.types import Completion, Message, SamplingParams, StopReason, TenantId

MAX_ATTEMPTS = 2
"""Workers that one completion may lose."""

MAX_SAMPLE_ATTEMPTS = 4
"""Workers that one sample may lose: nobody watches it, so it may take its time."""

BATCHES_AHEAD = 2
"""Batches that a tenant's samples may fill while they have their turn or wait in its lanes: as many
wait there as a batch holds that comes to its end as a whole. So no tenant's lane runs dry before
those of others have taken more than their share."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKENS = 256
"""A decode step compares every row of its batch with as many as the longest list has."""

MAX_COLUMNS = 256
"""Tokens that may be asked for at each position; the engine has no more."""

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
    max_sampling: int = 2048
    """The same of samples; as many as fit into the batches are sampled at the same time."""
    max_loaded: int = 64
    """Versions that one worker holds for serving. More than `max_completions`, so that no tenant
    can occupy them all."""
    max_loaded_bytes: int = 4 << 30
    """What these may take together, as far as their sizes are known."""
    retry_after_s: float = 1.0
    """What a tenant with too many completions is told to wait."""


class Serving:
    """Answers completion requests beside the jobs of a controller that runs.

    serving = Serving(controller.placement, store, tokenizer, tenants=controller.tenants)
    sampling = SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, seed=1)
    (completion,) = await serving.complete("acme", "sums@best", [Message("user", "2+2?")], sampling)
    serving.text(completion, sampling)
    completions = await serving.sample("acme", version, tokens, sampling, n=8)
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
        self._completing: dict[TenantId, Places] = {}
        """Tenants with open completions."""
        self._sampling: dict[TenantId, Places] = {}
        """Tenants with open samples."""
        self._numbers = itertools.count(1)
        self._ledger = Ledger(store, self._learn_rates)
        self._dispatcher = Dispatcher(
            placement,
            self._quotas,
            max_loaded=self._settings.max_loaded,
            max_loaded_bytes=self._settings.max_loaded_bytes,
            on_end=self._note_end,
        )
        self._merging = asyncio.Lock()

    @property
    def max_context(self) -> int:
        """Tokens of a prompt and its completion together."""
        return self._placement.stations[0].worker.generator.capabilities.max_context

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """What ends a reply of the base, where nobody says otherwise."""
        return tuple(self._tokenizer.stop_token_ids)

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
        self._check(tokens, sampling, n, self._settings.max_completions)
        await self._quotas.learn_today(self._store, tenant_id)
        self._quotas.check_tokens(tenant_id)
        version = await self.resolve(tenant_id, model)
        stops = (*sampling.stop_token_ids, *self._tokenizer.stop_token_ids)
        order = Order(
            tenant_id=tenant_id,
            name=f"#serve/{next(self._numbers)}",  # no job's sequence is called so
            tokens=tokens,
            sampling=replace(sampling, stop_token_ids=tuple(dict.fromkeys(stops))),
            n=n,
            version=version,
            find_again=partial(self.resolve, tenant_id, model),
            max_attempts=MAX_ATTEMPTS,
            result=asyncio.get_running_loop().create_future(),
        )
        self._submit(order, self._completion_places(tenant_id))
        try:
            return await self._result(order)
        finally:
            await self._book(order)

    def _completion_places(self, tenant_id: TenantId) -> Places:
        return self._completing.get(tenant_id) or Places(
            tenant_id, self._settings.max_completions, self._settings.max_open, self._completing
        )

    # Samples --------------------------------------------------------------------------------

    async def sample(
        self,
        tenant_id: TenantId,
        version: ServedVersion | None,
        tokens: np.ndarray,
        sampling: SamplingParams,
        n: int = 1,
        *,
        extras: Extras = NO_EXTRAS,
    ) -> list[Completion]:
        """Sample `n` continuations of given ids under a version; cancelling takes what is under way
        out of the batch. Seeds are as in `complete`; stops are those of `sampling`.

        Raises:
            InvalidRequest: faulty settings, or more than the context holds.
            QuotaExceeded: the tenant has too many samples under way.
            NotFound: the version is gone.
            WorkerLost: workers went away in every attempt.
        """
        await self.prepare(tenant_id)
        self.check_sample(tokens, sampling, n, extras)
        return await self._result(self.start(tenant_id, version, tokens, sampling, n, extras))

    async def prepare(self, tenant_id: TenantId) -> None:
        """Learn what has to be known of a tenant before it samples."""
        await self._quotas.learn_today(self._store, tenant_id)

    def check_sample(
        self, tokens: np.ndarray, sampling: SamplingParams, n: int, extras: Extras = NO_EXTRAS
    ) -> None:
        """Refuse what cannot be sampled; which ids the base has, the engine knows.

        Raises:
            InvalidRequest, UnsupportedFeature: see `sample`.
        """
        self._check(tokens, sampling, n, self._settings.max_sampling, is_sample=True)
        if problems := list(extras_problems(extras, len(tokens))):
            raise InvalidRequest(*problems)
        able = self._placement.stations[0].worker.generator.capabilities
        asks_prompt = extras.prompt_logprobs or extras.target_prompt_ids is not None
        if asks_prompt and not able.prompt_logprobs:
            raise UnsupportedFeature("the workers' generator has no logprobs of prompts")
        if extras.topk_prompt_logprobs and not able.topk_prompt_logprobs:
            raise UnsupportedFeature("the workers' generator has no most likely tokens of prompts")

    def start(
        self,
        tenant_id: TenantId,
        version: ServedVersion | None,
        tokens: np.ndarray,
        sampling: SamplingParams,
        n: int,
        extras: Extras,
    ) -> Order:
        """Begin what `sample` returns once it is there, after `prepare` and `check_sample`; whoever
        awaits the order's `result` has to be ready for its error.

        Raises:
            QuotaExceeded: the tenant has too many samples under way.
        """
        order = Order(
            tenant_id=tenant_id,
            name=f"#sample/{next(self._numbers)}",
            tokens=tokens,
            sampling=sampling,
            n=n,
            version=version,
            extras=extras,
            prompt_id=prompt_id_of(tenant_id, version, tokens),
            max_attempts=MAX_SAMPLE_ATTEMPTS,
            result=asyncio.get_running_loop().create_future(),
        )
        places = self._sampling.get(tenant_id) or Places(
            tenant_id,
            BATCHES_AHEAD * self._dispatcher.max_decoding,
            self._settings.max_sampling,
            self._sampling,
            may_wait_for_day=True,
        )
        self._submit(order, places)
        return order

    def cancel(self, order: Order) -> None:
        """Give up what `start` began."""
        self._dispatcher.cancel(order)

    def why_waiting(self, tenant_id: TenantId) -> Waiting:
        """Return why the samples of a tenant are not there yet."""
        if spent := self._quotas.why_no_tokens(tenant_id):
            return Waiting(queue_state=QueueState.PAUSED_RATE_LIMIT, reason=spent)
        if self._dispatcher.is_down:
            reason = "the engine is being started again"
            return Waiting(queue_state=QueueState.PAUSED_CAPACITY, reason=reason)
        return Waiting()

    # Orders ---------------------------------------------------------------------------------

    def _submit(self, order: Order, places: Places) -> None:
        if places.num_open + order.n > places.max_open:
            raise QuotaExceeded(
                f"{places.num_open} completions are under way or waiting; expected at most "
                f"{places.max_open} together with the {order.n} new ones",
                self._settings.retry_after_s,
            )
        places.of_kind[order.tenant_id] = places
        self._dispatcher.submit(order, places)

    async def _result(self, order: Order) -> list[Completion]:
        try:
            return await asyncio.shield(order.result)
        except asyncio.CancelledError:
            if not order.result.done():
                self._dispatcher.cancel(order)
                await asyncio.wait([order.result])
            if not order.result.cancelled():
                order.result.exception()  # whoever was to hear of it has left
            raise

    def _note_end(self, order: Order, places: Places) -> None:
        """An order is over: count its samples as the tenant's, also if the client has left."""
        if not places.num_open:
            del places.of_kind[order.tenant_id]
        self._quotas.use(order.tenant_id, tokens=order.served_tokens)
        if places.of_kind is self._sampling and order.device_s:
            self._ledger.add(order.tenant_id, "", order.usage())

    async def _book(self, order: Order) -> None:
        """Write what a completion took before it is answered."""
        if order.device_s:
            job = order.version.job if order.version else ""
            await self._store.call(Store.add_usage, order.tenant_id, job, order.usage())
            await self._learn_rates()

    async def _learn_rates(self) -> None:
        for station in self._placement.alive:
            await station.learn_rates()

    def _check(
        self,
        tokens: np.ndarray,
        sampling: SamplingParams,
        n: int,
        max_n: int,
        *,
        is_sample: bool = False,
    ) -> None:
        problems = list(sampling_problems(sampling))
        if not 1 <= n <= max_n:
            problems.append(f"n = {n}; expected 1 to {max_n}")
        able = self._placement.stations[0].worker.generator.capabilities
        room = able.max_context - len(tokens)
        if room <= 0:
            problems.append(
                f"the prompt of {len(tokens)} tokens leaves no room in a context of "
                f"{able.max_context}"
            )
        elif is_sample and not len(tokens):
            problems.append("the prompt is empty; expected at least one token")
        elif is_sample and sampling.max_tokens > room:
            problems.append(
                f"max_tokens = {sampling.max_tokens}; expected at most {room}, what a prompt of "
                f"{len(tokens)} tokens leaves of a context of {able.max_context}"
            )
        if problems:
            raise InvalidRequest(*problems)
        if (sampling.min_p and not able.min_p) or (sampling.stop_strings and not able.stop_strings):
            raise UnsupportedFeature("the workers' generator has no min_p or no stop strings")

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
        """End what goes on in the background. Orders are ended by whoever made them."""
        await self._dispatcher.close()
        await self._ledger.close()


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
    if len(sampling.stop_token_ids) > MAX_STOP_TOKENS:
        yield f"{len(sampling.stop_token_ids)} stop tokens; expected at most {MAX_STOP_TOKENS}"
    if not all(0 <= token < MAX_TOKEN_ID for token in sampling.stop_token_ids):
        yield f"stop tokens: expected ids, 0 to less than {MAX_TOKEN_ID}"
    lengths = [len(stop) for stop in sampling.stop_strings]
    if not all(1 <= length <= MAX_STOP_STRING_CHARS for length in lengths):
        yield f"stop strings of {lengths} characters; expected 1 to {MAX_STOP_STRING_CHARS}"


def extras_problems(extras: Extras, num_tokens: int) -> Iterator[str]:
    """Yield what is wrong with what is asked beside the sampled tokens."""
    for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k", "topk_sample_logprobs"):
        if not 0 <= getattr(extras, name) <= MAX_COLUMNS:
            yield f"{name} = {getattr(extras, name)}; expected 0 to {MAX_COLUMNS}"
    if not 0 <= extras.prompt_logprobs_from <= num_tokens:
        yield f"prompt_logprobs_from = {extras.prompt_logprobs_from}; expected 0 to {num_tokens}"
    targets = extras.target_prompt_ids
    if targets is None:
        return
    if targets.ndim != 2 or len(targets) != num_tokens or not 1 <= targets.shape[1] <= MAX_COLUMNS:
        yield (
            f"target_prompt_ids has shape {targets.shape}; expected ({num_tokens}, K) with K from "
            f"1 to {MAX_COLUMNS}"
        )
