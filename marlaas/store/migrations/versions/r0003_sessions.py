"""Sessions of clients with their runs, operations, checkpoints and samplers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_WHOLE = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_REAL = sa.Double().with_variant(sa.REAL(), "sqlite")

_LONG_ROWS = {"sqlite_strict": True}
_SHORT_ROWS = {"sqlite_strict": True, "sqlite_with_rowid": False}


def upgrade() -> None:
    _create_sessions()
    _create_operations()
    _create_checkpoints()


# ---------------------------------------------------------------------------------------------


def _text(name: str, default: str | None = None) -> sa.Column:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


def _whole(name: str, default: str | None = None) -> sa.Column:
    literal = None if default is None else sa.text(default)
    return sa.Column(name, _WHOLE, nullable=False, server_default=literal)


def _real(name: str) -> sa.Column:
    return sa.Column(name, _REAL, nullable=False)


def _blob(name: str) -> sa.Column:
    return sa.Column(name, sa.LargeBinary, nullable=False)


def _hangs_on(table: str, *columns: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(
        columns, [f"{table}.{column}" for column in columns], ondelete="CASCADE"
    )


def _create_sessions() -> None:
    op.create_table(
        "sessions",
        _text("tenant_id"),
        _text("session_id"),
        _text("tags"),
        _text("metadata"),
        _text("project_id"),
        _text("display_name"),
        _real("created_s"),
        _real("seen_s"),
        sa.Column("finished_s", _REAL),
        _text("end_reason", ""),
        sa.PrimaryKeyConstraint("tenant_id", "session_id"),
        sa.UniqueConstraint("session_id", name="sessions_session_id"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "runs",
        _text("tenant_id"),
        _text("session_id"),
        _hangs_on("sessions", "tenant_id", "session_id"),
        _text("run_id"),
        _whole("seq"),
        _text("base_model"),
        _blob("spec"),
        _text("metadata"),
        _text("optimizer"),
        _real("created_s"),
        _real("used_s"),
        _whole("version", "0"),
        _whole("boundary_seq", "-1"),
        sa.Column("state_path", sa.Text),
        _text("state_kind", "fresh"),
        _whole("state_bytes", "0"),
        _text("adapter_hash", ""),
        _whole("journal_bytes", "0"),
        _whole("is_corrupted", "0"),
        sa.Column("ended_s", _REAL),
        sa.PrimaryKeyConstraint("tenant_id", "run_id"),
        sa.UniqueConstraint("run_id", name="runs_run_id"),
        sa.UniqueConstraint("tenant_id", "session_id", "seq", name="runs_seq"),
        sa.CheckConstraint(
            "state_kind IN ('fresh', 'adapter', 'snapshot')", name="runs_state_kind"
        ),
        sa.CheckConstraint("(state_kind = 'fresh') = (state_path IS NULL)", name="runs_state_path"),
        sa.CheckConstraint("journal_bytes >= 0", name="runs_journal_bytes"),
        **_SHORT_ROWS,
    )
    op.create_table(
        "samplers",
        _text("tenant_id"),
        _text("session_id"),
        _hangs_on("sessions", "tenant_id", "session_id"),
        _text("sampler_id"),
        _whole("seq"),
        _text("base_model"),
        sa.Column("checkpoint_path", sa.Text),
        _real("created_s"),
        _real("used_s"),
        sa.PrimaryKeyConstraint("tenant_id", "sampler_id"),
        sa.UniqueConstraint("tenant_id", "session_id", "seq", name="samplers_seq"),
        **_SHORT_ROWS,
    )


def _create_operations() -> None:
    op.create_table(
        "operations",
        _text("tenant_id"),
        _text("run_id"),
        _hangs_on("runs", "tenant_id", "run_id"),
        _whole("seq"),
        _text("kind"),
        _text("request_id"),
        _text("digest"),
        _text("state"),
        _text("error", ""),
        _text("error_category", ""),
        _real("created_s"),
        sa.Column("finished_s", _REAL),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "seq"),
        sa.CheckConstraint("state IN ('accepted', 'done', 'failed')", name="operations_state"),
        sa.CheckConstraint(
            "(state = 'accepted') = (finished_s IS NULL)", name="operations_finished"
        ),
        sa.CheckConstraint("(state = 'failed') = (error <> '')", name="operations_error"),
        **_SHORT_ROWS,
    )
    _index_where("operations_accepted", ["tenant_id", "run_id"], "state = 'accepted'")
    _index_where("operations_finished_s", ["finished_s"], "finished_s IS NOT NULL")
    for table, blob in (("operation_payloads", "payload"), ("operation_results", "result")):
        op.create_table(
            table,
            _text("tenant_id"),
            _text("run_id"),
            _whole("seq"),
            _hangs_on("operations", "tenant_id", "run_id", "seq"),
            _whole("num_bytes"),
            _blob(blob),
            sa.PrimaryKeyConstraint("tenant_id", "run_id", "seq"),
            **_LONG_ROWS,
        )


def _index_where(name: str, columns: list[str], condition: str) -> None:
    where = sa.text(condition)
    op.create_index(name, "operations", columns, sqlite_where=where, postgresql_where=where)


def _create_checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("tenant_id"),
        _text("run_id"),
        _hangs_on("runs", "tenant_id", "run_id"),
        _text("kind"),
        _text("name"),
        _whole("generation"),
        _whole("version"),
        _text("adapter_hash"),
        _whole("has_optimizer"),
        _whole("size_bytes"),
        _whole("is_public", "0"),
        _whole("is_ephemeral"),
        _text("metadata"),
        _real("created_s"),
        _real("used_s"),
        sa.Column("expires_s", _REAL),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "kind", "name"),
        sa.CheckConstraint(
            "kind IN ('weights', 'sampler_weights', 'external_weights')", name="checkpoints_kind"
        ),
        **_SHORT_ROWS,
    )
