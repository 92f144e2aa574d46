"""What happened, tenant by tenant: numbered lines that a stream can resume behind.

- `seq` counts 1, 2, 3 per tenant without gaps: the number is drawn and the line written in the
  transaction of whatever happened, so neither can exist without the other.
- A line never changes, except that what it said goes when its job is deleted.
"""

from collections.abc import Mapping
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


@cache
def _next_number(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, counters).on_conflict_do_update(
        index_elements=["tenant_id", "name"], set_={"value": counters.c.value + sa.text("1")}
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
_FORGET = (
    sa.update(events)
    .where(events.c.tenant_id == bindparam("tenant"), events.c.job == bindparam("of_job"))
    .values(job="", kind=EventKind.DELETED.value, data="{}")
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
        self, tenant_id: TenantId, *, after: int = 0, job: str | None = None, limit: int = 1000
    ) -> list[Event]:
        """Return lines behind number `after`, oldest first, of one job or all."""
        values = {"tenant": tenant_id, "after": after, "limit": limit}
        if job is None:
            rows = self._rows(_AFTER, values)
        else:
            rows = self._rows(_AFTER_OF_JOB, {**values, "of_job": job})
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
        self._told.add(tenant_id)
        return seq

    def _forget_events(self, db: sa.Connection, tenant_id: TenantId, job: str) -> None:
        db.execute(_FORGET, {"tenant": tenant_id, "of_job": job})

    def _next_number(self, db: sa.Connection, tenant_id: TenantId, name: str) -> int:
        """Draw the next number of a counter. A transaction that is rolled back gives it back."""
        values = {"tenant_id": tenant_id, "name": name, "value": 1}
        return db.execute(_next_number(self._dialect), values).scalar_one()
