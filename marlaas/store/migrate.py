"""Brings a database to the schema of this release when it is opened.

    empty | made before migrations existed | older ──► HEAD          newer ──► refused

Alembic is loaded only when there is something to do: a store that is current opens without it. All
steps of one upgrade are a single transaction on both databases, so a kill leaves the old schema.
"""

from pathlib import Path

import sqlalchemy as sa

from marlaas.errors import StoreUnavailable

HEAD = "0003"
"""Newest revision in `migrations/versions`; a test compares."""

FOLDER = Path(__file__).parent / "migrations"

_UPGRADE_LOCK = 5_605_270_801
"""Key of the PostgreSQL advisory lock that lets one server upgrade while others wait."""


def upgrade(connection: sa.Connection, begin: str) -> None:
    """Bring the schema to `HEAD`; `begin` is the statement that begins a writing transaction.

    Raises:
        StoreUnavailable: a newer release has upgraded this database.
    """
    if _revision(connection) == HEAD:
        return
    connection.exec_driver_sql(begin)
    try:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK})")
        if _revision(connection) != HEAD:  # nobody else was faster
            _run(connection)
        connection.exec_driver_sql("COMMIT")
    except BaseException:
        connection.rollback()
        raise


def _revision(connection: sa.Connection) -> str | None:
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def _run(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    revision = _revision(connection)
    if revision is not None and revision not in known:
        raise StoreUnavailable(
            f"this database has schema {revision}, made by a newer MARLaaS; this one knows "
            f"schemas up to {HEAD}: upgrade the package, or restore a backup from before"
        )
    command.upgrade(config, "head")
