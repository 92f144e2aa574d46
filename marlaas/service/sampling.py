"""Completions in OpenAI's shapes, from the base or from any kept version of a job of the tenant.

Tokens that are sampled here are charged to the tenant like those of its jobs. What OpenAI's routes
take and this service cannot honour is refused by name.
"""

import asyncio
from itertools import count
from typing import Literal

from fastapi import APIRouter

from marlaas import runtime
from marlaas.errors import InvalidRequest, UnsupportedFeature
from marlaas.loop.model_names import BASE_MODEL
from marlaas.loop.serving import Opening
from marlaas.service.auth import Caller, WithCaller
from marlaas.service.parts import Parts, WithParts
from marlaas.service.wire.completions import (
    ChatAnswer,
    ChatBody,
    ChatChoice,
    CompletionAnswer,
    CompletionBody,
    CompletionChoice,
    ModelInfo,
    ModelList,
    SamplingBody,
    TokenCounts,
)
from marlaas.service.wire.groups import MessageInfo
from marlaas.store.db import Store
from marlaas.types import Completion, Message, SamplingParams, StopReason, TenantId

router = APIRouter(tags=["sampling"])

DEFAULT_REPLY_TOKENS = 256
"""What a chat reply may take when the request does not say."""

_numbers = count(1)


@router.get("/v1/models")
async def list_models(caller: WithCaller, parts: WithParts) -> ModelList:
    """List what may be named as `model`: the base, the tenant's jobs, and their kept versions."""
    return ModelList(data=await parts.store.call(_models, caller.tenant_id))


def _models(store: Store, tenant_id: TenantId) -> list[ModelInfo]:
    models = [ModelInfo(id=BASE_MODEL, created=0, owned_by="marlaas")]
    for stored in store.jobs(tenant_id):
        job = stored.spec.name
        kept = [row for row in store.versions(tenant_id, job) if row.has_adapter]
        # A job that is called as the base is served by its versions only.
        names = [(job, kept[-1].created_s)] if kept and job != BASE_MODEL else []
        names += [(f"{job}@{row.version}", row.created_s) for row in kept]
        models += [
            ModelInfo(id=name, created=int(created_s), owned_by=tenant_id)
            for name, created_s in names
        ]
    return models


@router.post("/v1/chat/completions")
async def chat(caller: WithCaller, parts: WithParts, body: ChatBody) -> ChatAnswer:
    """Reply to a conversation."""
    asked = body.max_completion_tokens or body.max_tokens
    messages = [Message(message.role, message.content) for message in body.messages]
    sampled = await _complete(parts, caller, body, messages, asked or DEFAULT_REPLY_TOKENS)
    return ChatAnswer(
        id=_name("chatcmpl"),
        created=int(runtime.wall_time_s()),
        model=body.model,
        choices=[
            ChatChoice(
                index=index,
                message=MessageInfo(role="assistant", content=text),
                finish_reason=_reason(completion),
            )
            for index, (completion, text) in enumerate(sampled.replies)
        ],
        usage=sampled.counts,
    )


@router.post("/v1/completions")
async def complete(caller: WithCaller, parts: WithParts, body: CompletionBody) -> CompletionAnswer:
    """Continue a text, or token ids."""
    sampled = await _complete(parts, caller, body, body.prompt, body.max_tokens)
    return CompletionAnswer(
        id=_name("cmpl"),
        created=int(runtime.wall_time_s()),
        model=body.model,
        choices=[
            CompletionChoice(index=index, text=text, finish_reason=_reason(completion))
            for index, (completion, text) in enumerate(sampled.replies)
        ],
        usage=sampled.counts,
    )


class _Sampled:
    """Completions with their text, and what they count."""

    def __init__(self, prompt_tokens: int, replies: list[tuple[Completion, str]]) -> None:
        self.replies = replies
        completion_tokens = sum(len(completion.tokens) for completion, _ in replies)
        self.counts = TokenCounts(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


def _check_room(num_tokens: int, max_context: int) -> None:
    """Refuse a prompt that leaves no room for a reply."""
    if num_tokens >= max_context:
        raise InvalidRequest(
            f"the prompt has at least {num_tokens} tokens; expected less than the base's context "
            f"of {max_context}"
        )


async def _complete(
    parts: Parts, caller: Caller, body: SamplingBody, prompt: Opening, max_tokens: int
) -> _Sampled:
    if body.stream:
        raise UnsupportedFeature("stream: tokens are not sent one by one; expected stream: false")
    # What surely does not fit is refused before it is encoded. The rest may take a second: not on
    # the loop, and not on more than one thread of all a tenant's.
    _check_room(parts.serving.least_tokens(prompt), parts.max_context)
    async with parts.readings.of(caller.tenant_id):
        tokens = await asyncio.to_thread(parts.serving.tokens, prompt)
    _check_room(len(tokens), parts.max_context)
    sampling = SamplingParams(
        max_tokens=min(max_tokens, parts.max_context - len(tokens)),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        stop_strings=_stops(body),
        # A caller who names no seed wants another reply each time.
        seed=next(_numbers) if body.seed is None else body.seed,
    )
    completions = await parts.serving.complete(
        caller.tenant_id, body.model, tokens, sampling, body.n
    )
    replies = [(completion, parts.serving.text(completion, sampling)) for completion in completions]
    return _Sampled(len(tokens), replies)


def _stops(body: SamplingBody) -> tuple[str, ...]:
    if body.stop is None:
        return ()
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def _reason(completion: Completion) -> Literal["stop", "length"]:
    is_stop = completion.stop_reason in (StopReason.STOP_TOKEN, StopReason.STOP_STRING)
    return "stop" if is_stop else "length"


def _name(kind: str) -> str:
    return f"{kind}-{runtime.derive_seed(next(_numbers), str(runtime.wall_time_s())):016x}"
