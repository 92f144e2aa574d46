"""The durable record of every job, in one SQLite file. The loop calls it from the event loop.

    add_job ─► open_group ─► finish_group ─► commit_step ─► (publish) ─► keep_adapter
                                                  └──► add_evaluation

- Finished groups are stored before they are trained on; a step's record, the fate of its groups,
  its version and the cursor are one transaction, committed before the version is published.
- Calls are synchronous: a commit takes 0.05 to 0.3 ms, less than handing it to a thread would, and
  nothing can slip in between deciding and recording.
- `durability="process"` survives a kill of the process, `"power"` also a loss of power.
- Every function on tenant rows takes `tenant_id` first; the exceptions stand in `CROSS_TENANT`.
- A row that does not exist and a row of another tenant look alike.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.resources import files as package_files
from pathlib import Path

from marlaas import runtime
from marlaas.errors import Conflict, NotFound
from marlaas.store import codec
from marlaas.store.files import Files, check_segment
from marlaas.types import EvalRecord, Group, JobSpec, JobState, StepRecord, TenantId

CROSS_TENANT = ("all_jobs", "close")
"""Public functions that are the operator's, not a tenant's."""

_SYNCHRONOUS = {"process": "NORMAL", "power": "FULL"}


class GroupState(StrEnum):
    """`open -> finished -> trained | dropped`."""

    OPEN = "open"
    FINISHED = "finished"
    TRAINED = "trained"
    DROPPED = "dropped"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group and its fate."""

    index: int
    state: GroupState
    reason: str
    version: int
    step: int | None
    """The step that consumed it."""
    group: Group | None
    """None while open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A policy version and which of its files are kept."""

    version: int
    adapter_hash: str
    has_state: bool
    has_adapter: bool


class Store:
    """One open database with the files beside it.

    Lifecycle: constructed (schema applied) -> used by one thread -> closed. A second process must
    not write at the same time; readers may come and go.

        store = Store(Path("runs/7"))
        store.add_job("acme", spec)
        store.open_group("acme", "sums", 0, version=0)
        store.finish_group("acme", "sums", group)
        store.commit_step("acme", "sums", record, dropped={3: "zero_variance"})
        store.job("acme", "sums").step                      # 1
    """

    def __init__(self, root: Path, *, durability: str = "process") -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.files = Files(root)
        self._db = sqlite3.connect(root / "store.db", isolation_level=None, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
        self._db.execute("PRAGMA foreign_keys = ON")
        self._db.executescript(package_files("marlaas.store").joinpath("schema.sql").read_text())

    def close(self) -> None:
        self._db.close()

    # Jobs ---------------------------------------------------------------------------------

    def add_job(self, tenant_id: TenantId, spec: JobSpec) -> bool:
        """Accept a job; False if the very same job is there already.

        Raises:
            Conflict: this tenant has another job of that name.
        """
        assert spec.tenant == tenant_id
        check_segment("tenant", tenant_id)
        check_segment("job", spec.name)
        blob = codec.encode(spec)
        row = self._row(
            "SELECT spec FROM jobs WHERE tenant_id = ? AND name = ?", tenant_id, spec.name
        )
        if row is not None:
            if bytes(row["spec"]) == blob:
                return False
            raise Conflict(
                f"job {spec.name!r} exists with other settings: choose another name, or submit "
                "it as it was"
            )
        with self._transaction() as db:
            db.execute(
                "INSERT INTO jobs (tenant_id, name, created_s, spec) VALUES (?, ?, ?, ?)",
                (tenant_id, spec.name, runtime.wall_time_s(), blob),
            )
        return True

    def job(self, tenant_id: TenantId, name: str) -> StoredJob:
        """Return a job.

        Raises:
            NotFound: this tenant has no such job.
        """
        row = self._row("SELECT * FROM jobs WHERE tenant_id = ? AND name = ?", tenant_id, name)
        if row is None:
            raise NotFound(f"no job {name!r}")
        return _stored_job(row)

    def jobs(self, tenant_id: TenantId) -> list[StoredJob]:
        """Return a tenant's jobs in the order they were accepted."""
        rows = self._rows("SELECT * FROM jobs WHERE tenant_id = ? ORDER BY rowid", tenant_id)
        return [_stored_job(row) for row in rows]

    def all_jobs(self) -> list[StoredJob]:
        """Return the jobs of every tenant in the order they were accepted."""
        return [_stored_job(row) for row in self._rows("SELECT * FROM jobs ORDER BY rowid")]

    def set_job_state(
        self, tenant_id: TenantId, name: str, state: JobState, reason: str = ""
    ) -> None:
        with self._transaction() as db:
            db.execute(
                "UPDATE jobs SET state = ?, reason = ? WHERE tenant_id = ? AND name = ?",
                (state, reason, tenant_id, name),
            )

    # Groups -------------------------------------------------------------------------------

    def open_group(self, tenant_id: TenantId, job: str, index: int, *, version: int) -> None:
        """Record that a group is being sampled; again if its first sampling was lost."""
        with self._transaction() as db:
            db.execute(
                """
                INSERT INTO groups (tenant_id, job, idx, state, version)
                VALUES (?, ?, ?, 'open', ?)
                ON CONFLICT DO UPDATE SET version = excluded.version WHERE state = 'open'
                """,
                (tenant_id, job, index, version),
            )

    def finish_group(self, tenant_id: TenantId, job: str, group: Group) -> None:
        """Store what was sampled, before anything is trained on it."""
        with self._transaction() as db:
            changed = db.execute(
                """
                UPDATE groups SET state = 'finished', record = ?
                WHERE tenant_id = ? AND job = ? AND idx = ? AND state = 'open'
                """,
                (codec.encode(group), tenant_id, job, group.index),
            ).rowcount
            assert changed == 1, f"group {group.index} of {tenant_id}/{job} was not open"

    def groups(
        self, tenant_id: TenantId, job: str, state: GroupState | None = None
    ) -> list[StoredGroup]:
        """Return a job's groups by index, of one state or all."""
        rows = self._rows(
            """
            SELECT * FROM groups
            WHERE tenant_id = ? AND job = ? AND (state = ? OR ? IS NULL) ORDER BY idx
            """,
            tenant_id, job, state, state,
        )  # fmt: skip
        return [_stored_group(row) for row in rows]

    def consumed_groups(self, tenant_id: TenantId, job: str) -> list[int]:
        """Return the indices of the groups that steps have taken, without their records."""
        rows = self._rows(
            "SELECT idx FROM groups WHERE tenant_id = ? AND job = ? AND step IS NOT NULL",
            tenant_id, job,
        )  # fmt: skip
        return [row["idx"] for row in rows]

    # Steps --------------------------------------------------------------------------------

    def commit_step(
        self, tenant_id: TenantId, job: str, record: StepRecord, *, dropped: Mapping[int, str]
    ) -> None:
        """Make a step true: its record, the fate of its groups, its version and the cursor.

        `dropped` says why a consumed group was not trained on. The step's state snapshot must be on
        disk; the one before it is deleted.
        """
        key = (tenant_id, job)
        fates = [
            ("dropped" if index in dropped else "trained", dropped.get(index, ""), record.step,
             *key, index)
            for index in record.group_indices
        ]  # fmt: skip
        with self._transaction() as db:
            moved = db.execute(
                "UPDATE jobs SET step = ?, elapsed_s = ? "
                "WHERE tenant_id = ? AND name = ? AND step = ? - 1",
                (record.step, record.elapsed_s, *key, record.step),
            ).rowcount
            assert moved == 1, f"step {record.step} of {tenant_id}/{job} is not the next one"
            consumed = db.executemany(
                "UPDATE groups SET state = ?, reason = ?, step = ? WHERE tenant_id = ? "
                "AND job = ? AND idx = ? AND state = 'finished'",
                fates,
            ).rowcount
            assert consumed == len(fates), f"step {record.step} took a group twice"
            db.execute(
                "INSERT INTO steps (tenant_id, job, step, record) VALUES (?, ?, ?, ?)",
                (*key, record.step, codec.encode(record)),
            )
            db.execute("UPDATE versions SET has_state = 0 WHERE tenant_id = ? AND job = ?", key)
            db.execute(
                "INSERT INTO versions (tenant_id, job, version, adapter_hash, has_state) "
                "VALUES (?, ?, ?, ?, 1)",
                (*key, record.step, record.adapter_hash),
            )
        self.files.version(tenant_id, job, record.step - 1).delete_state()

    def steps(self, tenant_id: TenantId, job: str) -> list[StepRecord]:
        """Return the learning curve."""
        rows = self._rows(
            "SELECT record FROM steps WHERE tenant_id = ? AND job = ? ORDER BY step",
            tenant_id, job,
        )  # fmt: skip
        return [codec.decode(row["record"], StepRecord) for row in rows]

    # Evaluations --------------------------------------------------------------------------

    def add_evaluation(self, tenant_id: TenantId, job: str, record: EvalRecord) -> None:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO evaluations (tenant_id, job, version, success, record) "
                "VALUES (?, ?, ?, ?, ?)",
                (tenant_id, job, record.version, record.success, codec.encode(record)),
            )

    def evaluations(self, tenant_id: TenantId, job: str) -> list[EvalRecord]:
        """Return a job's evaluations by version."""
        rows = self._rows(
            "SELECT record FROM evaluations WHERE tenant_id = ? AND job = ? ORDER BY version",
            tenant_id, job,
        )  # fmt: skip
        return [codec.decode(row["record"], EvalRecord) for row in rows]

    # Versions -----------------------------------------------------------------------------

    def add_first_version(self, tenant_id: TenantId, job: str, adapter_hash: str) -> None:
        """Record version 0; the same call again, after a resume, changes nothing."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO versions (tenant_id, job, version, adapter_hash) "
                "VALUES (?, ?, 0, ?) ON CONFLICT DO NOTHING",
                (tenant_id, job, adapter_hash),
            )

    def versions(self, tenant_id: TenantId, job: str) -> list[StoredVersion]:
        """Return every version, oldest first."""
        rows = self._rows(
            "SELECT * FROM versions WHERE tenant_id = ? AND job = ? ORDER BY version",
            tenant_id, job,
        )  # fmt: skip
        return [
            StoredVersion(
                version=row["version"],
                adapter_hash=row["adapter_hash"],
                has_state=bool(row["has_state"]),
                has_adapter=bool(row["has_adapter"]),
            )
            for row in rows
        ]

    def keep_adapter(self, tenant_id: TenantId, job: str, version: int) -> None:
        """Record that the version's adapter folder is on disk."""
        with self._transaction() as db:
            db.execute(
                "UPDATE versions SET has_adapter = 1 "
                "WHERE tenant_id = ? AND job = ? AND version = ?",
                (tenant_id, job, version),
            )

    def prune_adapters(self, tenant_id: TenantId, job: str, keep: set[int]) -> None:
        """Forget and delete the adapter folders of all versions that are not in `keep`."""
        kept = [row.version for row in self.versions(tenant_id, job) if row.has_adapter]
        gone = [version for version in kept if version not in keep]
        if not gone:
            return
        with self._transaction() as db:
            db.executemany(
                "UPDATE versions SET has_adapter = 0 "
                "WHERE tenant_id = ? AND job = ? AND version = ?",
                [(tenant_id, job, version) for version in gone],
            )
        for version in gone:
            self.files.version(tenant_id, job, version).delete_adapter()

    # --------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything written inside becomes durable together, or not at all."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def _row(self, sql: str, *values: object) -> sqlite3.Row | None:
        return self._db.execute(sql, values).fetchone()


def _stored_job(row: sqlite3.Row) -> StoredJob:
    return StoredJob(
        spec=codec.decode(row["spec"], JobSpec),
        state=JobState(row["state"]),
        reason=row["reason"],
        step=row["step"],
        elapsed_s=row["elapsed_s"],
    )


def _stored_group(row: sqlite3.Row) -> StoredGroup:
    record = row["record"]
    return StoredGroup(
        index=row["idx"],
        state=GroupState(row["state"]),
        reason=row["reason"],
        version=row["version"],
        step=row["step"],
        group=None if record is None else codec.decode(record, Group),
    )
