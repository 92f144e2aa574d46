"""Client processes: what they are told to do, that they are there, how they ended."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from marlaas import runtime
from marlaas.errors import InvalidRequest, QuotaExceeded
from marlaas.service.limits import read_body
from marlaas.service.parts import WithParts
from marlaas.service.tinker import bodies
from marlaas.service.tinker.bodies import check_text, check_total, read_metadata
from marlaas.service.tinker.door import ANY_BODY, PREFIX, WithTenant, answer, read, says
from marlaas.service.tinker.losses import INFO
from marlaas.store.db import Store
from marlaas.types import Session, TenantId

router = APIRouter(prefix=PREFIX, tags=["tinker: sessions"])

CLIENT_CONFIG = {
    # Buffered by number here, so chunks of one batch may come in any order.
    "parallel_fwdbwd_chunks": True,
    # Bodies shrink tenfold; a thread unpacks them.
    "proto_compress_fwdbwd": True,
    # Each sample in flight is one open poll. This many cost a few kilobytes each; more would only
    # wait in a longer line here. Another client may have as many.
    "sample_max_concurrent_requests": 1000,
    # One long poll a sample, not one poller a client. A poll that waits costs memory, and a poller
    # costs requests: it is told that a sample is done, and then fetches it. The event loop that
    # answers requests feeds the workers too.
    "sample_use_retrieve_futures": False,
    # Losses of a client's own are computed at the client.
    "custom_loss_server_side": False,
    # Clones draw their numbers at random from a billion: no round trip.
    "sample_join_sampling_session": False,
    "pjwt_auth_enabled": False,
}
DYNAMIC_CONFIG = {
    "refresh_interval_sec": 300,
    # What nobody waits for any more leaves the batch.
    "sample_cancel_enabled": True,
    "sample_cancel_max_batch_size": 64,
}

END_REASONS = ("success", "errored", "interrupted")
MAX_TAGS = 64
MAX_PAGE = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
AccessScope = Annotated[str | None, Query(pattern="^(owned|accessible)$")]
SessionName = Annotated[str, Path(max_length=200)]


@router.post("/client/config", openapi_extra=says(bodies.ConfigBody))
async def client_config(tenant: WithTenant, request: Request) -> Response:
    """Say how a client is to behave."""
    await read(request, bodies.ConfigBody)
    return answer(CLIENT_CONFIG)


@router.post("/client/dynamic_config", openapi_extra=says(bodies.ConfigBody))
async def client_dynamic_config(tenant: WithTenant, request: Request) -> Response:
    """Say how a client is to behave, as far as it asks again and again."""
    await read(request, bodies.ConfigBody)
    return answer(DYNAMIC_CONFIG)


@router.get("/healthz")
async def tinker_health(tenant: WithTenant) -> Response:
    """Say that the service answers."""
    return answer({"status": "ok"})


@router.get("/get_server_capabilities")
async def capabilities(tenant: WithTenant, parts: WithParts) -> Response:
    """List the names of the base model."""
    models = [
        {
            "model_name": name,
            "max_context_length": parts.max_context,
            "trainable": True,
            "sampleable": True,
        }
        for name in parts.base.names
    ]
    return answer({"supported_models": models})


@router.post("/telemetry", openapi_extra=ANY_BODY)
async def telemetry(tenant: WithTenant, request: Request) -> Response:
    """Take what a client says of itself, and keep nothing: it may hold keys and stack traces."""
    await read_body(request)
    return answer({"status": "accepted"})


# ---------------------------------------------------------------------------------------------


@router.post("/create_session", openapi_extra=says(bodies.CreateSession))
async def create_session(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Begin a session."""
    body = await read(request, bodies.CreateSession)
    if len(body.tags) > MAX_TAGS:
        raise InvalidRequest(f"tags: {len(body.tags)} of them; expected at most {MAX_TAGS}")
    check_total("tags", body.tags)
    session = Session(
        session_id=f"s-{runtime.unguessable_bytes(8).hex()}",
        tags=tuple(check_text("tags", tag) for tag in body.tags),
        metadata=read_metadata("user_metadata", body.user_metadata),
        project_id=check_text("project_id", body.project_id or ""),
        display_name=check_text("display_name", body.display_name or ""),
        created_s=runtime.wall_time_s(),
    )
    try:
        await parts.store.call(Store.add_session, tenant, session)
    except QuotaExceeded as error:  # final: clients would repeat a 429 for minutes
        raise InvalidRequest(str(error)) from None
    return answer(
        {"type": "create_session", "session_id": session.session_id, "info_message": INFO}
    )


@router.post("/session_heartbeat", openapi_extra=says(bodies.SessionId))
async def session_heartbeat(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Note that a session's client is there."""
    body = await read(request, bodies.SessionId)
    await parts.store.call(Store.touch_session, tenant, body.session_id)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish", openapi_extra=says(bodies.Finish))
async def finish_session(
    tenant: WithTenant, parts: WithParts, request: Request, session_id: SessionName
) -> Response:
    """Note how a session ended; what was said first holds. Its runs and samplers stay for now."""
    body = await read(request, bodies.Finish)
    if body.reason.type not in END_REASONS:
        raise InvalidRequest(f"reason.type: expected {', '.join(END_REASONS)}")
    detail = check_text("detail", body.detail or "")
    reason = f"{body.reason.type}: {detail}" if detail else body.reason.type
    await parts.store.call(Store.finish_session, tenant, session_id, reason)
    await parts.runs.end_session(tenant, session_id)
    return answer({})


@router.get("/sessions")
async def list_sessions(
    tenant: WithTenant,
    parts: WithParts,
    limit: Limit = 20,
    offset: Offset = 0,
    access_scope: AccessScope = None,
) -> Response:
    """List the tenant's sessions, newest first."""
    found = await parts.store.call(Store.sessions, tenant, limit=limit, offset=offset)
    return answer({"sessions": [session.session_id for session in found]})


@router.get("/sessions/{session_id}")
async def get_session(
    tenant: WithTenant, parts: WithParts, session_id: SessionName, access_scope: AccessScope = None
) -> Response:
    """Show a session with what was made in it."""
    return answer(await parts.store.call(_session, tenant, session_id))


def _session(store: Store, tenant: TenantId, session_id: str) -> dict[str, object]:
    session = store.session(tenant, session_id)
    runs, _ = store.runs(tenant, session_id=session_id, limit=MAX_PAGE)
    samplers = store.samplers(tenant, session_id)
    return {
        "training_run_ids": [run.run_id for run in runs],
        "sampler_ids": [sampler.sampler_id for sampler in samplers],
        "user_metadata": dict(session.metadata),
        "display_name": session.display_name or None,
    }
