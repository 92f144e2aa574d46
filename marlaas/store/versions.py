"""Versions: which there are, which of their files are kept, which one is promoted.

- The kept set is the loop's. The promoted version stays whatever it says, and so does one that was
  asked to be kept until a time.
- Files are deleted after the commit that forgets them, never before.
"""

from dataclasses import dataclass
from functools import cache

import sqlalchemy as sa
from sqlalchemy import bindparam

from marlaas import runtime
from marlaas.errors import Conflict, NotFound, StoreUnavailable
from marlaas.store.database import insert_into, prepared
from marlaas.store.groups import Groups
from marlaas.store.schema import evaluations, jobs, versions
from marlaas.types import JobState, TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A policy version and which of its files are kept."""

    version: int
    adapter_hash: str
    has_state: bool
    has_adapter: bool
    created_s: float
    """Since the epoch."""
    success: float | None
    """Of its evaluation on held-out prompts; None until there is one."""
    expires_s: float | None
    """Its adapter is kept at least until then, and deleted after if the job has ended; None leaves
    it to the kept set."""


_OF_JOB = (versions.c.tenant_id == bindparam("tenant"), versions.c.job == bindparam("of_job"))
_THIS = (*_OF_JOB, versions.c.version == bindparam("of_version"))


@cache
def _add_first(dialect: str) -> sa.Executable:
    insert = insert_into(dialect, versions).on_conflict_do_nothing()
    return prepared(dialect, insert, "tenant_id", "job", "version", "adapter_hash", "created_s")


_ALL = (
    sa.select(versions, evaluations.c.success)
    .outerjoin(
        evaluations,
        (evaluations.c.tenant_id == versions.c.tenant_id)
        & (evaluations.c.job == versions.c.job)
        & (evaluations.c.version == versions.c.version),
    )
    .where(*_OF_JOB)
    .order_by(versions.c.version)
)
_ONE = sa.select(versions).where(*_THIS)
_KEPT = sa.select(versions.c.version, versions.c.expires_s).where(
    *_OF_JOB, versions.c.has_adapter == 1
)
_KEEP = sa.update(versions).where(*_THIS).values(has_adapter=1, adapter_bytes=bindparam("size"))
_KEEP_UNTIL = sa.update(versions).where(*_THIS).values(expires_s=bindparam("until"))
_FORGET = sa.update(versions).where(*_THIS).values(has_adapter=0, adapter_bytes=0)
_EXPIRED = (
    sa.select(versions.c.tenant_id, versions.c.job, versions.c.version)
    .join(jobs, (jobs.c.tenant_id == versions.c.tenant_id) & (jobs.c.name == versions.c.job))
    .where(
        versions.c.has_adapter == 1,
        versions.c.expires_s <= bindparam("now"),
        jobs.c.state.in_(state.value for state in JobState if state.is_terminal),
        sa.or_(jobs.c.promoted.is_(None), jobs.c.promoted != versions.c.version),
    )
)
_PROMOTED = sa.select(jobs.c.promoted).where(
    jobs.c.tenant_id == bindparam("tenant"), jobs.c.name == bindparam("of_job")
)
_PROMOTE = (
    sa.update(jobs)
    .where(jobs.c.tenant_id == bindparam("tenant"), jobs.c.name == bindparam("of_job"))
    .values(promoted=bindparam("of_version"))
)


class Versions(Groups):
    """The part of `Store` that knows versions and their files."""

    def add_first_version(self, tenant_id: TenantId, job: str, adapter_hash: str) -> None:
        """Record version 0; the same call again, after a resume, changes nothing."""
        values = {
            "tenant_id": tenant_id,
            "job": job,
            "version": 0,
            "adapter_hash": adapter_hash,
            "created_s": runtime.wall_time_s(),
        }
        with self._transaction() as db:
            db.execute(_add_first(self._dialect), values)

    def versions(self, tenant_id: TenantId, job: str) -> list[StoredVersion]:
        """Return every version, oldest first."""
        rows = self._rows(_ALL, {"tenant": tenant_id, "of_job": job})
        return [
            StoredVersion(
                version=row.version,
                adapter_hash=row.adapter_hash,
                has_state=bool(row.has_state),
                has_adapter=bool(row.has_adapter),
                created_s=row.created_s,
                success=row.success,
                expires_s=row.expires_s,
            )
            for row in rows
        ]

    def check_state(self, tenant_id: TenantId, job: str, version: int) -> None:
        """Make sure that a version's training state is on disk as it was committed.

        Raises:
            NotFound: this version has no training state, or there is no such version.
            StoreUnavailable: the file is gone, or has another size than when it was committed.
        """
        row = self._version(tenant_id, job, version)
        if not row.has_state:
            raise NotFound(f"version {version} of job {job!r} has no training state")
        found = self.files.version(tenant_id, job, version).state_bytes()
        # A store from before sizes were recorded says 0: then there has to be something.
        if found == 0 or found != (row.state_bytes or found):
            raise StoreUnavailable(
                f"the training state of version {version} of {tenant_id}/{job} is damaged: "
                f"{found} bytes on disk, {row.state_bytes} committed; restore a backup, or fork "
                "the job from a version whose adapter is kept"
            )

    def keep_adapter(self, tenant_id: TenantId, job: str, version: int) -> None:
        """Record that the version's adapter folder is on disk."""
        size = self.files.version(tenant_id, job, version).adapter_bytes()
        values = {"tenant": tenant_id, "of_job": job, "of_version": version, "size": size}
        with self._transaction() as db:
            db.execute(_KEEP, values)

    def keep_until(
        self, tenant_id: TenantId, job: str, version: int, expires_s: float | None
    ) -> None:
        """Keep a version's adapter until a time since the epoch, whatever the kept set is; None
        leaves it to the kept set again. `drop_expired` deletes it once its time is over.

        Raises:
            NotFound: this tenant has no such version.
            Conflict: its adapter is not on disk any more.
        """
        self._check_kept(tenant_id, job, version)
        values = {"tenant": tenant_id, "of_job": job, "of_version": version, "until": expires_s}
        with self._transaction() as db:
            db.execute(_KEEP_UNTIL, values)

    def _drop_expired_adapters(self) -> int:
        """Delete the adapters whose time is over, of all tenants' jobs that have ended; return how
        many. The promoted version of a job stays."""
        rows = self._rows(_EXPIRED, {"now": runtime.wall_time_s()})
        if not rows:
            return 0
        gone = [(TenantId(row.tenant_id), row.job, row.version) for row in rows]
        with self._transaction() as db:
            db.execute(
                _FORGET,
                [
                    {"tenant": tenant_id, "of_job": job, "of_version": version}
                    for tenant_id, job, version in gone
                ],
            )
        for tenant_id, job, version in gone:
            self.files.delete_adapter(tenant_id, job, version)
        return len(gone)

    def prune_adapters(self, tenant_id: TenantId, job: str, keep: set[int]) -> None:
        """Forget and delete adapter folders, but for `keep`, the promoted version, and those that
        are to be kept until later."""
        values = {"tenant": tenant_id, "of_job": job}
        now_s = runtime.wall_time_s()
        rows = self._rows(_KEPT, values)
        expired = [row.version for row in rows if row.expires_s is None or row.expires_s <= now_s]
        gone = set(expired) - keep
        if not gone:
            return
        gone.discard(self._row(_PROMOTED, values).promoted)
        if not gone:
            return
        with self._transaction() as db:
            db.execute(_FORGET, [{**values, "of_version": version} for version in sorted(gone)])
        for version in gone:
            self.files.delete_adapter(tenant_id, job, version)

    def promote(self, tenant_id: TenantId, job: str, version: int) -> None:
        """Make a version the one that the tenant stands by: it stays, and `promoted` names it.

        Raises:
            NotFound: this tenant has no such version.
            Conflict: its adapter is not on disk any more.
        """
        self._check_kept(tenant_id, job, version)
        with self._transaction() as db:
            db.execute(_PROMOTE, {"tenant": tenant_id, "of_job": job, "of_version": version})

    def promoted(self, tenant_id: TenantId, job: str) -> int | None:
        """Return the promoted version, None if there is none.

        Raises:
            NotFound: this tenant has no such job.
        """
        row = self._row(_PROMOTED, {"tenant": tenant_id, "of_job": job})
        if row is None:
            raise NotFound(f"no job {job!r}")
        return row.promoted

    # --------------------------------------------------------------------------------------

    def _version(self, tenant_id: TenantId, job: str, version: int) -> sa.Row:
        row = self._row(_ONE, {"tenant": tenant_id, "of_job": job, "of_version": version})
        if row is None:
            raise NotFound(f"no version {version} of job {job!r}")
        return row

    def _check_kept(self, tenant_id: TenantId, job: str, version: int) -> None:
        if not self._version(tenant_id, job, version).has_adapter:
            raise Conflict(
                f"version {version} of job {job!r} is not kept: choose one whose adapter is there"
            )
