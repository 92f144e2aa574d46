"""Sessions: which clients there are, when they were last heard of, how they ended.

    add_session ─► touch_session* ─► finish_session        the first word about the end holds

- An id that is looked up may be any text that a client sent.
- Session ids are unique over all tenants, and so is what is derived from them.
- What a session made outlives it: runs and samplers go when nobody uses them any more.
- A tenant has at most `MAX_SESSIONS`: rows, unlike files, count against no storage.
"""

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam, func

from marlaas import runtime
from marlaas.errors import Conflict, NotFound, QuotaExceeded
from marlaas.store.columns import clean_text, encode_json
from marlaas.store.files import check_run_id
from marlaas.store.schema import sessions
from marlaas.store.usage import UsageRecords
from marlaas.types import Session, TenantId

MAX_SESSIONS = 20_000
"""Of one tenant."""

_RETRY_S = 3600.0

_THIS = (sessions.c.tenant_id == bindparam("tenant"), sessions.c.session_id == bindparam("session"))

_ADD = sa.insert(sessions)
_COUNT = (
    sa.select(func.count()).select_from(sessions).where(sessions.c.tenant_id == bindparam("tenant"))
)
_ONE = sa.select(sessions).where(*_THIS)
_OF_ANYBODY = sa.select(sessions).where(sessions.c.session_id == bindparam("session"))
_PAGE = (
    sa.select(sessions)
    .where(sessions.c.tenant_id == bindparam("tenant"))
    .order_by(sessions.c.created_s.desc(), sessions.c.session_id)
    .limit(bindparam("limit"))
    .offset(bindparam("offset"))
)
_TOUCH = sa.update(sessions).where(*_THIS).values(seen_s=bindparam("now"))
_FINISH = (
    sa.update(sessions)
    .where(*_THIS, sessions.c.finished_s.is_(None))
    .values(finished_s=bindparam("now"), end_reason=bindparam("why"))
)
_UPDATE = (
    sa.update(sessions)
    .where(*_THIS)
    .values(
        project_id=func.coalesce(bindparam("project", type_=sa.Text), sessions.c.project_id),
        display_name=func.coalesce(bindparam("shown", type_=sa.Text), sessions.c.display_name),
    )
)


class Sessions(UsageRecords):
    """The part of `Store` that knows sessions."""

    def add_session(self, tenant_id: TenantId, session: Session) -> None:
        """Store a session; the very same again changes nothing.

        Raises:
            Conflict: there is another one of that id, this tenant's or not: draw a new id.
            QuotaExceeded: the tenant has too many.
        """
        check_run_id(session.session_id)
        row = {
            "tenant_id": tenant_id,
            "session_id": session.session_id,
            "tags": encode_json(session.tags),
            "metadata": encode_json(session.metadata),
            "project_id": clean_text(session.project_id),
            "display_name": clean_text(session.display_name),
            "created_s": session.created_s or runtime.wall_time_s(),
        }
        row["seen_s"] = row["created_s"]
        with self._transaction() as db:
            before = db.execute(_OF_ANYBODY, {"session": session.session_id}).mappings().first()
            if before is None:
                if db.execute(_COUNT, {"tenant": tenant_id}).scalar_one() >= MAX_SESSIONS:
                    raise QuotaExceeded(
                        f"{MAX_SESSIONS} sessions are kept; those without runs go a week after "
                        "they were heard of last",
                        _RETRY_S,
                    )
                db.execute(_ADD, row)
            elif any(before[name] != row[name] for name in ("tenant_id", "tags", "metadata")):
                raise Conflict(f"session id {session.session_id!r} is taken")

    def session(self, tenant_id: TenantId, session_id: str) -> Session:
        """Return a session.

        Raises:
            NotFound: this tenant has no such session.
        """
        row = self._row(_ONE, {"tenant": tenant_id, "session": clean_text(session_id)})
        if row is None:
            raise _no_session(session_id)
        return _session(row)

    def sessions(self, tenant_id: TenantId, *, limit: int = 100, offset: int = 0) -> list[Session]:
        """Return a tenant's sessions, newest first."""
        values = {"tenant": tenant_id, "limit": limit, "offset": offset}
        return [_session(row) for row in self._rows(_PAGE, values)]

    def touch_session(self, tenant_id: TenantId, session_id: str) -> None:
        """Note that a session's client is there.

        Raises:
            NotFound: this tenant has no such session.
        """
        self._change_session(_TOUCH, tenant_id, session_id, now=runtime.wall_time_s())

    def finish_session(self, tenant_id: TenantId, session_id: str, reason: str) -> None:
        """Note how a session ended; what was said first holds.

        Raises:
            NotFound: this tenant has no such session.
        """
        now_s = runtime.wall_time_s()
        values = {"tenant": tenant_id, "session": clean_text(session_id), "now": now_s}
        with self._transaction() as db:
            if db.execute(_FINISH, {**values, "why": clean_text(reason)}).rowcount == 1:
                return
            if db.execute(_ONE, values).first() is None:
                raise _no_session(session_id)

    def update_session(
        self,
        tenant_id: TenantId,
        session_id: str,
        *,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> None:
        """Change what is given.

        Raises:
            NotFound: this tenant has no such session.
        """
        project = None if project_id is None else clean_text(project_id)
        shown = None if display_name is None else clean_text(display_name)
        self._change_session(_UPDATE, tenant_id, session_id, project=project, shown=shown)

    # --------------------------------------------------------------------------------------

    def _change_session(
        self, statement: sa.Executable, tenant_id: TenantId, session_id: str, **values: object
    ) -> None:
        with self._transaction() as db:
            key = {"tenant": tenant_id, "session": clean_text(session_id)}
            if db.execute(statement, {**key, **values}).rowcount != 1:
                raise _no_session(session_id)


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r}")


def _session(row: sa.Row) -> Session:
    return Session(
        session_id=row.session_id,
        tags=tuple(msgspec.json.decode(row.tags)),
        metadata=msgspec.json.decode(row.metadata),
        project_id=row.project_id,
        display_name=row.display_name,
        created_s=row.created_s,
        seen_s=row.seen_s,
        finished_s=row.finished_s,
        end_reason=row.end_reason,
    )
