"""What happened to jobs: events, learning curves, evaluations, rollouts, logs. Nothing here changes
anything, but for an evaluation that is asked for."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from marlaas.loop.model_names import find_version
from marlaas.service.auth import WithCaller
from marlaas.service.parts import Parts, WithParts
from marlaas.service.places import MAX_CURSOR, After, JobName, PageSize
from marlaas.service.streams import EventResponse
from marlaas.service.wire.common import Responses
from marlaas.service.wire.groups import GroupInfo, GroupPage, GroupRow
from marlaas.service.wire.jobs import (
    EvaluationBody,
    EvaluationInfo,
    EvaluationList,
    EvaluationStarted,
    EventInfo,
    EventPage,
    StepInfo,
    StepPage,
)
from marlaas.store.db import GroupState, Store
from marlaas.types import EventKind, StepRecord, TenantId

router = APIRouter(tags=["records"])

LOG_KINDS = (EventKind.LOG, EventKind.NOTICE)


# ---------------------------------------------------------------------------------------------
# Events

STREAM = "text/event-stream"
_EVENT_ANSWERS: Responses = {
    200: {
        "description": "A page of events; with `Accept: text/event-stream` a stream of them",
        "content": {
            STREAM: {
                "schema": {"type": "string"},
                "example": 'id: 7\nevent: step\ndata: {"seq": 7, ...}\n\n',
            }
        },
    }
}
Behind = Annotated[
    int | None,
    Query(
        ge=0,
        le=MAX_CURSOR,
        description="Continue behind this number. Without it a page begins with the first event, "
        "and a stream with the next one.",
    ),
]
LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=20,
        pattern="^[0-9]{1,16}$",
        description="What a stream continues behind; wins over `after`.",
    ),
]
Accept = Annotated[str, Header(include_in_schema=False)]


@router.get("/v1/events", responses=_EVENT_ANSWERS, response_model=EventPage)
async def list_events(
    caller: WithCaller,
    parts: WithParts,
    accept: Accept = "",
    last_event_id: LastEventId = None,
    after: Behind = None,
    limit: PageSize = 100,
) -> EventPage | Response:
    """What happened to any job of the tenant, as a page or as it happens."""
    if STREAM in accept:
        return await _stream(parts, caller, None, last_event_id, after)
    return await _page(parts, caller.tenant_id, None, after or 0, limit)


@router.get("/v1/jobs/{job}/events", responses=_EVENT_ANSWERS, response_model=EventPage)
async def list_job_events(
    caller: WithCaller,
    parts: WithParts,
    job: JobName,
    accept: Accept = "",
    last_event_id: LastEventId = None,
    after: Behind = None,
    limit: PageSize = 100,
) -> EventPage | Response:
    """What happened to one job, as a page or as it happens."""
    await parts.store.call(Store.job, caller.tenant_id, job)
    if STREAM in accept:
        return await _stream(parts, caller, job, last_event_id, after)
    return await _page(parts, caller.tenant_id, job, after or 0, limit)


async def _stream(
    parts: Parts, caller: WithCaller, job: str | None, last_event_id: str | None, after: int | None
) -> EventResponse:
    stream = await parts.hub.open(
        caller.tenant,
        key_id=caller.identity.key.key_id,
        job=job,
        after=after if last_event_id is None else int(last_event_id),
    )
    return EventResponse(parts.hub, stream)


async def _page(
    parts: Parts,
    tenant_id: TenantId,
    job: str | None,
    after: int,
    limit: int,
    *,
    kinds: Sequence[EventKind] = (),
) -> EventPage:
    events = await parts.store.call(
        Store.events, tenant_id, after=after, job=job, kinds=kinds, limit=limit
    )
    return EventPage(
        events=[EventInfo.of(event) for event in events],
        next=events[-1].seq if events else after,
    )


@router.get("/v1/jobs/{job}/logs")
async def list_logs(
    caller: WithCaller, parts: WithParts, job: JobName, after: After = 0, limit: PageSize = 100
) -> EventPage:
    """What the tenant's own code printed or raised, and what made no progress."""
    await parts.store.call(Store.job, caller.tenant_id, job)
    return await _page(parts, caller.tenant_id, job, after, limit, kinds=LOG_KINDS)


# ---------------------------------------------------------------------------------------------
# Steps and evaluations


@router.get("/v1/jobs/{job}/steps")
async def list_steps(
    caller: WithCaller, parts: WithParts, job: JobName, after: After = 0, limit: PageSize = 1000
) -> StepPage:
    """The learning curve, a row a step."""
    records = await parts.store.call(_steps, caller.tenant_id, job, after, limit)
    return StepPage(
        steps=[StepInfo.of(record) for record in records],
        next=records[-1].step if records else after,
    )


def _steps(store: Store, tenant_id: TenantId, job: str, after: int, limit: int) -> list[StepRecord]:
    store.job(tenant_id, job)
    return store.steps(tenant_id, job, after=after)[:limit]


@router.get("/v1/jobs/{job}/evaluations")
async def list_evaluations(caller: WithCaller, parts: WithParts, job: JobName) -> EvaluationList:
    """How versions did on held-out prompts."""
    await parts.store.call(Store.job, caller.tenant_id, job)
    records = await parts.store.call(Store.evaluations, caller.tenant_id, job)
    return EvaluationList(evaluations=[EvaluationInfo.of(record) for record in records])


@router.post(
    "/v1/jobs/{job}/evaluations",
    status_code=202,
    response_model=EvaluationStarted,
    responses={200: {"model": EvaluationInfo, "description": "The version was judged before"}},
)
async def evaluate(
    caller: WithCaller, parts: WithParts, job: JobName, body: EvaluationBody
) -> EvaluationStarted | Response:
    """Have a kept version judged. An event of the job says how it did; one that was judged before
    is answered with that."""
    served = await parts.store.call(find_version, caller.tenant_id, f"{job}@{body.version}")
    assert served is not None, "a name with @ is no base"
    judged = await parts.store.call(Store.evaluations, caller.tenant_id, job)
    for record in judged:
        if record.version == served.version:
            return JSONResponse(EvaluationInfo.of(record).model_dump())
    await parts.controller.evaluate(caller.tenant_id, job, served.version)
    return EvaluationStarted(version=served.version)


# ---------------------------------------------------------------------------------------------
# Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Which groups to list."""

    step: Annotated[
        int | None, Query(ge=0, le=MAX_CURSOR, description="Only groups that this step took.")
    ] = None
    state: Annotated[GroupState | None, Query(description="Only groups in this state.")] = None
    min_reward: Annotated[
        float | None, Query(allow_inf_nan=False, description="Least mean reward.")
    ] = None
    max_reward: Annotated[
        float | None, Query(allow_inf_nan=False, description="Greatest mean reward.")
    ] = None
    after: Annotated[
        int, Query(ge=-1, le=MAX_CURSOR, description="Continue behind the group of this index.")
    ] = -1
    limit: PageSize = 100


@router.get("/v1/jobs/{job}/groups")
async def list_groups(
    caller: WithCaller, parts: WithParts, job: JobName, chosen: Annotated[Chosen, Depends()]
) -> GroupPage:
    """List the groups of a job by index."""
    await parts.store.call(Store.job, caller.tenant_id, job)
    rows = await parts.store.call(Store.group_page, caller.tenant_id, job, **asdict(chosen))
    return GroupPage(
        groups=[GroupRow.of(row) for row in rows],
        next=rows[-1].index if len(rows) == chosen.limit else None,
    )


@router.get("/v1/jobs/{job}/groups/{index}")
async def get_group(
    caller: WithCaller,
    parts: WithParts,
    job: JobName,
    index: Annotated[int, Path(ge=0, le=MAX_CURSOR)],
    tokens: Annotated[
        bool, Query(description="Add every token with its id, logprob and version.")
    ] = False,
) -> GroupInfo:
    """Show the trajectories of one prompt: what was said, what it earned, how it ended."""
    stored = await parts.store.call(Store.group, caller.tenant_id, job, index)
    # Thousands of tokens as JSON numbers take their time; the loop has better things to do.
    return await asyncio.to_thread(GroupInfo.of, stored, with_tokens=tokens)
