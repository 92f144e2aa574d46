"""What happened, tenant by tenant: numbered lines that a stream can resume behind.

- `seq` counts 1, 2, 3 per tenant without gaps: the number is drawn and the line written in the
  transaction of whatever happened, so neither can exist without the other.
- A line never changes, except that what it said goes when its job is deleted, or when it is a job's
  log line and `MAX_LOG_EVENTS` newer ones are there.
- The text of all lines is counted, for `stored_bytes`.
"""

from collections.abc import Mapping, Sequence
from functools import cache

import msgspec
import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.store.columns import encode_json
from marlaas.store.database import Database, insert_into, prepared
from marlaas.store.schema import counters, events
from marlaas.types import Event, EventKind, TenantId

OPERATOR_COUNTERS = TenantId("")
"""Owner of the counters that number rows over all tenants."""


MAX_LOG_EVENTS = 1000
"""Log lines kept of one job; each may have as many characters as `service.joblog` lets it."""

BYTES_COUNTER = "event_bytes"
"""Name of the counter of what a tenant's lines say."""


@cache
def _add_to_counter(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, counters)
    insert = insert.on_conflict_do_update(
        index_elements=["tenant_id", "name"],
        set_={"value": counters.c.value + insert.excluded.value},
    )
    return prepared(dialect, insert.returning(counters.c.value), "tenant_id", "name", "value")


_ADD = sa.insert(events)
_LAST = sa.select(sa.func.max(events.c.seq)).where(events.c.tenant_id == bindparam("tenant"))
_AFTER = (
    sa.select(events)
    .where(events.c.tenant_id == bindparam("tenant"), events.c.seq > bindparam("after"))
    .order_by(events.c.seq)
    .limit(bindparam("limit"))
)
_AFTER_OF_JOB = _AFTER.where(events.c.job == bindparam("of_job"))
_OF_JOB = (events.c.tenant_id == bindparam("tenant"), events.c.job == bindparam("of_job"))
_SAID = sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(events.c.data)), 0))
_NOTHING_SAID = {"job": "", "kind": EventKind.DELETED.value, "data": "{}"}
_SAID_BY = _SAID.where(*_OF_JOB)
_FORGET = sa.update(events).where(*_OF_JOB).values(**_NOTHING_SAID)
_OLD_LOGS = (
    *_OF_JOB,
    events.c.kind == EventKind.LOG.value,
    events.c.seq <= bindparam("newest_old"),
)
_SAID_BY_OLD_LOGS = _SAID.where(*_OLD_LOGS)
_FORGET_OLD_LOGS = sa.update(events).where(*_OLD_LOGS).values(**_NOTHING_SAID)
_NEWEST_OLD_LOG = (
    sa.select(events.c.seq)
    .where(*_OF_JOB, events.c.kind == EventKind.LOG.value)
    .order_by(events.c.seq.desc())
    .limit(1)
    .offset(MAX_LOG_EVENTS)
)


class Events(Database):
    """The part of `Store` that keeps the history."""

    def add_event(
        self, tenant_id: TenantId, job: str, kind: EventKind, data: Mapping[str, object]
    ) -> int:
        """Write a line of a tenant's history; return its number."""
        with self._transaction() as db:
            return self._write_event(db, tenant_id, job, kind, data)

    def events(
        self,
        tenant_id: TenantId,
        *,
        after: int = 0,
        job: str | None = None,
        kinds: Sequence[EventKind] = (),
        limit: int = 1000,
    ) -> list[Event]:
        """Return lines behind number `after`, oldest first, of one job or all, and of some kinds
        or all."""
        page, values = _AFTER, {"tenant": tenant_id, "after": after, "limit": limit}
        if job is not None:
            page, values["of_job"] = _AFTER_OF_JOB, job
        if kinds:
            page = page.where(events.c.kind.in_([kind.value for kind in kinds]))
        rows = self._rows(page, values)
        return [
            Event(
                seq=row.seq,
                at_s=row.at_s,
                job=row.job,
                kind=EventKind(row.kind),
                data=msgspec.json.decode(row.data),
            )
            for row in rows
        ]

    def last_event(self, tenant_id: TenantId) -> int:
        """Return the number of a tenant's newest line, 0 if there is none."""
        return self._row(_LAST, {"tenant": tenant_id})[0] or 0

    # --------------------------------------------------------------------------------------

    def _write_event(
        self,
        db: sa.Connection,
        tenant_id: TenantId,
        job: str,
        kind: EventKind,
        data: Mapping[str, object],
    ) -> int:
        """Write a line within a transaction; listeners hear of it after the commit."""
        seq = self._next_number(db, tenant_id, "events")
        line = {
            "tenant_id": tenant_id,
            "seq": seq,
            "at_s": runtime.wall_time_s(),
            "job": job,
            "kind": kind.value,
            "data": encode_json(data),
        }
        db.execute(_ADD, line)
        self._add_to_counter(db, tenant_id, BYTES_COUNTER, len(line["data"]))
        if kind is EventKind.LOG:
            self._forget_old_logs(db, tenant_id, job)
        self._told.add(tenant_id)
        return seq

    def _forget_events(self, db: sa.Connection, tenant_id: TenantId, job: str) -> None:
        values = {"tenant": tenant_id, "of_job": job}
        num_chars = db.execute(_SAID_BY, values).scalar_one()
        db.execute(_FORGET, values)
        self._add_to_counter(db, tenant_id, BYTES_COUNTER, -int(num_chars))

    def _forget_old_logs(self, db: sa.Connection, tenant_id: TenantId, job: str) -> None:
        values = {"tenant": tenant_id, "of_job": job}
        newest_old = db.execute(_NEWEST_OLD_LOG, values).scalar()
        if newest_old is not None:
            values["newest_old"] = newest_old
            num_chars = db.execute(_SAID_BY_OLD_LOGS, values).scalar_one()
            db.execute(_FORGET_OLD_LOGS, values)
            self._add_to_counter(db, tenant_id, BYTES_COUNTER, -int(num_chars))

    def _next_number(self, db: sa.Connection, tenant_id: TenantId, name: str) -> int:
        """Draw the next number of a counter. A transaction that is rolled back gives it back."""
        return self._add_to_counter(db, tenant_id, name, 1)

    def _add_to_counter(self, db: sa.Connection, tenant_id: TenantId, name: str, by: int) -> int:
        """Add to a counter, which begins at 0; return what it is then."""
        values = {"tenant_id": tenant_id, "name": name, "value": by}
        return db.execute(_add_to_counter(self._dialect), values).scalar_one()
