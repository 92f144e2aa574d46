"""Sessions of a tenant, looked for by what is known of them, newest first."""

from collections.abc import Iterator
from datetime import datetime

from fastapi import APIRouter, Request, Response

from marlaas import runtime
from marlaas.errors import InvalidRequest, UnsupportedFeature
from marlaas.service.parts import WithParts
from marlaas.service.tinker import bodies
from marlaas.service.tinker.bodies import number
from marlaas.service.tinker.door import PREFIX, WithTenant, answer, read, says
from marlaas.service.tinker.records import iso_time
from marlaas.store.db import Store
from marlaas.types import Session, TenantId

router = APIRouter(prefix=PREFIX, tags=["tinker: sessions"])

MAX_FOUND = 200
PAGE = 500
MAX_LOOKED_AT = 20_000
"""Sessions that one search goes through."""

ACTIVE_S = 120.0
"""A session that was heard of within this time is active: clients say every 10 s that they are
there."""


@router.post("/sessions/search", openapi_extra=says(bodies.SearchSessions))
async def search_sessions(tenant: WithTenant, parts: WithParts, request: Request) -> Response:
    """Look for sessions by id or name, project, metadata and status."""
    body = await read(request, bodies.SearchSessions)
    number("limit", body.limit, 1, MAX_FOUND)
    if body.owner.type not in ("own", "accessible"):
        raise UnsupportedFeature("owner: a tenant sees its own sessions; expected own")
    behind = None if body.cursor is None else _behind(body.cursor)
    return answer(await parts.store.call(_search, tenant, body, behind))


def _behind(cursor: bodies.SearchCursor) -> tuple[float, str]:
    try:
        at = datetime.fromisoformat(cursor.last_created_at)
        return at.timestamp(), cursor.last_session_id
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest("cursor: expected next_cursor of the page before") from None


def _search(
    store: Store, tenant: TenantId, body: bodies.SearchSessions, behind: tuple[float, str] | None
) -> dict[str, object]:
    found: list[Session] = []
    is_more = False
    for session in _newest_first(store, tenant):
        # Newest first, and by id where two began at once; a cursor has microseconds.
        age = -round(session.created_s, 6), session.session_id
        if behind is not None and age <= (-round(behind[0], 6), behind[1]):
            continue
        if not _is_meant(session, body):
            continue
        if len(found) == body.limit:
            is_more = True
            break
        found.append(session)
    answer: dict[str, object] = {"sessions": [_summary(store, tenant, one) for one in found]}
    if is_more:
        last = found[-1]
        answer["next_cursor"] = {
            "last_created_at": iso_time(last.created_s),
            "last_session_id": last.session_id,
        }
    return answer


def _newest_first(store: Store, tenant: TenantId) -> Iterator[Session]:
    for offset in range(0, MAX_LOOKED_AT, PAGE):
        page = store.sessions(tenant, limit=PAGE, offset=offset)
        yield from page
        if len(page) < PAGE:
            return


def _is_meant(session: Session, body: bodies.SearchSessions) -> bool:
    named = []
    if body.session_id is not None:
        named.append(session.session_id == body.session_id)
    if body.display_name is not None:
        shown = session.display_name.lower()
        named.append(all(word in shown for word in body.display_name.lower().split()))
    if named and not any(named):
        return False
    if body.project_ids is not None and session.project_id not in body.project_ids:
        return False
    if any(session.metadata.get(key) != value for key, value in body.user_metadata.items()):
        return False
    return body.statuses is None or any(_has(session, status) for status in body.statuses)


def _has(session: Session, status: bodies.StatusQuery) -> bool:
    mine = _status(session)
    if mine is None or mine["type"] != status.type:
        return False
    return status.reasons is None or _reason(session) in status.reasons


def _status(session: Session) -> dict[str, object] | None:
    if session.finished_s is not None:
        _, _, detail = session.end_reason.partition(": ")
        return {
            "type": "client_finished",
            "reason": {"type": _reason(session)},
            "detail": detail or None,
        }
    is_active = runtime.wall_time_s() - session.seen_s < ACTIVE_S
    return {"type": "active"} if is_active else None


def _reason(session: Session) -> str:
    return session.end_reason.partition(": ")[0]


def _summary(store: Store, tenant: TenantId, session: Session) -> dict[str, object]:
    runs, _ = store.runs(tenant, session_id=session.session_id, limit=1000)
    saved = [store.checkpoints(tenant, run.run_id, limit=1000) for run in runs]
    return {
        "session_id": session.session_id,
        "created_at": iso_time(session.created_s),
        "owner": tenant,
        "project_id": session.project_id,
        "status": _status(session),
        "checkpoints_count": sum(total for _, total in saved),
        "display_name": session.display_name or None,
        "user_metadata": dict(session.metadata),
        "checkpoint_storage_bytes": sum(one.size_bytes for page, _ in saved for one in page),
    }
