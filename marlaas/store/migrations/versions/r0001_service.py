"""The first schema under Alembic: jobs, and what a service needs around them.

A SQLite file that was made before migrations existed is taken over: its rows are copied into the
new tables, and what the new columns count is counted from the stored trajectories.
"""

from datetime import UTC, datetime

import msgspec
import sqlalchemy as sa
from alembic import op

from marlaas.errors import StoreUnavailable
from marlaas.store.codec import decode
from marlaas.store.groups import sampling_usage, summary_columns
from marlaas.types import Group

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL = sa.Double().with_variant(sa.REAL(), "sqlite")

_LONG_ROWS = {"sqlite_strict": True}
_SHORT_ROWS = {"sqlite_strict": True, "sqlite_with_rowid": False}

_OLD_TABLES = ("groups", "steps", "evaluations", "versions", "jobs")
"""Tables from before migrations, children first."""


def upgrade() -> None:
    connection = op.get_bind()
    there = set(sa.inspect(connection).get_table_names())
    has_old = set(_OLD_TABLES) <= there
    if has_old:
        op.execute("DROP INDEX IF EXISTS unfinished_jobs")
        for name in _OLD_TABLES:
            op.rename_table(name, f"old_{name}")
    _create_job_tables()
    _create_history_tables()
    _create_tenant_tables()
    if has_old:
        _take_over(connection)
        for name in _OLD_TABLES:
            op.drop_table(f"old_{name}")


# ---------------------------------------------------------------------------------------------


def _text(name: str, default: str | None = None) -> sa.Column:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _whole(name: str, default: str | None = None) -> sa.Column:
    literal = None if default is None else sa.text(default)
    return sa.Column(name, _WHOLE, nullable=False, server_default=literal)


def _real(name: str, default: str | None = None) -> sa.Column:
    literal = None if default is None else sa.text(default)
    return sa.Column(name, _REAL, nullable=False, server_default=literal)


def _of_job() -> tuple[sa.Column, sa.Column, sa.ForeignKeyConstraint]:
    return (
        _text("tenant_id"),
        _text("job"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job"], ["jobs.tenant_id", "jobs.name"], ondelete="CASCADE"
        ),
    )


def _create_job_tables() -> None:
    op.create_table(
        "jobs",
        _text("tenant_id"),
        _text("name"),
        _text("state", "queued"),
        _text("reason", ""),
        _whole("step", "0"),
        _real("elapsed_s", "0"),
        _real("created_s"),
        _whole("position"),
        sa.Column("promoted", _WHOLE),
        sa.Column("idempotency_key", sa.Text),
        sa.Column("spec", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "name"),
        sa.UniqueConstraint("position", name="jobs_position"),
        sa.UniqueConstraint("tenant_id", "idempotency_key", name="jobs_idempotency_key"),
        sa.CheckConstraint(
            "state IN ('queued', 'running', 'paused', 'done', 'held', 'failed', 'cancelled')",
            name="jobs_state",
        ),
        sa.CheckConstraint("step >= 0", name="jobs_step"),
        **_LONG_ROWS,
    )
    op.create_table(
        "groups",
        *_of_job(),
        _whole("idx"),
        _text("state"),
        _text("reason", ""),
        _whole("version"),
        sa.Column("step", _WHOLE),
        _whole("num_trajectories", "0"),
        _whole("num_tokens", "0"),
        sa.Column("reward_mean", _REAL),
        sa.Column("success_mean", _REAL),
        _whole("record_bytes", "0"),
        sa.PrimaryKeyConstraint("tenant_id", "job", "idx"),
        sa.CheckConstraint(
            "state IN ('open', 'finished', 'trained', 'dropped')", name="groups_state"
        ),
        sa.CheckConstraint("(state = 'open') = (record_bytes = 0)", name="groups_record"),
        sa.CheckConstraint(
            "(state IN ('trained', 'dropped')) = (step IS NOT NULL)", name="groups_step"
        ),
        sa.CheckConstraint("(state = 'dropped') = (reason <> '')", name="groups_reason"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "group_records",
        _text("tenant_id"),
        _text("job"),
        _whole("idx"),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "job", "idx"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "job", "idx"],
            ["groups.tenant_id", "groups.job", "groups.idx"],
            ondelete="CASCADE",
        ),
        **_LONG_ROWS,
    )
    op.create_table(
        "steps",
        *_of_job(),
        _whole("step"),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "job", "step"),
        **_LONG_ROWS,
    )
    op.create_table(
        "evaluations",
        *_of_job(),
        _whole("version"),
        sa.Column("success", _REAL),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "job", "version"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "versions",
        *_of_job(),
        _whole("version"),
        _text("adapter_hash"),
        _real("created_s"),
        _whole("has_state", "0"),
        _whole("has_adapter", "0"),
        _whole("state_bytes", "0"),
        _whole("adapter_bytes", "0"),
        sa.Column("expires_s", _REAL),
        sa.PrimaryKeyConstraint("tenant_id", "job", "version"),
        sa.CheckConstraint("has_state IN (0, 1) AND has_adapter IN (0, 1)", name="versions_has"),
        **_SHORT_ROWS,
    )
    on_disk = sa.text("has_state = 1 OR has_adapter = 1")
    op.create_index(
        "versions_on_disk",
        "versions",
        ["tenant_id", "job"],
        sqlite_where=on_disk,
        postgresql_where=on_disk,
    )
    op.create_table(
        "job_uploads",
        *_of_job(),
        _text("digest"),
        sa.PrimaryKeyConstraint("tenant_id", "job", "digest"),
        **_SHORT_ROWS,
    )
    op.create_index("job_uploads_digest", "job_uploads", ["tenant_id", "digest"])


def _create_history_tables() -> None:
    op.create_table(
        "counters",
        _text("tenant_id"),
        _text("name"),
        _whole("value"),
        sa.PrimaryKeyConstraint("tenant_id", "name"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "events",
        _text("tenant_id"),
        _whole("seq"),
        _real("at_s"),
        _text("job"),
        _text("kind"),
        _text("data"),
        sa.PrimaryKeyConstraint("tenant_id", "seq"),
        sa.CheckConstraint(
            "kind IN ('state', 'step', 'evaluation', 'notice', 'log', 'deleted')",
            name="events_kind",
        ),
        sa.CheckConstraint("seq > 0", name="events_seq"),
        **_LONG_ROWS,
    )
    op.create_index("events_of_job", "events", ["tenant_id", "job", "seq"])
    op.create_table(
        "usage",
        _text("tenant_id"),
        _text("job"),
        _text("day"),
        _whole("sampled_tokens", "0"),
        _whole("trained_tokens", "0"),
        _whole("evaluated_tokens", "0"),
        _whole("served_tokens", "0"),
        _whole("prefill_tokens", "0"),
        _real("device_s", "0"),
        _real("sandbox_cpu_s", "0"),
        _whole("group_bytes", "0"),
        sa.PrimaryKeyConstraint("tenant_id", "job", "day"),
        **_SHORT_ROWS,
    )
    op.create_index("usage_of_day", "usage", ["tenant_id", "day"])


def _create_tenant_tables() -> None:
    op.create_table(
        "tenants",
        _text("tenant_id"),
        _real("weight"),
        _text("quotas"),
        _real("created_s"),
        sa.PrimaryKeyConstraint("tenant_id"),
        sa.CheckConstraint("weight > 0", name="tenants_weight"),
        sa.CheckConstraint("tenant_id <> 'operator'", name="tenants_operator"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "api_keys",
        _text("tenant_id"),
        _text("key_id"),
        _text("role"),
        _text("label"),
        _text("digest"),
        _real("created_s"),
        sa.Column("revoked_s", _REAL),
        sa.PrimaryKeyConstraint("tenant_id", "key_id"),
        sa.UniqueConstraint("digest", name="api_keys_digest"),
        sa.CheckConstraint("role IN ('tenant', 'operator')", name="api_keys_role"),
        sa.CheckConstraint("(role = 'operator') = (tenant_id = 'operator')", name="api_keys_owner"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "uploads",
        _text("tenant_id"),
        _text("kind"),
        _text("digest"),
        _text("name"),
        _whole("size_bytes"),
        _whole("num_lines"),
        _real("created_s"),
        sa.PrimaryKeyConstraint("tenant_id", "kind", "digest"),
        sa.CheckConstraint("kind IN ('prompts', 'environment')", name="uploads_kind"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "upload_names",
        _text("tenant_id"),
        _text("kind"),
        _text("name"),
        _text("digest"),
        sa.PrimaryKeyConstraint("tenant_id", "kind", "name"),
        sa.ForeignKeyConstraint(
            ["tenant_id", "kind", "digest"],
            ["uploads.tenant_id", "uploads.kind", "uploads.digest"],
            ondelete="CASCADE",
        ),
        **_SHORT_ROWS,
    )
    op.create_table(
        "audit",
        _whole("seq"),
        _real("at_s"),
        _text("actor"),
        _text("action"),
        _text("tenant_id"),
        _text("detail"),
        sa.PrimaryKeyConstraint("seq"),
        **_SHORT_ROWS,
    )


# ---------------------------------------------------------------------------------------------
# A store from before migrations


def _take_over(connection: sa.Connection) -> None:
    """Copy the old rows, and count from the stored groups what was not counted then."""
    copied = (
        "INSERT INTO jobs (tenant_id, name, state, reason, step, elapsed_s, created_s, position, "
        "spec) SELECT tenant_id, name, state, reason, step, elapsed_s, created_s, "
        "row_number() OVER (ORDER BY rowid), spec FROM old_jobs",
        "INSERT INTO groups (tenant_id, job, idx, state, reason, version, step, record_bytes) "
        "SELECT tenant_id, job, idx, state, reason, version, step, coalesce(length(record), 0) "
        "FROM old_groups",
        "INSERT INTO group_records SELECT tenant_id, job, idx, record FROM old_groups "
        "WHERE record IS NOT NULL",
        "INSERT INTO steps SELECT tenant_id, job, step, record FROM old_steps",
        "INSERT INTO evaluations SELECT tenant_id, job, version, success, record "
        "FROM old_evaluations",
        "INSERT INTO versions (tenant_id, job, version, adapter_hash, created_s, has_state, "
        "has_adapter) SELECT old.tenant_id, old.job, old.version, old.adapter_hash, "
        "jobs.created_s, old.has_state, old.has_adapter FROM old_versions AS old JOIN jobs "
        "ON jobs.tenant_id = old.tenant_id AND jobs.name = old.job",
        "INSERT INTO counters SELECT '', 'jobs', count(*) FROM jobs",
        "INSERT INTO events SELECT tenant_id, "
        "row_number() OVER (PARTITION BY tenant_id ORDER BY position), created_s, name, 'state', "
        "json_object('state', state, 'reason', reason) FROM jobs",
        "INSERT INTO counters SELECT tenant_id, 'events', count(*) FROM events GROUP BY tenant_id",
    )
    for statement in copied:
        connection.exec_driver_sql(statement)
    jobs = connection.exec_driver_sql("SELECT tenant_id, name, created_s FROM jobs").all()
    for tenant_id, name, created_s in jobs:
        _count_job(connection, tenant_id, name, created_s)


def _count_job(connection: sa.Connection, tenant_id: str, name: str, created_s: float) -> None:
    """Fill the summaries of a job's groups, and its usage, as of the day it was submitted."""
    sampled = prefill = trained = num_bytes = 0
    indices = connection.exec_driver_sql(
        "SELECT idx FROM group_records WHERE tenant_id = ? AND job = ?",
        (tenant_id, name),
    ).scalars().all()  # fmt: skip
    for index in indices:
        key = (tenant_id, name, index)
        where = "WHERE tenant_id = ? AND job = ? AND idx = ?"
        state, blob = connection.exec_driver_sql(
            "SELECT state, record FROM groups JOIN group_records USING (tenant_id, job, idx) "
            f"{where}",
            key,
        ).one()
        try:
            group = decode(blob, Group)
        except msgspec.MsgspecError as error:
            raise StoreUnavailable(
                f"group {index} of {tenant_id}/{name} is damaged ({error}): nothing was changed"
            ) from error
        columns = summary_columns(group)
        connection.exec_driver_sql(
            "UPDATE groups SET num_trajectories = ?, num_tokens = ?, reward_mean = ?, "
            f"success_mean = ? {where}",
            (columns["num_trajectories"], columns["num_tokens"], columns["reward_mean"],
             columns["success_mean"], *key),
        )  # fmt: skip
        used = sampling_usage(group)
        sampled += used.sampled_tokens
        prefill += used.prefill_tokens
        trained += columns["num_tokens"] if state == "trained" else 0
        num_bytes += len(blob)
    connection.exec_driver_sql(
        "INSERT INTO usage (tenant_id, job, day, sampled_tokens, trained_tokens, prefill_tokens, "
        "group_bytes) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (tenant_id, name, datetime.fromtimestamp(created_s, UTC).date().isoformat(), sampled,
         trained, prefill, num_bytes),
    )  # fmt: skip
