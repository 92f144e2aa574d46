"""What tenants used, by job and UTC day, and what they store.

- Whoever makes a token true adds it to the usage in the same transaction (`groups.py`, `steps.py`).
- Usage outlives its job: when one is deleted, its rows go over to the tenant (`job = ''`).
- Stored bytes are never walked: groups, forks and events are counted as they are written, versions,
  uploads, runs and checkpoints have their size in their row. A hard link counts as a file.
"""

import hashlib
from datetime import UTC, datetime
from functools import cache

import sqlalchemy as sa
from sqlalchemy import bindparam, func

from marlaas import runtime
from marlaas.store.database import insert_into, prepared
from marlaas.store.events import BYTES_COUNTER, Events
from marlaas.store.schema import USAGE_COLUMNS, checkpoints, counters, jobs, runs, uploads, versions
from marlaas.store.schema import usage as table
from marlaas.types import TenantId, Usage

_COLUMNS = (*USAGE_COLUMNS, "group_bytes")
_SUMS = [func.coalesce(func.sum(table.c[name]), 0).label(name) for name in USAGE_COLUMNS]
_OF_TENANT = table.c.tenant_id == bindparam("tenant")

_DAY_S = 86400


@cache
def _add(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, table)
    added = {name: table.c[name] + insert.excluded[name] for name in _COLUMNS}
    insert = insert.on_conflict_do_update(index_elements=["tenant_id", "job", "day"], set_=added)
    return prepared(dialect, insert, "tenant_id", "job", "day", *_COLUMNS)


@cache
def _hand_over(dialect: str) -> sa.Executable:
    """Add a job's rows to the tenant's own; its groups are gone, so they count no bytes."""
    own = sa.select(
        table.c.tenant_id,
        sa.literal(""),
        table.c.day,
        *(table.c[name] for name in USAGE_COLUMNS),
    ).where(_OF_TENANT, table.c.job == bindparam("of_job"))
    insert = insert_into(dialect, table).from_select(
        ["tenant_id", "job", "day", *USAGE_COLUMNS], own
    )
    added = {name: table.c[name] + insert.excluded[name] for name in USAGE_COLUMNS}
    return insert.on_conflict_do_update(index_elements=["tenant_id", "job", "day"], set_=added)


_ENTRY = "usage of "
"""Begins the names of counters that hold the digest of a job's newest entry."""


@cache
def _set_entry(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, counters)
    insert = insert.on_conflict_do_update(
        index_elements=["tenant_id", "name"],
        set_={"value": insert.excluded.value},
        where=counters.c.value != insert.excluded.value,
    )
    return prepared(dialect, insert, "tenant_id", "name", "value")


_DROP_ENTRY = sa.delete(counters).where(
    counters.c.tenant_id == bindparam("tenant"), counters.c.name == bindparam("of_entry")
)
_HAS_JOB = sa.select(jobs.c.name).where(
    jobs.c.tenant_id == bindparam("tenant"), jobs.c.name == bindparam("of_job")
)
_DROP = sa.delete(table).where(_OF_TENANT, table.c.job == bindparam("of_job"))
_TOTAL = sa.select(*_SUMS).where(_OF_TENANT, table.c.day >= bindparam("since"))
_BY_JOB = sa.select(table.c.job, *_SUMS).where(_OF_TENANT).group_by(table.c.job)
_BY_DAY = (
    sa.select(table.c.day, *_SUMS)
    .where(_OF_TENANT, table.c.day >= bindparam("since"))
    .group_by(table.c.day)
    .order_by(table.c.day)
)
_STORED_BYTES = sa.select(
    sa.select(func.coalesce(func.sum(table.c.group_bytes), 0)).where(_OF_TENANT).scalar_subquery()
    + sa.select(func.coalesce(func.sum(versions.c.state_bytes + versions.c.adapter_bytes), 0))
    .where(
        versions.c.tenant_id == bindparam("tenant"),
        (versions.c.has_state == 1) | (versions.c.has_adapter == 1),
    )
    .scalar_subquery()
    + sa.select(func.coalesce(func.sum(uploads.c.size_bytes), 0))
    .where(uploads.c.tenant_id == bindparam("tenant"))
    .scalar_subquery()
    + sa.select(func.coalesce(func.sum(runs.c.state_bytes + runs.c.journal_bytes), 0))
    .where(runs.c.tenant_id == bindparam("tenant"))
    .scalar_subquery()
    + sa.select(func.coalesce(func.sum(checkpoints.c.size_bytes), 0))
    .where(checkpoints.c.tenant_id == bindparam("tenant"))
    .scalar_subquery()
    + sa.select(func.coalesce(func.sum(counters.c.value), 0))
    .where(counters.c.tenant_id == bindparam("tenant"), counters.c.name == BYTES_COUNTER)
    .scalar_subquery()
)


class UsageRecords(Events):
    """The part of `Store` that counts."""

    def add_usage(self, tenant_id: TenantId, job: str, usage: Usage, *, entry: str = "") -> None:
        """Add to today's usage of a job, or (job `''`, or one that was deleted meanwhile) of the
        tenant outside jobs.

        A call with the `entry` of the job's one before is that call again and counts nothing: a
        connection may be lost behind a commit.
        """
        with self._transaction() as db:
            if entry and not self._note_entry(db, tenant_id, job, entry):
                return
            if job and db.execute(_HAS_JOB, {"tenant": tenant_id, "of_job": job}).first() is None:
                job = ""  # a later job of that name has not used it
            self._count(db, tenant_id, job, usage)

    def usage(self, tenant_id: TenantId, *, since_day: str | None = None) -> Usage:
        """Return what a tenant used, ever or since a day (`2026-12-01`) that is included."""
        return usage_of(self._row(_TOTAL, {"tenant": tenant_id, "since": since_day or ""}))

    def usage_by_job(self, tenant_id: TenantId) -> dict[str, Usage]:
        """Return usage by job; `''` is what happened outside jobs, or in jobs now deleted."""
        rows = self._rows(_BY_JOB, {"tenant": tenant_id})
        return {row.job: usage_of(row) for row in rows}

    def usage_by_day(self, tenant_id: TenantId, *, days: int = 30) -> dict[str, Usage]:
        """Return usage of the last `days` UTC days, today included, where there was any."""
        since = day_of(runtime.wall_time_s() - (days - 1) * _DAY_S)
        rows = self._rows(_BY_DAY, {"tenant": tenant_id, "since": since})
        return {row.day: usage_of(row) for row in rows}

    def count_fork(self, tenant_id: TenantId, job: str, num_bytes: int) -> None:
        """Count what a job began from, and keeps, among what it stores."""
        with self._transaction() as db:
            self._count(db, tenant_id, job, Usage(), group_bytes=num_bytes)

    def stored_bytes(self, tenant_id: TenantId) -> int:
        """Return how many bytes a tenant's groups, versions, forks, uploads, events, runs and
        checkpoints take."""
        return int(self._row(_STORED_BYTES, {"tenant": tenant_id})[0])

    # --------------------------------------------------------------------------------------

    def _note_entry(self, db: sa.Connection, tenant_id: TenantId, job: str, entry: str) -> bool:
        """Remember the newest entry of a job's usage; return whether it is another one."""
        digest = hashlib.sha256(entry.encode()).digest()
        values = {
            "tenant_id": tenant_id,
            "name": f"{_ENTRY}{job}",
            "value": int.from_bytes(digest[:8], "big") >> 1,
        }
        return db.execute(_set_entry(self._dialect), values).rowcount == 1

    def _count(
        self,
        db: sa.Connection,
        tenant_id: TenantId,
        job: str,
        used: Usage,
        *,
        group_bytes: int = 0,
    ) -> None:
        values: dict[str, object] = {name: getattr(used, name) for name in USAGE_COLUMNS}
        day = day_of(runtime.wall_time_s())
        values.update(tenant_id=tenant_id, job=job, day=day, group_bytes=group_bytes)
        db.execute(_add(self._dialect), values)

    def _hand_over_usage(self, db: sa.Connection, tenant_id: TenantId, job: str) -> None:
        """Keep what a job used, under its tenant, before the job goes."""
        values = {"tenant": tenant_id, "of_job": job}
        db.execute(_hand_over(self._dialect), values)
        db.execute(_DROP, values)
        db.execute(_DROP_ENTRY, {"tenant": tenant_id, "of_entry": f"{_ENTRY}{job}"})


def usage_of(row: sa.Row) -> Usage:
    """Return the usage in a row that has its columns. PostgreSQL sums integers as decimals."""
    return Usage(
        sampled_tokens=int(row.sampled_tokens),
        trained_tokens=int(row.trained_tokens),
        evaluated_tokens=int(row.evaluated_tokens),
        served_tokens=int(row.served_tokens),
        prefill_tokens=int(row.prefill_tokens),
        device_s=float(row.device_s),
        sandbox_cpu_s=float(row.sandbox_cpu_s),
    )


def day_of(wall_s: float) -> str:
    """Return the UTC day of a time, as `2026-12-01`."""
    return datetime.fromtimestamp(wall_s, UTC).date().isoformat()
