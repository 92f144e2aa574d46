"""Jobs: what tenants submitted, in which state it is, and how far it has come.

    add_job ─► queued ─► running ─► done | held | failed | cancelled        moves: `types.JOB_MOVES`
                  └──◄── paused

- Every change of state writes its event in the same transaction.
- A submission may carry an idempotency key: the same again changes nothing, anything else under
  that key is refused.
- Deleting takes rows and files. What the job used stays, counted under its tenant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import sqlalchemy as sa
from sqlalchemy import bindparam, func

from marlaas import runtime
from marlaas.errors import Conflict, NotFound
from marlaas.store import codec
from marlaas.store.columns import clean_text
from marlaas.store.database import insert_into, prepared
from marlaas.store.events import OPERATOR_COUNTERS
from marlaas.store.files import check_segment, is_digest
from marlaas.store.schema import USAGE_COLUMNS, job_uploads, jobs, uploads, usage
from marlaas.store.steps import Steps
from marlaas.store.uploads import Uploads
from marlaas.store.usage import usage_of
from marlaas.types import JOB_MOVES, EventKind, JobSpec, JobState, TenantId, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredJob:
    """A job and how far it has come."""

    spec: JobSpec
    state: JobState
    reason: str
    step: int
    """Steps committed, hence the newest durable version."""
    elapsed_s: float
    """Running time of all runs together."""
    created_s: float
    """Since the epoch."""
    usage: Usage
    """Of all runs together."""
    promoted: int | None
    """The version that the tenant stands by."""

    @property
    def device_s(self) -> float:
        """Device seconds charged so far."""
        return self.usage.device_s


_THIS = (jobs.c.tenant_id == bindparam("tenant"), jobs.c.name == bindparam("of_job"))

_ALL = (
    sa.select(
        jobs, *(func.coalesce(func.sum(usage.c[name]), 0).label(name) for name in USAGE_COLUMNS)
    )
    .outerjoin(usage, (usage.c.tenant_id == jobs.c.tenant_id) & (usage.c.job == jobs.c.name))
    .group_by(jobs.c.tenant_id, jobs.c.name)
    .order_by(jobs.c.position)
)
_OF_TENANT = _ALL.where(jobs.c.tenant_id == bindparam("tenant"))
_ONE = _ALL.where(*_THIS)
_STATE = sa.select(jobs.c.state, jobs.c.reason).where(*_THIS)
_POSITION = sa.select(jobs.c.position).where(*_THIS)
_COUNTS = (
    sa.select(jobs.c.state, func.count())
    .where(jobs.c.tenant_id == bindparam("tenant"))
    .group_by(jobs.c.state)
)
_SAME = (
    sa.select(jobs.c.name, jobs.c.spec, jobs.c.idempotency_key)
    .where(
        jobs.c.tenant_id == bindparam("tenant"),
        (jobs.c.name == bindparam("of_job")) | (jobs.c.idempotency_key == bindparam("key")),
    )
)  # fmt: skip
_OF_KEY = sa.select(jobs.c.spec).where(
    jobs.c.tenant_id == bindparam("tenant"),
    jobs.c.idempotency_key == bindparam("key"),
    jobs.c.body_digest == bindparam("digest"),
)
_SET_STATE = (
    sa.update(jobs)
    .where(*_THIS, jobs.c.state == bindparam("before"))
    .values(state=bindparam("now"), reason=bindparam("why"))
)
_DELETE = sa.delete(jobs).where(*_THIS, jobs.c.state == bindparam("before"))
_NAME_UPLOAD = sa.insert(job_uploads)
_UPLOADS_OF = sa.select(job_uploads.c.digest).where(
    job_uploads.c.tenant_id == bindparam("tenant"), job_uploads.c.job == bindparam("of_job")
)
_HAS_UPLOAD = sa.select(uploads.c.digest).where(
    uploads.c.tenant_id == bindparam("tenant"), uploads.c.digest == bindparam("digest")
)
_NOT_BEGUN = sa.select(jobs.c.name, jobs.c.spec).where(
    jobs.c.tenant_id == bindparam("tenant"), jobs.c.step == 0, jobs.c.state.not_in(
        [JobState.DONE.value, JobState.CANCELLED.value]
    )
)  # fmt: skip


@cache
def _add(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, jobs).on_conflict_do_nothing()
    columns = (
        "tenant_id", "name", "created_s", "position", "idempotency_key", "spec", "body_digest"
    )  # fmt: skip
    return prepared(dialect, insert, *columns)


class Jobs(Steps, Uploads):
    """The part of `Store` that knows jobs."""

    def add_job(
        self,
        tenant_id: TenantId,
        spec: JobSpec,
        *,
        idempotency_key: str = "",
        body_digest: str = "",
    ) -> bool:
        """Accept a job; False if the very same job is there already.

        `body_digest` is of the request, for `spec_of_key`.

        Raises:
            Conflict: this tenant has another job of that name, or submitted another one under
                that idempotency key.
            NotFound: the job names an upload that this tenant does not have.
        """
        assert spec.tenant == tenant_id
        check_segment("tenant", tenant_id)
        check_segment("job", spec.name)
        key = clean_text(idempotency_key) or None
        blob = codec.encode(spec)
        if self._is_there(tenant_id, spec, blob, key):
            return False
        row = {
            "tenant_id": tenant_id,
            "name": spec.name,
            "created_s": runtime.wall_time_s(),
            "idempotency_key": key,
            "spec": blob,
            "body_digest": body_digest or None,
        }
        with self._transaction() as db:
            row["position"] = self._next_number(db, OPERATOR_COUNTERS, "jobs")
            is_new = db.execute(_add(self._dialect), row).rowcount == 1
            if is_new:
                self._name_uploads(db, tenant_id, spec)
                data = {"state": JobState.QUEUED.value, "reason": ""}
                self._write_event(db, tenant_id, spec.name, EventKind.STATE, data)
        if is_new:
            self.files.delete_job(tenant_id, spec.name)  # what a kill left of one deleted before
            return True
        assert self._is_there(tenant_id, spec, blob, key)  # another process was faster
        return False

    def job(self, tenant_id: TenantId, name: str) -> StoredJob:
        """Return a job.

        Raises:
            NotFound: this tenant has no such job.
        """
        row = self._row(_ONE, {"tenant": tenant_id, "of_job": name})
        if row is None:
            raise _no_job(name)
        return _stored_job(row)

    def spec_of_key(self, tenant_id: TenantId, key: str, body_digest: str) -> JobSpec | None:
        """Return the job that a request of that body was accepted as under an idempotency key;
        None if there is none. What the body names may stand for something else by now."""
        values = {"tenant": tenant_id, "key": clean_text(key), "digest": body_digest}
        row = self._row(_OF_KEY, values)
        return None if row is None else codec.decode(row.spec, JobSpec)

    def jobs(
        self,
        tenant_id: TenantId,
        *,
        state: JobState | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> list[StoredJob]:
        """Return a tenant's jobs in the order they were accepted: of one state or all, behind the
        job named `after`, at most `limit`.

        Raises:
            NotFound: this tenant has no job named `after`.
        """
        page, values = _OF_TENANT, {"tenant": tenant_id}
        if state is not None:
            page = page.where(jobs.c.state == JobState(state).value)
        if after:
            behind = self._row(_POSITION, {"tenant": tenant_id, "of_job": after})
            if behind is None:
                raise _no_job(after)
            page = page.where(jobs.c.position > behind.position)
        return [_stored_job(row) for row in self._rows(page.limit(limit), values)]

    def all_jobs(self) -> list[StoredJob]:
        """Return the jobs of every tenant in the order they were accepted."""
        return [_stored_job(row) for row in self._rows(_ALL, {})]

    def job_counts(self, tenant_id: TenantId) -> Mapping[JobState, int]:
        """Return how many jobs a tenant has in each state; every state is there."""
        counts = {row[0]: row[1] for row in self._rows(_COUNTS, {"tenant": tenant_id})}
        return {state: counts.get(state.value, 0) for state in JobState}

    def set_job_state(
        self, tenant_id: TenantId, name: str, state: JobState, reason: str = ""
    ) -> None:
        """Move a job to another state, or give its state another reason.

        Raises:
            NotFound: this tenant has no such job.
            Conflict: no such move is possible from the state it is in.
        """
        state, reason = JobState(state), clean_text(reason)
        key = {"tenant": tenant_id, "of_job": name}
        row = self._row(_STATE, key)
        if row is None:
            raise _no_job(name)
        before = JobState(row.state)
        if (before, row.reason) == (state, reason):
            return
        if before is not state and state not in JOB_MOVES[before]:
            raise Conflict(f"job {name!r} is {before.value}: it cannot become {state.value}")
        move = {**key, "before": before.value, "now": state.value, "why": reason}
        with self._transaction() as db:
            if db.execute(_SET_STATE, move).rowcount != 1:
                raise Conflict(f"job {name!r} is not {before.value} any more: ask again")
            data = {"state": state.value, "reason": reason}
            self._write_event(db, tenant_id, name, EventKind.STATE, data)

    def delete_job(self, tenant_id: TenantId, name: str) -> None:
        """Delete a job's rows and files; what it used stays, counted under its tenant.

        Raises:
            NotFound: this tenant has no such job.
            Conflict: it is queued or running, or another job is about to begin from it.
        """
        stored = self.job(tenant_id, name)
        if stored.state.is_active:
            raise Conflict(f"job {name!r} is {stored.state.value}: pause or cancel it first")
        for row in self._rows(_NOT_BEGUN, {"tenant": tenant_id}):
            fork = codec.decode(row.spec, JobSpec).fork
            if fork is not None and fork.job == name:
                raise Conflict(f"job {row.name!r} is about to begin from {name!r}: delete it first")
        key = {"tenant": tenant_id, "of_job": name}
        with self._transaction() as db:
            digests = db.execute(_UPLOADS_OF, key).scalars().all()
            if db.execute(_DELETE, {**key, "before": stored.state.value}).rowcount != 1:
                raise Conflict(f"job {name!r} is not {stored.state.value} any more: ask again")
            self._hand_over_usage(db, tenant_id, name)
            self._forget_events(db, tenant_id, name)
            self._write_event(db, tenant_id, "", EventKind.DELETED, {"job": name})
            unused = self._drop_unused_uploads(db, tenant_id, digests)
        self.files.delete_job(tenant_id, name)
        for digest in unused:
            self.files.delete_upload(tenant_id, digest)

    # --------------------------------------------------------------------------------------

    def _is_there(self, tenant_id: TenantId, spec: JobSpec, blob: bytes, key: str | None) -> bool:
        """Return whether the very same job was accepted before."""
        rows = self._rows(_SAME, {"tenant": tenant_id, "of_job": spec.name, "key": key})
        if any(row.idempotency_key == key and bytes(row.spec) != blob for row in rows if key):
            raise Conflict(
                f"idempotency key {key!r} was used for another job: use a new one for each job"
            )
        if any(row.name == spec.name and bytes(row.spec) != blob for row in rows):
            raise Conflict(
                f"job {spec.name!r} exists with other settings: choose another name, or submit "
                "it as it was"
            )
        return bool(rows)

    def _name_uploads(self, db: sa.Connection, tenant_id: TenantId, spec: JobSpec) -> None:
        """Hold on to the uploads that a job names by digest, as long as the job is there."""
        for digest in sorted({str(value) for value in spec.env.values() if is_digest(value)}):
            if db.execute(_HAS_UPLOAD, {"tenant": tenant_id, "digest": digest}).first() is None:
                raise NotFound(f"no upload {digest}: upload it first")
            db.execute(_NAME_UPLOAD, {"tenant_id": tenant_id, "job": spec.name, "digest": digest})


def _no_job(name: str) -> NotFound:
    return NotFound(f"no job {name!r}")


def _stored_job(row: sa.Row) -> StoredJob:
    return StoredJob(
        spec=codec.decode(row.spec, JobSpec),
        state=JobState(row.state),
        reason=row.reason,
        step=row.step,
        elapsed_s=row.elapsed_s,
        created_s=row.created_s,
        usage=usage_of(row),
        promoted=row.promoted,
    )
