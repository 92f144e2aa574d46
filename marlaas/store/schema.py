"""The tables, as SQLAlchemy knows them. `migrations/` makes them; a test compares both.

    jobs ─┬─ groups ── group_records
          │                counters (event numbers)    tenants ── api_keys
          ├─ steps         events                      uploads ── upload_names
          ├─ evaluations   usage                       audit (the operator's)
          ├─ versions
          └─ job_uploads

    sessions ─┬─ runs ─┬─ operations ─┬─ operation_payloads
              │        │              └─ operation_results
              │        └─ checkpoints
              └─ samplers

- Owner first in every primary key: a row of another tenant cannot be named.
- Blobs are `store.codec` encodings of the records in `types.py`; the columns beside them are what
  is searched or counted.
- States are checked by the schema, so that no code path can write another one.
"""

from sqlalchemy import (
    REAL,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
    text,
)
from sqlalchemy.schema import SchemaItem

METADATA = MetaData()

WHOLE = BigInteger().with_variant(Integer(), "sqlite")
"""A 64-bit integer on both databases."""
REAL_64 = Double().with_variant(REAL(), "sqlite")
"""A double on both databases; SQLite calls it REAL."""


def _table(name: str, *items: SchemaItem, has_long_rows: bool = False) -> Table:
    """Return a table that SQLite keeps strict, as PostgreSQL is, and in one tree with its key
    unless its rows are long."""
    return Table(name, METADATA, *items, sqlite_strict=True, sqlite_with_rowid=has_long_rows)


def _text(name: str, default: str | None = None) -> Column:
    return Column(name, Text, nullable=False, server_default=default)


def _whole(name: str, default: str | None = None) -> Column:
    return Column(name, WHOLE, nullable=False, server_default=_literal(default))


def _real(name: str, default: str | None = None) -> Column:
    return Column(name, REAL_64, nullable=False, server_default=_literal(default))


def _literal(default: str | None):
    return None if default is None else text(default)


def _of_job() -> tuple[Column, Column, ForeignKeyConstraint]:
    """Return the columns of a row that lives and dies with its job."""
    return (
        _text("tenant_id"),
        _text("job"),
        ForeignKeyConstraint(
            ["tenant_id", "job"], ["jobs.tenant_id", "jobs.name"], ondelete="CASCADE"
        ),
    )


jobs = _table(
    "jobs",
    _text("tenant_id"),
    _text("name"),
    _text("state", "queued"),
    _text("reason", ""),
    _whole("step", "0"),  # the cursor: steps committed
    _real("elapsed_s", "0"),  # of all runs together
    _real("created_s"),  # since the epoch, for people
    _whole("position"),  # place in the order of acceptance, over all tenants
    Column("promoted", WHOLE),  # the version that the tenant promoted
    Column("idempotency_key", Text),
    Column("spec", LargeBinary, nullable=False),
    Column("body_digest", Text),  # of the request that it came with
    PrimaryKeyConstraint("tenant_id", "name"),
    UniqueConstraint("position", name="jobs_position"),
    UniqueConstraint("tenant_id", "idempotency_key", name="jobs_idempotency_key"),
    CheckConstraint(
        "state IN ('queued', 'running', 'paused', 'done', 'held', 'failed', 'cancelled')",
        name="jobs_state",
    ),
    CheckConstraint("step >= 0", name="jobs_step"),
    has_long_rows=True,
)

# open -> finished -> trained | dropped. A group that is open when the process dies is opened again.
groups = _table(
    "groups",
    *_of_job(),
    _whole("idx"),
    _text("state"),
    _text("reason", ""),
    _whole("version"),  # policy version it started with
    Column("step", WHOLE),  # the step that consumed it
    _whole("num_trajectories", "0"),
    _whole("num_tokens", "0"),
    Column("reward_mean", REAL_64),  # over trajectories with a verdict; none: null
    Column("success_mean", REAL_64),
    _whole("record_bytes", "0"),
    PrimaryKeyConstraint("tenant_id", "job", "idx"),
    CheckConstraint("state IN ('open', 'finished', 'trained', 'dropped')", name="groups_state"),
    CheckConstraint("(state = 'open') = (record_bytes = 0)", name="groups_record"),
    CheckConstraint("(state IN ('trained', 'dropped')) = (step IS NOT NULL)", name="groups_step"),
    CheckConstraint("(state = 'dropped') = (reason <> '')", name="groups_reason"),
)

# Apart from their groups: when a step changes a group's fate, trajectories are not written again.
group_records = _table(
    "group_records",
    _text("tenant_id"),
    _text("job"),
    _whole("idx"),
    Column("record", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "job", "idx"),
    ForeignKeyConstraint(
        ["tenant_id", "job", "idx"],
        ["groups.tenant_id", "groups.job", "groups.idx"],
        ondelete="CASCADE",
    ),
    has_long_rows=True,
)

steps = _table(
    "steps",
    *_of_job(),
    _whole("step"),
    Column("record", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "job", "step"),
    has_long_rows=True,
)

evaluations = _table(
    "evaluations",
    *_of_job(),
    _whole("version"),
    Column("success", REAL_64),  # no prompt got a verdict: null
    Column("record", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "job", "version"),
)

# A version exists once its row does; its files lie in `Files.version(tenant, job, version)`.
versions = _table(
    "versions",
    *_of_job(),
    _whole("version"),
    _text("adapter_hash"),
    _real("created_s"),
    _whole("has_state", "0"),  # the state snapshot is on disk
    _whole("has_adapter", "0"),  # the PEFT folder is on disk
    _whole("state_bytes", "0"),
    _whole("adapter_bytes", "0"),
    Column("expires_s", REAL_64),  # kept at least until then
    PrimaryKeyConstraint("tenant_id", "job", "version"),
    CheckConstraint("has_state IN (0, 1) AND has_adapter IN (0, 1)", name="versions_has"),
)
Index(
    "versions_on_disk",
    versions.c.tenant_id,
    versions.c.job,
    sqlite_where=(versions.c.has_state == 1) | (versions.c.has_adapter == 1),
    postgresql_where=(versions.c.has_state == 1) | (versions.c.has_adapter == 1),
)

job_uploads = _table(
    "job_uploads",
    *_of_job(),
    _text("digest"),
    PrimaryKeyConstraint("tenant_id", "job", "digest"),
)
Index("job_uploads_digest", job_uploads.c.tenant_id, job_uploads.c.digest)

# ---------------------------------------------------------------------------------------------


def _of_session() -> tuple[Column, Column, ForeignKeyConstraint]:
    """Return the columns of a row that lives and dies with its session."""
    return (
        _text("tenant_id"),
        _text("session_id"),
        ForeignKeyConstraint(
            ["tenant_id", "session_id"],
            ["sessions.tenant_id", "sessions.session_id"],
            ondelete="CASCADE",
        ),
    )


def _of_run() -> tuple[Column, Column, ForeignKeyConstraint]:
    """Return the columns of a row that lives and dies with its run."""
    return (
        _text("tenant_id"),
        _text("run_id"),
        ForeignKeyConstraint(
            ["tenant_id", "run_id"], ["runs.tenant_id", "runs.run_id"], ondelete="CASCADE"
        ),
    )


def _of_operation() -> tuple[Column, Column, Column, ForeignKeyConstraint]:
    """Return the columns of what an operation carries."""
    return (
        _text("tenant_id"),
        _text("run_id"),
        _whole("seq"),
        ForeignKeyConstraint(
            ["tenant_id", "run_id", "seq"],
            ["operations.tenant_id", "operations.run_id", "operations.seq"],
            ondelete="CASCADE",
        ),
    )


sessions = _table(
    "sessions",
    _text("tenant_id"),
    _text("session_id"),
    _text("tags"),  # JSON
    _text("metadata"),  # JSON
    _text("project_id"),
    _text("display_name"),
    _real("created_s"),
    _real("seen_s"),
    Column("finished_s", REAL_64),
    _text("end_reason", ""),
    PrimaryKeyConstraint("tenant_id", "session_id"),
    UniqueConstraint("session_id", name="sessions_session_id"),  # of whichever tenant
)

runs = _table(
    "runs",
    *_of_session(),
    _text("run_id"),
    _whole("seq"),
    _text("base_model"),
    Column("spec", LargeBinary, nullable=False),
    _text("metadata"),  # JSON
    _text("optimizer"),  # JSON
    _real("created_s"),
    _real("used_s"),
    _whole("version", "0"),
    _whole("boundary_seq", "-1"),
    Column("state_path", Text),  # below the store's folder
    _text("state_kind", "fresh"),
    _whole("state_bytes", "0"),
    _text("adapter_hash", ""),
    _whole("journal_bytes", "0"),  # of payloads and results
    _whole("is_corrupted", "0"),
    Column("ended_s", REAL_64),
    PrimaryKeyConstraint("tenant_id", "run_id"),
    UniqueConstraint("run_id", name="runs_run_id"),  # paths of published checkpoints name no tenant
    UniqueConstraint("tenant_id", "session_id", "seq", name="runs_seq"),
    CheckConstraint("state_kind IN ('fresh', 'adapter', 'snapshot')", name="runs_state_kind"),
    CheckConstraint("(state_kind = 'fresh') = (state_path IS NULL)", name="runs_state_path"),
    CheckConstraint("journal_bytes >= 0", name="runs_journal_bytes"),
)

# accepted -> done | failed.
operations = _table(
    "operations",
    *_of_run(),
    _whole("seq"),
    _text("kind"),
    _text("request_id"),
    _text("digest"),  # of kind and payload
    _text("state"),
    _text("error", ""),
    _text("error_category", ""),
    _real("created_s"),
    Column("finished_s", REAL_64),
    PrimaryKeyConstraint("tenant_id", "run_id", "seq"),
    CheckConstraint("state IN ('accepted', 'done', 'failed')", name="operations_state"),
    CheckConstraint("(state = 'accepted') = (finished_s IS NULL)", name="operations_finished"),
    CheckConstraint("(state = 'failed') = (error <> '')", name="operations_error"),
)
Index(
    "operations_accepted",
    operations.c.tenant_id,
    operations.c.run_id,
    sqlite_where=operations.c.state == literal_column("'accepted'"),
    postgresql_where=operations.c.state == literal_column("'accepted'"),
)
Index(
    "operations_finished_s",
    operations.c.finished_s,
    sqlite_where=operations.c.finished_s.is_not(None),
    postgresql_where=operations.c.finished_s.is_not(None),
)

# Apart from their operations, which are read and changed without them.
operation_payloads = _table(
    "operation_payloads",
    *_of_operation(),
    _whole("num_bytes"),
    Column("payload", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "run_id", "seq"),
    has_long_rows=True,
)
operation_results = _table(
    "operation_results",
    *_of_operation(),
    _whole("num_bytes"),
    Column("result", LargeBinary, nullable=False),
    PrimaryKeyConstraint("tenant_id", "run_id", "seq"),
    has_long_rows=True,
)

# A checkpoint exists once its row does; its folder is complete before.
checkpoints = _table(
    "checkpoints",
    *_of_run(),
    _text("kind"),
    _text("name"),
    _whole("generation"),  # names its folder: another one when it is overwritten
    _whole("version"),
    _text("adapter_hash"),
    _whole("has_optimizer"),
    _whole("size_bytes"),
    _whole("is_public", "0"),
    _whole("is_ephemeral"),
    _text("metadata"),  # JSON
    _real("created_s"),
    _real("used_s"),
    Column("expires_s", REAL_64),
    PrimaryKeyConstraint("tenant_id", "run_id", "kind", "name"),
    CheckConstraint(
        "kind IN ('weights', 'sampler_weights', 'external_weights')", name="checkpoints_kind"
    ),
)

samplers = _table(
    "samplers",
    *_of_session(),
    _text("sampler_id"),
    _whole("seq"),
    _text("base_model"),
    Column("checkpoint_path", Text),
    _real("created_s"),
    _real("used_s"),
    PrimaryKeyConstraint("tenant_id", "sampler_id"),
    UniqueConstraint("tenant_id", "session_id", "seq", name="samplers_seq"),
)

# ---------------------------------------------------------------------------------------------

counters = _table(
    "counters",
    _text("tenant_id"),  # empty: the operator's own
    _text("name"),
    _whole("value"),
    PrimaryKeyConstraint("tenant_id", "name"),
)

events = _table(
    "events",
    _text("tenant_id"),
    _whole("seq"),  # 1, 2, 3, ... per tenant, without gaps
    _real("at_s"),
    _text("job"),
    _text("kind"),
    _text("data"),  # JSON
    PrimaryKeyConstraint("tenant_id", "seq"),
    CheckConstraint(
        "kind IN ('state', 'step', 'evaluation', 'notice', 'log', 'deleted')", name="events_kind"
    ),
    CheckConstraint("seq > 0", name="events_seq"),
    has_long_rows=True,
)
Index("events_of_job", events.c.tenant_id, events.c.job, events.c.seq)

USAGE_COLUMNS = (
    "sampled_tokens",
    "trained_tokens",
    "evaluated_tokens",
    "served_tokens",
    "prefill_tokens",
    "device_s",
    "sandbox_cpu_s",
)
"""Fields of `types.Usage`, in order."""

usage = _table(
    "usage",
    _text("tenant_id"),
    _text("job"),  # empty: outside jobs, or of jobs that were deleted
    _text("day"),  # UTC, 2026-12-01
    *(_real(name, "0") if name.endswith("_s") else _whole(name, "0") for name in USAGE_COLUMNS),
    _whole("group_bytes", "0"),  # of groups, and what it began from, stored that day
    PrimaryKeyConstraint("tenant_id", "job", "day"),
)
Index("usage_of_day", usage.c.tenant_id, usage.c.day)

# ---------------------------------------------------------------------------------------------

tenants = _table(
    "tenants",
    _text("tenant_id"),
    _real("weight"),
    _text("quotas"),  # JSON of `types.Quotas`
    _real("created_s"),
    PrimaryKeyConstraint("tenant_id"),
    CheckConstraint("weight > 0", name="tenants_weight"),
    CheckConstraint("tenant_id <> 'operator'", name="tenants_operator"),
)

api_keys = _table(
    "api_keys",
    _text("tenant_id"),
    _text("key_id"),
    _text("role"),
    _text("label"),
    _text("digest"),  # sha256 of the secret, hex; the secret is not kept
    _real("created_s"),
    Column("revoked_s", REAL_64),
    PrimaryKeyConstraint("tenant_id", "key_id"),
    UniqueConstraint("digest", name="api_keys_digest"),
    CheckConstraint("role IN ('tenant', 'operator')", name="api_keys_role"),
    CheckConstraint("(role = 'operator') = (tenant_id = 'operator')", name="api_keys_owner"),
)

uploads = _table(
    "uploads",
    _text("tenant_id"),
    _text("kind"),
    _text("digest"),  # sha256 of the content, hex; names its file
    _text("name"),  # the one it came under last
    _whole("size_bytes"),
    _whole("num_lines"),
    _real("created_s"),
    PrimaryKeyConstraint("tenant_id", "kind", "digest"),
    CheckConstraint("kind IN ('prompts', 'environment')", name="uploads_kind"),
)

upload_names = _table(
    "upload_names",
    _text("tenant_id"),
    _text("kind"),
    _text("name"),
    _text("digest"),
    PrimaryKeyConstraint("tenant_id", "kind", "name"),
    ForeignKeyConstraint(
        ["tenant_id", "kind", "digest"],
        ["uploads.tenant_id", "uploads.kind", "uploads.digest"],
        ondelete="CASCADE",
    ),
)

audit = _table(
    "audit",
    _whole("seq"),
    _real("at_s"),
    _text("actor"),
    _text("action"),
    _text("tenant_id"),
    _text("detail"),  # JSON
    PrimaryKeyConstraint("seq"),
)
